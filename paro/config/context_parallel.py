"""ContextParallelConfig: how many ranks share a sample, and what they send for attention."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace

from paro.config.parts import take
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

    def __post_init__(self) -> None:
        size, sizes = self.context_parallel_size, self.hierarchical_context_parallel_sizes
        if size < 1:
            raise UserError(f"--context-parallel-size {size} must be at least 1")
        if self.cp_comm_type not in _TYPES:
            raise UserError(
                f"--cp-comm-type {self.cp_comm_type} is unknown: choose one of {', '.join(_TYPES)}"
            )
        if size == 1:
            return
        if self.cp_comm_type != "a2a":
            raise UserError(
                f"--context-parallel-size {size} with --cp-comm-type {self.cp_comm_type} is not "
                "there yet: give --cp-comm-type a2a"
            )
        if sizes is not None:
            raise UserError(f"{_SIZES} is for --cp-comm-type a2a+p2p: leave it out")

    @property
    def layout(self) -> ContextLayout:
        """Which tokens and heads a rank has."""
        size, sizes = self.context_parallel_size, self.hierarchical_context_parallel_sizes
        heads = {"a2a": size, "a2a+p2p": sizes[0] if sizes else 1}.get(self.cp_comm_type, 1)
        return ContextLayout(size=size, heads=min(heads, size))


def take_context(args: Namespace) -> ContextParallelConfig:
    """The flags of context parallelism; `UserError` where blocks are to differ."""
    types = [_SYNONYMS.get(name, name) for name in args.cp_comm_type]
    if len(set(types)) > 1:
        raise UserError(f"--cp-comm-type {' '.join(types)}: all blocks have one: give it once")
    sizes = args.hierarchical_context_parallel_sizes
    return take(
        ContextParallelConfig,
        args,
        cp_comm_type=types[0],
        hierarchical_context_parallel_sizes=None if sizes is None else tuple(sizes),
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
