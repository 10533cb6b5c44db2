"""With this project's collectives, training equals one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch

from paro.collectives import schedule
from paro.collectives.choice import AlgorithmChoice
from paro.collectives.executor import ALGORITHMS
from paro.collectives.schedule import Op
from paro.planning.machine.files import machine_to_json
from paro.planning.machine.machine import Machine, Measured
from paro.strategy import legal_letters
from paro.topology import Axes
from paro.training import assembly
from tests.helpers.ranks import HANGS_AFTER, run_ranks
from tests.helpers.training import Trained, train
from tests.paro.test_parity import assert_formulas, assert_same, flags_for

GROUP_SIZE = 4
PIPELINE = "pipeline"  # ho-ring as it runs under nccl
CROSSING_BOTH = [("NIG", "ho-ring"), ("IGG", "h-ring"), ("NNG", "ring"), ("IIG", PIPELINE)]


def train_in_pieces(cases: Sequence[str]) -> list[Trained]:
    """Trains each with shards cut into pieces, as the shards of a real model are."""
    with (
        mock.patch.object(schedule, "_PIECE_BYTES", 1024),
        mock.patch.object(schedule, "_LEAST_PIECE_BYTES", 128),
    ):
        return [train(flags, group_size=GROUP_SIZE) for flags in cases]


def train_in_pipelines(cases: Sequence[str]) -> list[Trained]:
    """Trains each by the backend's own collectives, in three pieces."""
    choice = AlgorithmChoice(names=("ho-ring",), pieces=lambda *_: 3)
    with mock.patch.object(assembly, "_algorithm", return_value=choice):
        return [train(flags, group_size=GROUP_SIZE) for flags in cases]


def check(
    pairs: Sequence[tuple[str, str]], *, iterations: int, timeout: float, times: int = 1
) -> None:
    """Trained several times, all have the same bits."""
    same = f"--train-iters {iterations}"
    pairs = sorted(pairs, key=lambda pair: pair[1] == PIPELINE)
    cases = [
        flags_for(
            strategy,
            world_size=8,
            more=f"--paro-collective {collective.replace(PIPELINE, 'ho-ring')} {same}",
        )
        for strategy, collective in pairs
    ]
    num_rings = sum(collective != PIPELINE for _, collective in pairs)
    once, *others = (
        [
            [*rings, *pipelines]
            for rings, pipelines in zip(
                run_ranks(train_in_pieces, 8, cases[:num_rings], timeout=timeout),
                run_ranks(train_in_pipelines, 8, cases[num_rings:], timeout=timeout),
                strict=True,
            )
        ]
        for _ in range(times)
    )
    reference = train(flags_for("GGG", world_size=1, more=same))
    for number, (strategy, collective) in enumerate(pairs):
        label = f"{strategy} by {collective}"
        for rank, by_rank in enumerate(once):
            assert_same(by_rank[number], reference, label)
            for again in (other[rank][number] for other in others):
                losses = [step.loss for step in by_rank[number].steps]
                assert losses == [step.loss for step in again.steps], label
                for name, parameter in by_rank[number].parameters.items():
                    assert torch.equal(parameter, again.parameters[name]), f"{label}: {name}"
            if collective != "ring":  # whose last rank of a group sends all bytes between groups
                assert_formulas(by_rank[number], cases[number], 8, GROUP_SIZE)


@pytest.mark.ranks
def test_one_of_each() -> None:
    check(CROSSING_BOTH, iterations=2, timeout=HANGS_AFTER)


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
    flags = f"--train-iters 3 --paro-collective auto --paro-machine {tmp_path / 'machine.json'}"
    trained = run_ranks(train, 4, flags_for("GGG", world_size=4, more=flags), group_size=2)
    reference = train(flags_for("GGG", world_size=1, more="--train-iters 3"))
    for by_rank in trained:
        assert_same(by_rank, reference, "auto")


@pytest.mark.verify
@pytest.mark.ranks
@pytest.mark.parametrize("collective", [*ALGORITHMS, PIPELINE])
def test_all_strategies(collective: str) -> None:
    pairs = [(strategy, collective) for strategy in legal_letters()]
    check(pairs, iterations=10, timeout=1200, times=2)
