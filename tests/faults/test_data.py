"""Faults of data: a corpus cut short, indices never finished, bits that flip in memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.conftest import Scenario
from tests.faults.job import LIMIT_SECONDS, Point, Run
from tests.helpers.corpora import write_corpus

pytestmark = [pytest.mark.verify, pytest.mark.ranks]


@pytest.fixture
def corpus(scenario: Scenario, tmp_path: Path) -> None:
    """One process trains on a corpus."""
    prefix = write_corpus(tmp_path / "corpus", [[list(range(100)) * 100]])
    scenario.ranks, scenario.plain = 1, True
    scenario.flags = ("--data-path", prefix, "--split", "8,1,1")


@pytest.mark.usefixtures("corpus")
@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_truncated_data(scenario: Scenario, suffix: str, tmp_path: Path) -> None:
    assert scenario.start("--exit-interval", 4).end(60.0) == [0]
    path = tmp_path / f"corpus{suffix}"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 5])
    scenario.strikes()
    scenario.ends(scenario.start(), [2], f"corpus{suffix}", within=30.0)
    path.write_bytes(whole)
    scenario.resumes(4)


@pytest.mark.usefixtures("corpus")
@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_data_cut_short_in_a_step(scenario: Scenario, suffix: str, tmp_path: Path) -> None:
    """While it is open. The order in the cache is built again by the next start."""
    job = scenario.paused(Point.READ_SAMPLE, 60)
    paths = list(tmp_path.rglob(f"*{suffix}"))
    contents = [path.read_bytes() for path in paths]
    for path in paths:
        os.truncate(path, 100)
    scenario.run.release()
    scenario.ends(job, [2], "another program has shortened it", within=30.0)
    if suffix == ".bin":
        paths[0].write_bytes(contents[0])
    scenario.resumes(6)


@pytest.mark.usefixtures("corpus")
def test_a_stuck_builder_of_indices(scenario: Scenario, tmp_path: Path) -> None:
    """Another run holds the lock of the corpus."""
    builder, first = scenario.paused(Point.BUILD_INDEX, 1), scenario.run
    scenario.run = Run(tmp_path / "other")
    waiting = scenario.start()
    told = f"for process {builder.pids()[0]} of this machine, which builds indices and holds the"
    scenario.ends(waiting, [1], told, within=LIMIT_SECONDS + 20)
    first.release()
    assert builder.end(30.0) == [0]
    scenario.resumes(0)
    assert first.final_sums() == scenario.run.final_sums()


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
