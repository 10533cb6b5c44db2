"""Bits that flip in memory: the run names them and stops before they are saved."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.faults.conftest import Scenario

pytestmark = [pytest.mark.verify, pytest.mark.ranks]


@dataclass(frozen=True, slots=True)
class FlippedBit:
    """For `before`: after a step, a bit of rank 1's memory has flipped."""

    step: int
    state: str

    def __call__(self) -> None:
        from paro.training import loop

        train_step = loop.train_step

        def stepped(training: Any, state: Any, *args: Any, **named: Any) -> Any:
            result = train_step(training, state, *args, **named)
            if os.environ["RANK"] == "1" and state.iteration == self.step:
                self._flip(training)
            return result

        loop.train_step = stepped

    def _flip(self, training: Any) -> None:
        training.model.wait_for_updated_params()
        values = training.model.units[1].param_shard
        if self.state != "params":
            states = training.optimizer.flat_shards()
            values = next(shard.values for shard in states if shard.state == self.state)
        values.view(torch.uint8)[1234] ^= 4


@pytest.mark.parametrize(
    ("strategy", "state", "told"),
    [
        ("NNG", "params", "the parameters of blocks.0 differs between ranks 0, 1"),
        ("NNN", "param", "the parameters of embedding differs between ranks 0, 1"),
        ("NNN", "exp_avg", "exp_avg of embedding.weight differs between ranks 0, 1"),
    ],
)
def test_a_flipped_bit(scenario: Scenario, strategy: str, state: str, told: str) -> None:
    """Replicas are compared every third step, before each save."""
    flags = ["--check-weight-hash-across-dp-replicas-interval", 3, "--paro-strategy", strategy]
    scenario.strikes()
    job = scenario.start(*flags, before=[FlippedBit(6, state)])
    scenario.ends(job, [1], f"after iteration 6 {told}", within=30.0)
    assert scenario.run.saved() == 3
    if strategy == "NNG":
        scenario.resumes(3)
