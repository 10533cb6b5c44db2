"""Late comm streams on gloo ranks: training on NCCL's code path has the bits of no overlap."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch
from zlib import crc32

import pytest
import torch
import torch.distributed as dist

from data.loader import Datasets
from paro.collectives.choice import AlgorithmChoice
from paro.config.run import RunConfig
from paro.distributed.comm_stream import CommStreams, InlineStreams
from paro.distributed.control import Control
from paro.strategy import legal_letters
from paro.training import assembly
from paro.training.assembly import build_sources, start_state
from paro.training.step import StepResult, Training, evaluate, train_step
from tests.helpers import training as training_of_tests
from tests.helpers.late_streams import FreedStorageError, LateStreams, poisoned_buffers
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TINY, Trained, save_run, train
from tests.paro.late_mutations import FULL, HO_RING, IN_PLACE, MUTATIONS, ROTATE

SEEDS = (0, 1, 2)
FOLDER = "FOLDER"  # in flags: a folder of the ranks, made for the run
SAVED = f"--save {FOLDER}"
FEW = (
    ("IIG", SAVED),
    ("NIG", f"--bf16 {FULL}"),
    ("GGG", HO_RING),
    ("IIG", ROTATE),
    ("IIG", IN_PLACE),
)
MORE = (
    *("", "--bf16", "--bf16 --recompute-granularity selective", FULL),
    *(SAVED, f"{SAVED} --async-save", HO_RING, f"{HO_RING} --bf16 {FULL}"),
    *("--paro-collective flat", ROTATE, IN_PLACE, f"{ROTATE} --bf16 {FULL}"),
)
algorithm_of = assembly._algorithm


def flags_for(strategy: str, more: str = "") -> str:
    return f"{TINY} --train-iters 6 --global-batch-size 8 --paro-strategy {strategy} {more}"


def steps_and_evaluations(
    config: RunConfig, training: Training, datasets: Datasets
) -> list[StepResult | float]:
    """Trains, evaluates, trains, and saves if the run has a folder for it."""
    state = start_state(config)
    source = build_sources(config, datasets, training, state).train
    values: list[StepResult | float] = []
    # An evaluation waits for all gathers of updates: two steps in a row leave them in flight.
    values += [train_step(training, state, source) for _ in range(2)]
    values.append(evaluate(training, source, 2))
    values.append(train_step(training, state, source))
    if config.checkpoint.save is not None:
        training.model.wait_for_updated_params()
        save_run(config, training)
    return values


def train_on(streams: CommStreams, flags: str, group_size: int) -> tuple[Trained, dict[str, int]]:
    """Trains as under nccl, where HO-Ring is a pipeline; also checksums of the saved tensors."""
    choice = AlgorithmChoice(names=("ho-ring",), pieces=lambda *_: 3)

    def algorithm(config: RunConfig, control: Control) -> AlgorithmChoice:
        return choice if HO_RING in flags else algorithm_of(config, control)

    with (
        TemporaryDirectory() as folder,
        poisoned_buffers(),
        patch.object(assembly, "_algorithm", algorithm),
        patch.object(assembly, "make_comm_streams", lambda *_args, **_more: streams),
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
        wanted = train_on(InlineStreams(), f"{flags} --paro-prefetch-units 0", group_size)
        assert all(isinstance(s, float) or s.loss == s.loss for s in wanted[0].steps), "NaN"
        for seed in seeds:
            late = LateStreams(seed, eager=0.0 if seed % 2 == 0 else 0.4)
            if not same_bits(train_on(late, flags, group_size), wanted):
                wrong.append(f"{flags}, seed {seed}")
    return wrong


@pytest.mark.ranks
def test_late_jobs_give_the_bits_of_no_overlap() -> None:
    cases = [flags_for(strategy, more) for strategy, more in FEW]
    for wrong in run_ranks(differing, 4, cases, 2, SEEDS[:1]):
        assert not wrong


@pytest.mark.verify
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("more", MORE)
def test_every_strategy(more: str) -> None:
    cases = [flags_for(strategy, more) for strategy in legal_letters() if is_legal(strategy, more)]
    for wrong in run_ranks(differing, 4, cases, 2, SEEDS, timeout=1000):
        assert not wrong


def is_legal(strategy: str, more: str) -> bool:
    """Weights rotate where parameters and gradients are sharded over the ranks of a group."""
    return ROTATE not in more or strategy.startswith("II")


def outcome(number: int) -> str:
    """What a mutation does: the runs that differ, a job on freed storage, or nothing."""
    mutation = MUTATIONS[number]
    flags = flags_for(mutation.strategy, mutation.more)
    assert not differing([flags], mutation.group_size, SEEDS[:1]), "wrong without the mutation"
    with mutation.applied():
        try:
            return "; ".join(differing([flags], mutation.group_size, SEEDS))
        except FreedStorageError as error:
            return str(error)


@pytest.mark.verify
@pytest.mark.ranks
@pytest.mark.parametrize("number", range(len(MUTATIONS)), ids=lambda n: MUTATIONS[n].name)
def test_a_removed_wait_is_caught(number: int) -> None:
    for found in run_ranks(outcome, MUTATIONS[number].world_size, number, timeout=60):
        assert found, MUTATIONS[number].name
