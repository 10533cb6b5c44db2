"""Every start that --paro-elastic accepts can continue on fewer and more nodes, from the copies."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

from paro.checkpoint.chunks import ChunkedState, chunked_states, may_be_missing
from paro.checkpoint.in_memory.recovery import split
from paro.config.run import RunConfig
from paro.distributed.control import PlannedControl
from paro.distributed.world import World
from paro.layout import Chunk
from paro.strategy import survival
from paro.training.assembly import build_training
from tests.helpers.flags import configured

NODES = 4
MODEL = (
    "--distributed-backend gloo --mock-data --vocab-size 64 --num-layers 1 --hidden-size 48 "
    "--ffn-hidden-size 96 --num-attention-heads 6 --seq-length 16 --train-iters 10 --lr 1e-3 "
    "--lr-warmup-iters 0 --eval-iters 1 --bf16 --paro-elastic --micro-batch-size 1"
)


@dataclass(frozen=True, slots=True)
class Case:
    """The flags of a run, and how many ranks its nodes have."""

    flags: str
    per_node: int

    def on(self, num_nodes: int) -> RunConfig:
        """The configuration of a start; `UserError` if it is refused."""
        world = World(size=num_nodes * self.per_node, ranks_per_node=self.per_node)
        return configured(f"{MODEL} {self.flags}", world)

    def lost(self, config: RunConfig, num_nodes: int) -> int:
        """How many nodes may be lost."""
        ranks = num_nodes * self.per_node
        return survival(config.strategy, world_size=ranks, ranks_per_node=self.per_node).nodes


RAMP = "--global-batch-size 24 --rampup-batch-size 8 8 100"
STEPS = "--step-batch-size-schedule 0:8,900:24"
BITS = "--paro-inter-param-bits 4 --paro-inter-grad-bits 4"
CASES = (
    Case("--paro-strategy IIG --global-batch-size 24 --paro-survive 1", 2),
    Case(f"--paro-strategy 2,4,8 --paro-survive 1 {STEPS}", 2),
    Case(f"--paro-strategy NII --paro-survive 2 {RAMP} --trainable last-blocks:1", 2),
    Case(f"--paro-strategy 1,3,6 --paro-survive 1 --global-batch-size 36 {BITS}", 3),
    Case(f"--paro-strategy III --paro-materialize rotate --paro-survive 3 {RAMP} --lora-rank 2", 2),
    Case("--paro-strategy III --paro-group-size 8 --global-batch-size 48 --paro-survive 1", 4),
)


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


@pytest.mark.slow("builds all ranks of three starts")
@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_copies_of_the_nodes_that_are_left_hold_all(number: int) -> None:
    """Of so many nodes as survive; then, on the nodes that are back, those of the restart."""
    case, draw = CASES[number], random.Random(number)
    first = case.on(NODES)
    fewer = min(n for n in allowed_nodes(first) if NODES - case.lost(first, NODES) <= n)
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
