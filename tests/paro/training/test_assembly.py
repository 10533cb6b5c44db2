"""What the groups and the whole parameters of a rank take of a GPU, as training makes them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import product

import pytest
import torch

from paro.config.run import RunConfig
from paro.distributed.comm_stream import InlineStreams
from paro.distributed.control import PlannedControl
from paro.distributed.groups import CommResources, bounded_ctas
from paro.distributed.world import World
from paro.planning.run_memory import COMMUNICATOR_BYTES, RunMemory
from paro.spec.units import registered_param_buffers, units_of_run
from paro.training import assembly
from paro.training.step import Training
from tests.helpers.fake_nccl import FakeNccl
from tests.helpers.training import configured
from tests.paro.planning.cases import LoneRank, silence

RANK, WORLD_SIZE = 5, 16
MODEL = (
    "--distributed-backend nccl --bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 60 "
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --ffn-hidden-size 40 --seq-length 64 "
    "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --num-workers 0 --paro-group-size 4 "
    "--no-rope-fusion --no-bias-swiglu-fusion"
)


@dataclass(frozen=True, slots=True)
class Built:
    """A rank of a training over NCCL."""

    nccl: FakeNccl
    config: RunConfig
    training: Training


def built(monkeypatch: pytest.MonkeyPatch, flags: str) -> Built:
    nccl = FakeNccl(monkeypatch)
    monkeypatch.setattr(assembly, "make_resources", lambda *_, **__: CommResources(InlineStreams()))
    monkeypatch.setattr(assembly, "check_core", lambda *_, **__: None)  # it sends messages
    world = World(rank=RANK, size=WORLD_SIZE, ranks_per_node=4)
    config = configured(f"{MODEL} {flags}", world)
    control = PlannedControl(config.world, torch.device("cpu"))
    training = assembly.build_training(config, control, initialized=False)
    return Built(nccl, config, training)


WAYS = (
    "",
    "--paro-inter-grad-bits 8 --paro-inter-param-bits 4 --optimizer muon",
    "--optimizer muon",
    *(
        f"--context-parallel-size 8 --cp-comm-type {way}"
        for way in ("a2a", "p2p", "allgather", "a2a+p2p --hierarchical-context-parallel-sizes 2 4")
    ),
)


@pytest.mark.parametrize(
    ("strategy", "ways"),
    [
        *((strategy, WAYS) for strategy in ("NNG", "GGG", "1,2,8", "2,8,16")),
        ("IIG", (*WAYS, "--paro-materialize rotate")),
    ],
)
def test_all_communicators_of_a_rank_fit_on_its_gpu(
    strategy: str, ways: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    gathering = (ways[0], "--context-parallel-size 8 --cp-comm-type allgather")
    others = product(gathering, (" --paro-collective ho-ring", " --paro-collective flat"))
    for way in (*ways, *map("".join, others)):
        flags = f"--paro-strategy {strategy} {way}"
        run = built(monkeypatch, flags)
        own = [call["pg_options"].config for call in run.nccl.calls if RANK in call["ranks"]]
        spec = run.config.spec
        communicators = RunMemory(None).without_allocations(spec).communicators
        assert communicators == COMMUNICATOR_BYTES * len(own), flags
        assert {config.max_ctas for config in own} == {bounded_ctas(132, len(own))}, flags
        for multiprocessors in (132, 108, 58):
            blocks = bounded_ctas(multiprocessors, len(own))
            assert blocks.bit_count() == 1  # NCCL rounds others up
            assert blocks * len(own) <= multiprocessors, flags


COPIED = [
    "--paro-strategy IIG",
    "--paro-strategy GGG",
    "--paro-strategy III --paro-prefetch-units 2",
    "--paro-strategy III --paro-prefetch-units 0",
    "--paro-strategy IIG --tie-embeddings-and-output-weights",
    "--paro-strategy IIG --lora-rank 4",
    "--paro-strategy IIG --eval-iters 1 --eval-micro-batch-size 4 --eval-global-batch-size 64",
    pytest.param(
        "--paro-strategy IIG --recompute-granularity full --recompute-num-layers 4",
        marks=pytest.mark.slow("imports the compiler"),
    ),
]


def train(run: Built) -> None:
    """Evaluates, and trains a step of one micro-batch and one of four."""
    training, tokens = run.training, torch.zeros(1, 16, dtype=torch.int64)
    rank = LoneRank(model=training.model, optimizer=training.optimizer, traffic=training.traffic)
    for num_micro_batches in (1, 4):
        training.model.evaluate(tokens, tokens, torch.ones(1, 16))
        rank.step(num_micro_batches)


@pytest.mark.parametrize("flags", COPIED)
def test_whole_parameters_have_all_the_registered_memory_that_they_ever_take(
    flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence(monkeypatch)
    run = built(monkeypatch, f"{flags} --paro-nccl-copy-engine")
    notes, context = run.nccl.notes, run.training.model.context
    reserved = [note[2] for note in notes if note[0] == "segment"]
    num_notes = len(notes)
    train(run)
    assert len(notes) == num_notes  # nothing more is allocated, and nothing registered
    assert 0 < context.counters.whole_params.peak_bytes <= sum(reserved)
    predicted = RunMemory(None).of(run.config.spec).allocations
    assert predicted.whole_params == sum(reserved)

    spec = run.config.spec
    room = registered_param_buffers(spec, units_of_run(spec))
    fewer = {trains: (size, number - 1) for trains, (size, number) in room.items()}
    context.collectives.groups.registered.reserve(fewer, run.training.control)
    with pytest.raises(AssertionError, match="more parameters are whole"):
        train(run)
