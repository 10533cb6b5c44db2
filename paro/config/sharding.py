"""ShardingConfig: how model states are sharded, gathered and reduced."""

from __future__ import annotations

from dataclasses import dataclass, field

from paro.config.context_parallel import ContextParallelConfig
from paro.distributed.world import World
from paro.errors import UserError
from paro.machine.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingConfig:
    """How the model states are sharded and communicated (the flags `--paro-*`)."""

    world: World  # with the run's groups
    context: ContextParallelConfig = field(default_factory=ContextParallelConfig)
    collective: str = "native"
    prefetch_units: int = 1
    updated_ahead: int | None = None  # units ahead of updated parameters' all-gathers; None: all
    machine: Machine | None = None  # measured speeds, for `auto` and the planner
    materialize: str = "gather"  # or "rotate": how ranks get the parameters they compute with
    rotate_in_place: bool = False
    survive: int = 0  # nodes that may be lost at once with every state still held
    elastic: bool = False  # whether a restart may have fewer or more nodes
    inter_bits: str | None = None  # auto: the planner chooses the bits between groups

    def __post_init__(self) -> None:
        if self.rotate_in_place and self.materialize != "rotate":
            raise UserError("--paro-rotate-in-place needs --paro-materialize rotate")
        if self.survive < 0:
            raise UserError(f"--paro-survive {self.survive} is negative; 0 demands nothing")
        if self.prefetch_units < 0:
            raise UserError(f"--paro-prefetch-units {self.prefetch_units} is negative; 0 is off")

    @property
    def needs_in_memory_checkpoints(self) -> bool:
        """Whether in-memory checkpoints are on without a flag of their own."""
        return self.survive > 0 or self.elastic


def units_ahead(text: str | None, prefetch_units: int, *, by_nccl: bool) -> int | None:
    """Return the value of --paro-updated-ahead, None for all.

    Without the flag, all on CPU ranks. Under NCCL as few as possible, which costs almost nothing
    where launches are free and saves most where they keep their order (docs/planning.md).
    """
    if text == "all" or (text is None and not (by_nccl and prefetch_units)):
        return None
    if text is None:
        return prefetch_units + 1
    if not text.isdecimal() or int(text) <= prefetch_units:
        raise UserError(
            f"--paro-updated-ahead {text} must be all, or more than the {prefetch_units} of "
            "--paro-prefetch-units: a unit is gathered behind its updated parameters"
        )
    return int(text)
