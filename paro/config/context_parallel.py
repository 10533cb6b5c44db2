"""ContextParallelConfig: how many ranks share a sample, and what they send for attention."""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass, replace

from paro.context_parallel.layout import ContextLayout
from paro.distributed.world import World
from paro.errors import UserError

_TYPES = ("p2p", "a2a", "allgather", "a2a+p2p")
_SYNONYMS = {"all_gather": "allgather"}  # Megatron's name
_SIZES = "--hierarchical-context-parallel-sizes"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallelConfig:
    """The flags of context parallelism."""

    context_parallel_size: int = 1
    cp_comm_type: str = "p2p"
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = None
    context_ring: str = "double"

    def __post_init__(self) -> None:
        size = self.context_parallel_size
        if size < 1:
            raise UserError(f"--context-parallel-size {size} must be at least 1")
        if self.cp_comm_type not in _TYPES:
            raise UserError(
                f"--cp-comm-type {self.cp_comm_type} is unknown: choose one of {', '.join(_TYPES)}"
            )
        if size > 1:
            self._check_sizes(size, self.hierarchical_context_parallel_sizes)

    def _check_sizes(self, size: int, sizes: tuple[int, ...] | None) -> None:
        kind = f"--cp-comm-type {self.cp_comm_type}"
        if sizes is None:
            if self.cp_comm_type == "a2a+p2p":
                raise UserError(
                    f"{kind} needs {_SIZES}: first the ranks that exchange heads, then those that "
                    f"keys and values go round, such as {_SIZES} 2 {size // 2}"
                )
            return
        given = f"{_SIZES} {' '.join(map(str, sizes))}"
        if self.cp_comm_type not in ("a2a+p2p", "p2p"):
            raise UserError(f"{given} is for --cp-comm-type p2p and a2a+p2p: leave it out")
        if len(sizes) != 2 or min(sizes) < 1 or math.prod(sizes) != size:
            raise UserError(
                f"{given} must be two sizes whose product is --context-parallel-size {size}"
            )

    @property
    def layout(self) -> ContextLayout:
        """Which tokens and heads a rank has, and how keys and values travel."""
        return self.layout_of(self.context_parallel_size)

    def layout_of(self, size: int) -> ContextLayout:
        """That of another number of ranks, which the given sizes must divide."""
        first, *_ = self.hierarchical_context_parallel_sizes or (0,)
        flat = size if self.context_ring == "flat" else 0
        match self.cp_comm_type:
            case "a2a":
                return ContextLayout(size=size, heads=size)
            case "a2a+p2p":
                return ContextLayout(size=size, heads=min(first or 1, size), inner=flat)
            case "allgather":
                return ContextLayout(size=size, gathers=size > 1)
        return ContextLayout(size=size, inner=flat or min(first, size))


def take_context(args: Namespace) -> ContextParallelConfig:
    """The flags of context parallelism; `UserError` where blocks are to differ."""
    types = [_SYNONYMS.get(name, name) for name in args.cp_comm_type]
    if len(set(types)) > 1:
        raise UserError(f"--cp-comm-type {' '.join(types)}: all blocks have one: give it once")
    sizes = args.hierarchical_context_parallel_sizes
    return ContextParallelConfig(
        context_parallel_size=args.context_parallel_size,
        cp_comm_type=types[0],
        hierarchical_context_parallel_sizes=None if sizes is None else tuple(sizes),
        context_ring=args.paro_context_ring,
    )


def sharing(world: World, size: int) -> World:
    """The world in which so many neighbouring ranks share a sample; `UserError` if they cannot."""
    if size < 1 or world.size % size:
        fitting = (str(each) for each in range(1, world.size + 1) if world.size % each == 0)
        raise UserError(
            f"--context-parallel-size {size} does not divide the {world.size} ranks: choose one "
            f"of {', '.join(fitting)}"
        )
    return replace(world, context_parallel_size=size)
