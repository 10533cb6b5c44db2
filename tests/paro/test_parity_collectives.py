"""With this project's collectives, training equals one process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch

from paro.collectives import schedule
from paro.collectives.choice import AlgorithmChoice
from paro.collectives.hops import ALGORITHMS
from paro.collectives.schedule import Op
from paro.machine.files import machine_to_json
from paro.machine.machine import Machine, Measured
from paro.strategy import legal_letters
from paro.topology import Axes
from paro.training import assembly
from tests.helpers.comparison import assert_same
from tests.helpers.ranks import run_ranks
from tests.helpers.training import Trained, train
from tests.helpers.warm_process import HANGS_AFTER
from tests.paro.test_parity import (
    assert_formulas,
    compared,
    flags_for,
    reference_for,
)

PIPELINE = "pipeline"  # ho-ring as it runs under nccl
CROSSING_BOTH = [("NIG", "ho-ring"), ("IGG", "h-ring"), ("NNG", "ring"), ("IIG", PIPELINE)]


def train_each(cases: Sequence[tuple[str, str]], group_size: int) -> list[Trained]:
    """Trains each with shards cut into chunks, as the shards of a real model are."""
    choice = AlgorithmChoice(names=("ho-ring",), num_chunks=lambda *_: 3)
    trained = []
    for flags, collective in cases:
        with (
            mock.patch.object(schedule, "_CHUNK_BYTES", 1024),
            mock.patch.object(schedule, "_LEAST_CHUNK_BYTES", 128),
            mock.patch.object(assembly, "choice_of", return_value=choice)
            if collective == PIPELINE
            else nullcontext(),
        ):
            trained.append(train(flags, group_size=group_size))
    return trained


def check(pairs: Sequence[tuple[str, str]], world_size: int, *, steps: int, times: int = 1) -> None:
    """In two groups; trained several times, all have the same bits."""
    cases = []
    for strategy, collective in pairs:
        more = f"--paro-collective {collective.replace(PIPELINE, 'ho-ring')}"
        cases.append(
            (flags_for(strategy, world_size=world_size, more=more, steps=steps), collective)
        )
    seconds = times * HANGS_AFTER
    once, *others = (
        run_ranks(train_each, world_size, cases, world_size // 2, timeout=seconds)
        for _ in range(times)
    )
    for rank, by_rank in enumerate(once):
        for number, (trained, (flags, collective)) in enumerate(zip(by_rank, cases, strict=True)):
            assert_same(trained, reference_for(steps=steps), flags)
            for again in (other[rank][number] for other in others):
                assert [one.loss for one in trained.steps] == [one.loss for one in again.steps]
                for name, parameter in trained.parameters.items():
                    assert torch.equal(parameter, again.parameters[name]), f"{flags}: {name}"
            if collective != "ring":  # whose last rank of a group sends all bytes between groups
                assert_formulas(trained, flags, world_size, world_size // 2)


@pytest.mark.ranks
def test_one_of_each() -> None:
    check(CROSSING_BOTH, 4, steps=2)


@pytest.mark.ranks
def test_chosen_by_size(tmp_path: Path) -> None:
    """One run with small messages by one algorithm and large ones by another."""
    times = {"h-ring": (1e-3, 1e-1), "ho-ring": (2e-3, 5e-2), "native": (3e-3, 1e-3)}
    rows = tuple(
        Measured(axes=axes, op=op, algorithm=name, bytes=size, seconds=seconds)
        for name, both in times.items()
        for size, seconds in zip((2_000, 200_000), both, strict=True)
        for op in Op
        for axes in Axes
    )
    machine = Machine(name="m", source="typed", world_size=4, group_size=2, measured=rows)
    (tmp_path / "machine.json").write_text(machine_to_json(machine))
    auto = f"--paro-collective auto --paro-machine {tmp_path / 'machine.json'}"
    assert len([*compared(4, 2, [("GGG", auto, ())], 3)]) == 4


@pytest.mark.verify
@pytest.mark.ranks
@pytest.mark.parametrize("collective", [*ALGORITHMS, PIPELINE])
def test_all_strategies(collective: str) -> None:
    pairs = [(strategy, collective) for strategy in legal_letters()]
    check(pairs, 8, steps=10, times=2)
