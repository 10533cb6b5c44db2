"""Every start that --paro-elastic accepts can continue on fewer and more nodes, from the copies."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from paro.checkpoint.chunks import ChunkedState, chunked_states, may_be_missing
from paro.checkpoint.in_memory.recovery import split
from paro.collectives.schedule import COLLECTIVES, Op
from paro.config.run import RunConfig
from paro.distributed.control import PlannedControl
from paro.distributed.world import World
from paro.errors import UserError
from paro.layout import Chunk
from paro.machine.files import machine_to_json
from paro.machine.machine import Measured
from paro.strategy import legal_letters, survival
from paro.topology import Axes
from paro.training.assembly import build_training
from tests.helpers.flags import configured
from tests.paro.planning.cases import machine

NODES = 4
MODEL = (
    "--distributed-backend gloo --mock-data --vocab-size 64 --num-layers 1 --hidden-size 48 "
    "--ffn-hidden-size 96 --num-attention-heads 6 --seq-length 16 --train-iters 10 --lr 1e-3 "
    "--lr-warmup-iters 0 --eval-iters 1 --bf16 --paro-elastic"
)


@dataclass(frozen=True, slots=True)
class Case:
    """The flags of a run, and how many ranks its nodes have."""

    flags: str
    per_node: int

    def on(self, num_nodes: int) -> RunConfig:
        """The configuration of a start; `UserError` if it is refused."""
        world = World(size=num_nodes * self.per_node, ranks_per_node=self.per_node)
        return configured(self.flags, world)

    def lost(self, config: RunConfig, num_nodes: int) -> int:
        """How many nodes may be lost."""
        ranks = num_nodes * self.per_node
        return survival(config.strategy, world_size=ranks, ranks_per_node=self.per_node).nodes


def measured_machine(num_ranks: int, group_size: int) -> str:
    rows = tuple(
        Measured(axes=axes, op=op, algorithm=name, bytes=1000, seconds=1e-3)
        for axes in Axes
        for op in Op
        for name in COLLECTIVES
    )
    return machine_to_json(machine(world_size=num_ranks, group_size=group_size, measured=rows))


def make_case(seed: int, folder: Path) -> Case:
    draw = random.Random(seed)
    per_node = draw.choice((1, 2, 3, 4))
    ranks = NODES * per_node
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    words = [MODEL, f"--paro-survive {draw.choice((0, 0, 1, 1, 2, 3))}"]

    def maybe(chance: float, *texts: str) -> None:
        if draw.random() < chance:
            words.append(draw.choice(texts))

    group_size = draw.choice((per_node, draw.choice(divisors)))
    if group_size != per_node:
        words.append(f"--paro-group-size {group_size}")
    degrees = ",".join(str(draw.choice(divisors)) for _ in range(3))
    letters = [f"--paro-strategy {name}" for name in (*legal_letters(), "zero1", "hsdp")]
    maybe(0.9, *letters, *[f"--paro-strategy {degrees}"] * 12, "--use-distributed-optimizer")
    maybe(0.3, "--paro-materialize rotate", "--paro-materialize rotate --paro-rotate-in-place")
    bits = draw.choice((4, 8))
    updates, gradients = f"--paro-inter-param-bits {bits}", f"--paro-inter-grad-bits {bits}"
    (folder / "machine.json").write_text(measured_machine(ranks, group_size), encoding="utf-8")
    own, shipped = f"--paro-machine {folder}/machine.json", "--paro-machine dgx-h100"
    auto = f"{own} --paro-inter-bits auto"
    maybe(0.6, updates, gradients, f"{updates} {gradients}", auto, auto)
    if auto not in words:
        maybe(0.4, own, shipped, f"{own} --paro-collective auto")
    batch = ranks * draw.choice((1, 2, 3, 6))
    ramp = f"--rampup-batch-size {ranks} {draw.choice((1, ranks))} 100"
    sizes = f"--global-batch-size {batch}"
    steps = f"--step-batch-size-schedule 0:{ranks},900:{batch}"
    maybe(1.0, sizes, sizes, steps, f"{sizes} {ramp}")
    maybe(0.2, f"--eval-global-batch-size {ranks}", "--eval-micro-batch-size 2")
    maybe(0.2, "--trainable last-blocks:1", "--lora-rank 2")
    words.append("--micro-batch-size 1")
    return Case(" ".join(words), per_node)


def allowed_nodes(config: RunConfig) -> set[int]:
    """The numbers of nodes that the start says it can continue on."""
    for line in config.notices:
        found = re.match(r"--paro-elastic: the batch allows a restart on (.*) of 4 nodes: ", line)
        if found:
            return {int(number) for number in re.findall(r"\d+", found[1])}
    return set(range(1, NODES + 1))


def states_of(
    case: Case, config: RunConfig, rank: int, *, to_write: bool
) -> dict[str, ChunkedState]:
    """What a rank holds, or which of it the rank copies."""
    size = int(config.arguments["world_size"])
    world = World(rank=rank, size=size, ranks_per_node=case.per_node)
    training = build_training(config, PlannedControl(world, torch.device("meta")))
    first = rank // case.per_node * case.per_node
    near = range(first, first + case.per_node) if to_write else ()
    return chunked_states(training.optimizer.flat_shards(), writers=near)


def chunks(states: dict[str, ChunkedState]) -> Iterator[tuple[str, Chunk]]:
    for name, state in states.items():
        for offsets, values in state.chunks.items():
            yield name, Chunk(offsets, tuple(values.shape))


def copies_of(case: Case, config: RunConfig, nodes: Sequence[int]) -> dict[str, list[Chunk]]:
    """What the local copies of these nodes hold."""
    held: dict[str, list[Chunk]] = {}
    for node in nodes:
        for rank in range(node * case.per_node, (node + 1) * case.per_node):
            for name, chunk in chunks(states_of(case, config, rank, to_write=True)):
                held.setdefault(name, []).append(chunk)
    return held


STUDY = (pytest.param(seed, marks=pytest.mark.verify) for seed in range(94, 110))
WITH_STATES = (*range(90, 94), *STUDY)


@pytest.mark.slow("builds all ranks of three starts")
@pytest.mark.parametrize("seed", WITH_STATES)
def test_the_copies_of_the_nodes_that_are_left_hold_all(seed: int, tmp_path: Path) -> None:
    """Of so many nodes as survive; then, on the nodes that are back, those of the restart."""
    case, draw = make_case(seed, tmp_path), random.Random(seed)
    try:
        first = case.on(NODES)
    except UserError:
        return
    most = case.lost(first, NODES)
    possible = [n for n in allowed_nodes(first) if NODES - most <= n]
    if not possible:  # at the beginning of a ramp-up that no number of ranks divides
        return
    fewer = draw.choice(possible)
    left = draw.sample(range(NODES), fewer)
    second = case.on(fewer)
    check_held(case, copies_of(case, first, left), second)
    check_held(case, copies_of(case, second, range(fewer)), case.on(NODES))


def check_held(case: Case, copies: dict[str, list[Chunk]], config: RunConfig) -> None:
    for rank in range(int(config.arguments["world_size"])):
        for name, chunk in chunks(states_of(case, config, rank, to_write=False)):
            left = [chunk]
            for held in copies.get(name, ()):
                _, left = split(left, held)
            assert may_be_missing(name) or not left, name
