"""Late comm streams on gloo ranks: training on NCCL's code path has the bits of no overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch
from zlib import crc32

import pytest
import torch
import torch.distributed as dist

from paro.collectives.choice import AlgorithmChoice
from paro.collectives.schedule import Op
from paro.config.run import RunConfig
from paro.distributed import groups
from paro.distributed.comm_stream import CommStreams, InlineStreams
from paro.errors import RunError
from paro.machine.collective_time import choice_of
from paro.strategy import legal_letters
from paro.topology import Axes
from paro.training import assembly
from paro.training.evaluation import evaluate
from paro.training.replicas import check_replicas
from paro.training.step import StepResult, Training, train_step
from tests.helpers import training as training_of_tests
from tests.helpers.late_streams import LateStreams, poisoned_buffers
from tests.helpers.ranks import run_ranks, stop_ranks
from tests.helpers.training import TINY, Trained, begun, save_run, train
from tests.paro.late_mutations import (
    AHEAD,
    AT_THE_SAVE,
    AUTO,
    CAUGHT,
    CODES,
    ELSEWHERE,
    FOLDER,
    FULL,
    HO_RING,
    IN_PLACE,
    MODULES,
    MUTATIONS,
    OFFLOAD,
    OUTER,
    OUTER_CODES,
    ROTATE,
    SAVED,
    Mutation,
    Wait,
    all_waits,
)

SEEDS = (0, 1, 2)
# A strategy, flags and a seed: some jobs of seed 1 run at submit.
FEW = (
    ("IIG", f"{OFFLOAD} {SAVED} {AHEAD}", 0),
    ("GGG", HO_RING, 1),
    ("NII", OUTER, 0),
)
MORE = (
    *("", "--bf16", "--bf16 --recompute-granularity selective", FULL),
    *(SAVED, f"{SAVED} --async-save", HO_RING, f"{HO_RING} --bf16 {FULL}"),
    *("--paro-collective flat", AUTO, ROTATE, IN_PLACE, f"{ROTATE} --bf16 {FULL}"),
    *(CODES, f"{CODES} {SAVED} --async-save", f"{CODES} {HO_RING}", f"{CODES} {ROTATE}"),
    *(OUTER, f"{OUTER} {OUTER_CODES} --bf16", f"{SAVED} {OUTER} {AT_THE_SAVE}"),
    *(f"{more} {AHEAD}" for more in (SAVED, HO_RING, f"{ROTATE} {FULL}", f"{CODES} {FULL}")),
    # Of one unit: a gradient comes while that of the micro-batch before is still being sent.
    "--trainable names:head.*",
)


def flags_for(strategy: str, more: str = "") -> str:
    return f"{TINY} --train-iters 6 --global-batch-size 8 --paro-strategy {strategy} {more}"


def steps_and_evaluations(config: RunConfig, training: Training) -> list[StepResult | float]:
    """Trains, evaluates, trains, and saves if the run has a folder for it."""
    state, source = begun(config, training)
    values: list[StepResult | float] = []
    # An evaluation waits for all gathers of updates: two steps in a row leave them in flight.
    values += [train_step(training, state, source) for _ in range(2)]
    values.append(evaluate(training, source, 2).loss)
    values.append(train_step(training, state, source))
    if config.checkpoint.save is not None:
        save_run(config, training)
        check_replicas(training, iteration=3)
    return values


def algorithm_of_op(op: Op, _axes: Axes, _num_bytes: int) -> str:
    """Another algorithm, with other comm streams, for each operation."""
    return {Op.ALL_GATHER: "ho-ring", Op.REDUCE_SCATTER: "flat", Op.ALL_REDUCE: "native"}[op]


def train_on(streams: CommStreams, flags: str, group_size: int) -> tuple[Trained, dict[str, int]]:
    """Trains as under nccl, where HO-Ring is a pipeline; also checksums of the saved tensors."""
    choice = AlgorithmChoice(names=("ho-ring",), num_chunks=lambda *_: 3)
    if AUTO in flags:
        flags = flags.replace(AUTO, HO_RING)
        choice = replace(choice, names=("ho-ring", "native", "flat"), best=algorithm_of_op)

    def chosen(*of_run: Any, **how: bool) -> AlgorithmChoice:
        return choice if HO_RING in flags else choice_of(*of_run, **how)

    with (
        TemporaryDirectory() as folder,
        poisoned_buffers(),
        patch.object(assembly, "choice_of", chosen),
        patch.object(groups, "ThreadStreams", lambda _device: streams),
        patch.object(training_of_tests, "run_steps", steps_and_evaluations),
    ):
        if FOLDER not in flags:
            return train(flags, group_size=group_size), {}
        shared = [folder]
        dist.broadcast_object_list(shared)
        trained = train(flags.replace(FOLDER, shared[0]), group_size=group_size)
        files = sorted(Path(shared[0]).rglob("*.distcp"))
        assert files, "nothing was saved"
        saved = {file.name: crc32(file.read_bytes()) for file in files}
        dist.barrier()  # before the folder's owner deletes it
    return trained, saved


def same_bits(a: tuple[Trained, dict[str, int]], b: tuple[Trained, dict[str, int]]) -> bool:
    for x, y in zip(a[0].steps, b[0].steps, strict=True):
        if isinstance(x, float) or isinstance(y, float):
            if x != y:
                return False
        elif (x.loss, x.grad_norm) != (y.loss, y.grad_norm):
            return False
    parameters, wanted = a[0].parameters, b[0].parameters
    return a[1] == b[1] and all(torch.equal(parameters[name], wanted[name]) for name in wanted)


def differing(cases: Sequence[str], group_size: int, seeds: Sequence[int]) -> list[str]:
    """The cases and seeds with other losses, norms, parameters or files than without overlap."""
    wrong = []
    for flags in cases:
        plain = f"{flags} --paro-prefetch-units 0 --paro-updated-ahead all"
        wanted = train_on(InlineStreams(), plain, group_size)
        if any(not isinstance(s, float) and s.loss != s.loss for s in wanted[0].steps):
            raise RunError("NaN")  # without a wait, what has not arrived may be anything
        for seed in seeds:
            eager = 0.0 if seed % 2 == 0 else 0.4
            late = LateStreams(seed, eager=eager, in_order=AHEAD in flags)
            if not same_bits(train_on(late, flags, group_size), wanted):
                wrong.append(f"{flags}, seed {seed}")
    return wrong


@pytest.mark.ranks
def test_late_jobs_give_the_bits_of_no_overlap() -> None:
    for wrong in run_ranks(differing_by_seed, 4):
        assert not wrong


def differing_by_seed() -> list[str]:
    return [
        wrong
        for strategy, more, seed in FEW
        for wrong in differing([flags_for(strategy, f"{more} --num-layers 2")], 2, (seed,))
    ]


@pytest.mark.verify
@pytest.mark.ranks
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("more", MORE)
def test_every_strategy(more: str) -> None:
    legal = [strategy for strategy in legal_letters() if is_legal(strategy, more)]
    # Every second one: neighbours in MORE, which resemble each other, share the strategies.
    cases = [flags_for(strategy, more) for strategy in legal[MORE.index(more) % 2 :: 2]]
    for wrong in run_ranks(differing, 4, cases, 2, SEEDS[:2], timeout=1000):
        assert not wrong


def is_legal(strategy: str, more: str) -> bool:
    """Weights rotate where parameters and gradients are sharded over the ranks of a group.

    Groups train alone where no state is sharded over several.
    """
    rotates = ROTATE not in more or strategy.startswith("II")
    return rotates and (OUTER not in more or "G" not in strategy)


def outcome(wait: Wait | Mutation, flags: str, group_size: int) -> str:
    """What a missing wait does: the runs that differ, a job on freed storage, or nothing."""
    assert not differing([flags], group_size, SEEDS[:1]), "wrong without the mutation"
    with wait.removed():
        try:
            return "; ".join(differing([flags], group_size, SEEDS))
        except (RuntimeError, RunError) as error:  # torch may be the first to see freed storage
            return str(error)


def outcomes_of(wait: Wait | Mutation, world_size: int, flags: str, group_size: int) -> list[str]:
    """Tells for each rank what a missing wait does; the processes end afterwards.

    Jobs may remain in a training that failed, which cannot be closed once its groups are destroyed.
    """
    try:
        return run_ranks(outcome, world_size, wait, flags, group_size)
    finally:
        stop_ranks()


@pytest.mark.verify
@pytest.mark.ranks
@pytest.mark.parametrize("name", CAUGHT)
def test_a_removed_wait_is_caught(name: str) -> None:
    (wait,) = [wait for wait in all_waits() if wait.name == name]
    assert all(outcomes_of(wait, 4, flags_for(*CAUGHT[name]), 2))


@pytest.mark.verify
@pytest.mark.ranks
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_removed_order_is_caught(mutation: Mutation) -> None:
    flags = flags_for(mutation.strategy, mutation.more)
    assert all(outcomes_of(mutation, mutation.world_size, flags, mutation.group_size))


def test_every_mutation_changes_a_function_of_today() -> None:
    for mutation in MUTATIONS:
        with mutation.removed():
            pass


def test_every_wait_is_removed_by_a_test_or_has_a_reason() -> None:
    by_module: dict[str, set[str]] = {}
    for wait in all_waits():
        by_module.setdefault(wait.name.partition(" ")[0], set()).add(wait.name)
    assert by_module.keys() >= MODULES.keys()
    left = set[str]().union(*(names for of, names in by_module.items() if of not in MODULES))
    assert not CAUGHT.keys() & ELSEWHERE.keys()
    assert left == CAUGHT.keys() | ELSEWHERE.keys()
