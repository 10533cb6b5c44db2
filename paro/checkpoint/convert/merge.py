"""Merges adapters into the weights that they stand beside, a few rows at a time and in fp32."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from model.config import LlamaConfig
from model.lora_config import down_name, up_name
from paro.checkpoint.convert.source import LazyTensor


def merged(config: LlamaConfig, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The tensors of a model with adapters as those of one without; merged ones are fp32."""
    lora = config.lora
    assert lora is not None, "no adapters"
    found = dict(tensors)
    for layer in range(config.num_layers):
        for target in lora.targets:
            weight = f"blocks.{layer}.{target}"
            down, up = found.pop(down_name(weight)), found.pop(up_name(weight))
            found[weight] = _sum(found[weight], down, up, lora.scaling)
    return found


def _sum(weight: LazyTensor, down: LazyTensor, up: LazyTensor, scaling: float) -> LazyTensor:
    def rows(start: int, stop: int) -> Tensor:
        product = up.rows(start, stop).float() @ down.whole(torch.float32)
        return weight.rows(start, stop).float().add_(product, alpha=scaling)

    return LazyTensor(shape=weight.shape, dtype=torch.float32, rows=rows)
