"""Merges adapters into the weights that they stand beside, a few rows at a time and in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from model.lora_config import LoraConfig, down_name, up_name
from paro.checkpoint.convert.source import LazyTensor, Source


def with_adapters(source: Source, lora: LoraConfig, adapters: Mapping[str, LazyTensor]) -> Source:
    """A model with adapters: they are kept, and merged into its tensors, which become fp32."""
    tensors = dict(source.tensors)
    for name, up in adapters.items():
        weight = name.removesuffix("_lora_b")
        if name == up_name(weight):
            down = adapters[down_name(weight)]
            tensors[weight] = _sum(tensors[weight], down, up, lora.scaling)
    return replace(source, tensors=tensors, lora=lora, adapters=adapters)


def _sum(weight: LazyTensor, down: LazyTensor, up: LazyTensor, scaling: float) -> LazyTensor:
    def rows(start: int, stop: int) -> Tensor:
        product = up.rows(start, stop).float() @ down.whole(torch.float32)
        return weight.rows(start, stop).float().add_(product, alpha=scaling)

    return LazyTensor(shape=weight.shape, dtype=torch.float32, rows=rows)
