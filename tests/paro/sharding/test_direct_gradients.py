"""Matmuls write weight gradients into their flat buffers: no pass over gradients copies or adds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model import cross_entropy, layers
from paro.arguments.parser import parse_args
from paro.config.run import RunConfig
from paro.distributed.control import Control
from paro.distributed.world import World
from paro.training.assembly import build_data, build_sources, build_training, start_state
from paro.training.step import Training
from tests.helpers.training import TINY

MATMULS = {"aten::mm", "aten::addmm"}


class Passes(TorchDispatchMode):
    """Counts elements of gradient buffers that operations other than matmuls write."""

    def __init__(self, buffers: dict[int, str]) -> None:
        super().__init__()
        self._buffers = buffers
        self.written: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name not in MATMULS and func._schema.is_mutable:
            tensor = (kwargs or {}).get("out", args[0] if args else None)
            if isinstance(tensor, Tensor):
                unit = self._buffers.get(tensor.untyped_storage().data_ptr())
                if unit is not None:
                    self.written[unit] = self.written.get(unit, 0) + tensor.numel()
        return out


def training_of(more: str) -> tuple[RunConfig, Training]:
    world = World()
    words = f"{TINY} --global-batch-size 2 --train-iters 1 {more}"
    config = RunConfig.from_args(parse_args(words.split()), world)
    return config, build_training(config, Control(world, torch.device("cpu")))


def passes(more: str) -> dict[str, int]:
    """Elements written by other operations than matmuls, in 2 micro-batches, by unit."""
    config, training = training_of(more)
    model = training.model
    buffers = {unit.grad_shard.untyped_storage().data_ptr(): unit.name for unit in model.units}
    source = build_sources(config, build_data(config), training, start_state(config)).train
    model.begin_step(2)
    counted = Passes(buffers)
    for index in range(2):
        batch = next(source)
        with counted:
            model.forward_backward(
                batch.tokens_BS, batch.labels_BS, batch.loss_mask_BS, last=index == 1
            )
    training.close()
    return counted.written


@pytest.mark.parametrize(
    "more", ["", "--bf16 --grad-reduce-in-bf16", "--recompute-granularity full"]
)
def test_only_norms_are_copied_and_added(more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = passes(more)
    for module in (layers, cross_entropy):
        monkeypatch.setattr(module, "sink_of", lambda _: None)
    before = passes(more)
    blocks = [name for name in found if name.startswith("blocks.")]
    assert len(blocks) == 3
    for name in blocks:
        assert found[name] == 2 * 2 * 20, "two norms of 20, in two micro-batches"
        assert before[name] == 2 * (4 * 20 * 20 + 3 * 20 * 37 + 2 * 20), "every gradient"
    # The output layer's gradient is scaled in the pass that writes it.
    assert found["head"] == before["head"] == 2 * (60 * 20 + 20)
