"""ContextParallelConfig: how many ranks share a sample, and what they send for attention."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from model.config import LlamaConfig
from paro.distributed.world import World
from paro.errors import UserError, check_least
from paro.spec.context_layout import ContextLayout, ContextLimits
from paro.text import listed

AUTO = "auto"
TYPES = ("p2p", "a2a", "allgather", "a2a+p2p")
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
        check_least(1, context_parallel_size=size)
        if self.cp_comm_type not in TYPES:
            raise UserError(
                f"--cp-comm-type {self.cp_comm_type} is unknown: choose one of "
                f"{', '.join(TYPES)}, {AUTO}"
            )
        sizes = self.hierarchical_context_parallel_sizes
        if size > 1:
            self._check_sizes(size, sizes)
        elif sizes is not None:
            product = math.prod(sizes)
            also = f"give --context-parallel-size {product} too, or " * (product > 1)
            raise UserError(
                f"{_SIZES} {' '.join(map(str, sizes))} divides the ranks that share a sample, and "
                f"without --context-parallel-size above 1 none do: {also}leave it out"
            )

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

    def misfit(self, size: int, limits: ContextLimits) -> str | None:
        """Why so many ranks cannot share a sample, in words that follow a colon; None: they can."""
        sizes = self.hierarchical_context_parallel_sizes
        if sizes is not None and size % sizes[0]:
            return f"{sizes[0]} ranks do not divide it"
        return limits.misfit(self.layout_of(size))

    def check(self, limits: ContextLimits, *, rotates: bool) -> None:
        """Raise `UserError` if these ranks cannot share samples; names numbers that can."""
        if rotates:
            raise UserError(
                "--paro-materialize rotate and --context-parallel-size contradict each other: "
                "ranks of a ring have different heads at a time, which cannot be exchanged: leave "
                "one out"
            )
        size = self.context_parallel_size
        if (why := self.misfit(size, limits)) is None:
            return
        sizes = range(1, limits.world_size + 1)
        fitting = [str(each) for each in sizes if not self.misfit(each, limits)]
        advice = "give other --hierarchical-context-parallel-sizes"
        if fitting:
            advice = f"choose {'one of ' * (len(fitting) > 1)}{listed(fitting)}"
        if self.layout.heads > 1:
            advice += ", or --cp-comm-type p2p, which exchanges no heads"
        raise UserError(f"--context-parallel-size {size} does not fit: {why}: {advice}")

    def describe(self) -> str:
        """How many ranks share a sample, and how."""
        if self.context_parallel_size == 1:
            return "no ranks share a sample"
        text = f"{self.context_parallel_size} ranks share a sample by {self.cp_comm_type}"
        sizes = self.hierarchical_context_parallel_sizes
        return text if sizes is None else f"{text} over {sizes[0]} x {sizes[1]}"

    @property
    def flag_text(self) -> str:
        """The flags that select its type."""
        sizes = self.hierarchical_context_parallel_sizes
        text = f"--cp-comm-type {self.cp_comm_type}"
        return text if sizes is None else f"{text} {_SIZES} {' '.join(map(str, sizes))}"

    @property
    def flags(self) -> dict[str, object]:
        """The arguments that select it."""
        sizes = self.hierarchical_context_parallel_sizes
        return {
            "context_parallel_size": self.context_parallel_size,
            "cp_comm_type": [self.cp_comm_type],
            "hierarchical_context_parallel_sizes": None if sizes is None else [*sizes],
        }


def context_options(
    given: ContextParallelConfig,
    sizes: Iterable[int],
    types: Sequence[str],
    limits: ContextLimits,
) -> Iterator[ContextParallelConfig]:
    """Yield every context-parallel layout of some sizes and types that the limits allow.

    All else is as given.
    """
    kinds = [(size, name) for size in sizes for name in (types if size > 1 else ("p2p",))]
    for size, name in kinds:
        splits: list[tuple[int, ...] | None] = [given.hierarchical_context_parallel_sizes]
        if name == "a2a+p2p" and splits == [None]:
            splits = [
                (n, size // n)
                for n in range(2, size // 2 + 1)
                if size % n == limits.group_size % n == 0
            ]
        for split in splits:
            cp = replace(
                given,
                context_parallel_size=size,
                cp_comm_type=name,
                hierarchical_context_parallel_sizes=split,
            )
            if cp.misfit(size, limits) is None:
                yield cp


def usable_types(
    types: Sequence[str], model: LlamaConfig, device_type: str, compute: str
) -> Sequence[str]:
    """Return the types that the model's attention can do: without a log-sum-exp only a2a."""
    in_parts = model.parts_misfit(device_type, compute) is None
    return types if in_parts else [name for name in types if name == "a2a"]


def check_parts(
    model: LlamaConfig, context: ContextParallelConfig, device_type: str, compute: str
) -> None:
    """Raise `UserError` where attention is to be computed in parts, or kept, and cannot be."""
    why = model.parts_misfit(device_type, compute)
    if why is not None and context.layout.ring > 1:
        raise UserError(f"{why}, or --cp-comm-type a2a")
    if why is not None and model.keeps_core:
        raise UserError(f"{why}, or leave --paro-recompute-keep out")


def without_machine(
    found: Iterable[ContextParallelConfig], group_size: int
) -> ContextParallelConfig:
    """Choose, of layouts of one size, the one that exchanges most heads inside a group."""

    def order(cp: ContextParallelConfig) -> tuple[bool, bool, int]:
        return not cp.layout.gathers, cp.layout.heads <= group_size, cp.layout.heads

    return max(found, key=order)


def take_context(args: Namespace) -> ContextParallelConfig:
    """Return the flags of context parallelism; `UserError` where blocks are to differ.

    What is to be chosen (auto) is as in a run of which no ranks share samples, or by p2p.
    """
    types = [_SYNONYMS.get(name, name) for name in args.cp_comm_type]
    if len(set(types)) > 1:
        raise UserError(f"--cp-comm-type {' '.join(types)}: all blocks have one: give it once")
    size, sizes = args.context_parallel_size, args.hierarchical_context_parallel_sizes
    if AUTO in (size, types[0]) and sizes is not None:
        raise UserError(
            f"{_SIZES} {' '.join(map(str, sizes))} contradicts {AUTO}, which chooses them: leave "
            "one out"
        )
    return ContextParallelConfig(
        context_parallel_size=1 if size == AUTO else size,
        cp_comm_type="p2p" if types[0] == AUTO else types[0],
        hierarchical_context_parallel_sizes=None if sizes is None else tuple(sizes),
        context_ring=args.paro_context_ring,
    )


def data_parallel_size_of(world: World, size: int | str) -> int:
    """How many sets of ranks read different samples; `UserError` if `size` ranks share none.

    With auto it is not chosen yet: one, since a batch for more of them fits fewer.
    """
    if isinstance(size, str):
        return 1
    if size < 1 or world.size % size:
        fitting = (str(each) for each in range(1, world.size + 1) if world.size % each == 0)
        raise UserError(
            f"--context-parallel-size {size} does not divide the {world.size} ranks: choose one "
            f"of {', '.join(fitting)}"
        )
    return world.size // size
