"""Merges adapters into the weights that they stand beside, a few rows at a time and in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from model.lora_config import LoraConfig, down_name, up_name
from paro.checkpoint.convert.source import LazyTensor, Source


def with_adapters(
    source: Source,
    lora: LoraConfig | None,
    adapters: Mapping[str, LazyTensor],
    scalings: Mapping[str, float],
) -> Source:
    """A model with adapters: they are kept, and merged into its tensors, which become fp32.

    `scalings` are by the weights that have adapters; `lora` is None if no run has such adapters.
    """
    tensors = dict(source.tensors)
    for weight, scaling in scalings.items():
        down, up = adapters[down_name(weight)], adapters[up_name(weight)]
        tensors[weight] = _sum(tensors[weight], down, up, scaling)
    return replace(source, tensors=tensors, lora=lora, adapters=adapters)


def _sum(weight: LazyTensor, down: LazyTensor, up: LazyTensor, scaling: float) -> LazyTensor:
    def rows(start: int, stop: int) -> Tensor:
        product = up.rows(start, stop).float() @ down.whole(torch.float32)
        return weight.rows(start, stop).float().add_(product, alpha=scaling)

    return LazyTensor(shape=weight.shape, dtype=torch.float32, rows=rows)
