"""The states of a small model, cut into flat shards for any strategy and world."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from paro.checkpoint import load
from paro.checkpoint.agreement import with_one_folder
from paro.checkpoint.chunks import chunked_states
from paro.checkpoint.save import write_states
from paro.distributed.control import Control
from paro.distributed.world import World
from paro.layout import Shape, UnitLayout, make_layout, slice_chunk, whole_chunk
from paro.spec.states import FlatShard
from paro.topology import make_topology


class Harmful:
    def __init__(self, function: Callable[..., Any], *args: str) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


STATES = ("param", "exp_avg", "exp_avg_sq")

EMBEDDING = {"embedding.weight": (37, 6)}
BLOCK = {"block.wide": (7, 5), "block.cube": (5, 3, 4), "block.bias": (11,), "block.scale": ()}
ROTATING = {"rotating.up": (9, 4), "rotating.down": (4, 9)}
SMALLER_THAN_WORLD = {"norm.weight": (3,)}
FROZEN = {"frozen.weight": (6, 5)}  # bf16 and without moments
SHAPES: dict[str, Shape] = EMBEDDING | BLOCK | ROTATING | SMALLER_THAN_WORLD | FROZEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    world_size: int
    group_size: int
    degrees: tuple[int, int, int]

    def __str__(self) -> str:
        return f"{self.degrees} on {self.world_size // self.group_size}x{self.group_size}"


ONE = Cut(world_size=1, group_size=1, degrees=(1, 1, 1))
IIG = Cut(world_size=4, group_size=2, degrees=(2, 2, 4))
NNN = Cut(world_size=4, group_size=2, degrees=(1, 1, 1))
NII = Cut(world_size=4, group_size=2, degrees=(1, 2, 2))
GGG_ON_SIX = Cut(world_size=6, group_size=3, degrees=(6, 6, 6))
DEGREES_ON_EIGHT = Cut(world_size=8, group_size=4, degrees=(2, 4, 8))


def layouts(world_size: int, shapes: dict[str, Shape] = SHAPES) -> list[UnitLayout]:
    """One layout per unit; the frozen one is the last."""
    units = [
        [whole_chunk(name, shapes[name]) for name in unit]
        for unit in (EMBEDDING, BLOCK, SMALLER_THAN_WORLD, FROZEN)
    ]
    rotating = [  # slice by slice: three rows of one parameter, three columns of the other
        slice_chunk(name, shape, dim=dim, index=index, number=3)
        for index in range(3)
        for dim, (name, shape) in enumerate(ROTATING.items())
    ]
    units.insert(2, rotating)
    return [make_layout(chunks, world_size=world_size) for chunks in units]


def true_state(state: str, name: str) -> Tensor:
    """The values of a state, equal in every process."""
    generator = torch.Generator().manual_seed(crc32(f"{state}.{name}".encode()))
    values = torch.randn(prod(SHAPES[name]), generator=generator).reshape(SHAPES[name])
    return values.bfloat16() if name in FROZEN else values


def zeros(layout: UnitLayout, numel: int) -> Tensor:
    """An uninitialized buffer for elements of a unit, in the type of its states."""
    frozen = layout.chunks[0].chunk.name in FROZEN
    return torch.zeros(numel, dtype=torch.bfloat16 if frozen else torch.float32)


def true_range(layout: UnitLayout, state: str, start: int, stop: int) -> Tensor:
    """The elements [start, stop) of a unit in its flat order; padding is zero."""
    whole = zeros(layout, layout.numel)
    for placed in layout.chunks:
        chunk = placed.chunk
        ranges = (slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
        whole[placed.offset : placed.stop] = true_state(state, chunk.name)[tuple(ranges)].reshape(
            -1
        )
    return whole[start:stop]


def make_shards(
    cut: Cut, rank: int, *, filled: bool, shapes: dict[str, Shape] = SHAPES
) -> list[FlatShard]:
    """The shards of `rank`, with the true values or zeros."""
    topology = make_topology(
        world_size=cut.world_size, group_size=cut.group_size, degrees=cut.degrees
    )
    shards = []
    *trainable, frozen = layouts(cut.world_size, shapes)
    units = [(unit, STATES, cut.degrees[2]) for unit in trainable]
    for layout, states, degree in [*units, (frozen, STATES[:1], cut.degrees[0])]:
        start = topology.shard_start(rank, degree, layout.numel)
        for state in states:
            numel = layout.numel // degree
            values = zeros(layout, numel)
            if filled:
                values.copy_(true_range(layout, state, start, start + numel))
            replicas = range(rank % degree, cut.world_size, degree)
            where: dict[str, Any] = {"start": start, "rank": rank, "replicas": replicas}
            shards.append(FlatShard(layout=layout, values=values, state=state, **where))
    return shards


def all_shards(cut: Cut) -> list[FlatShard]:
    """The shards of all ranks, each range once, as if one process held them."""
    every = [make_shards(cut, rank, filled=True) for rank in range(cut.world_size)]
    return [
        replace(shard, rank=0, replicas=(0,))
        for shards in every
        for shard in shards
        if shard.rank == shard.replicas[0]
    ]


def assert_true(shards: Sequence[FlatShard]) -> None:
    """Every bit of every shard is right, padding included."""
    for shard in shards:
        stop = shard.start + shard.values.numel()
        expected = true_range(shard.layout, shard.state, shard.start, stop)
        name = shard.layout.chunks[0].chunk.name
        assert torch.equal(shard.values.cpu(), expected), f"{shard.state} of the unit of {name}"


def control_here() -> Control:
    """Of all ranks, or of this process where there are no groups."""
    world = World()
    if dist.is_initialized():
        world = World(rank=dist.get_rank(), size=dist.get_world_size())
    return Control(world, torch.device("cpu"))


def save_checkpoint(
    root: Path,
    iteration: int,
    shards: Iterable[FlatShard],
    common: Mapping[str, Any],
    *,
    log: Callable[[str], None] | None = None,
) -> None:
    """Saves shards as a run does, from ranks that all see the folder."""
    ranks = with_one_folder(control_here())
    states = chunked_states(shards, writers=range(8))  # one process may hold the shards of many
    first = log if log is not None and ranks.everyone.world.rank == 0 else lambda _line: None
    write_states(root, iteration, states, common, ranks=ranks, log=first)


def load_checkpoint(
    root: Path,
    shards: Iterable[FlatShard],
    *,
    log: Callable[[str], None] = lambda _line: None,
    **options: Any,
) -> dict[str, Any] | None:
    """Loads shards as a run does; returns the contents of common.json."""
    saved = load.load_checkpoint(root, shards, control_here(), log=log, **options)
    return saved and {**saved.common}
