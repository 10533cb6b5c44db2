"""What AdamW keeps of every element that it updates: names in checkpoints, types, sizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paro.precision import BYTES_OF, PrecisionConfig
from paro.strategy import Strategy

PARAM = "param"  # the state of the master, or of the parameter itself where it is frozen


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimState:
    """One value that the optimizer keeps of every element that it updates."""

    name: str
    dtype: str = "fp32"  # a name of `BYTES_OF`
    is_moment: bool = True  # starts at 0, also with --finetune; left out by --no-save-optim


MASTER = OptimState(name=PARAM, is_moment=False)
STATE_NAMES = (PARAM, "exp_avg", "exp_avg_sq")


def adamw_states(precision: PrecisionConfig) -> tuple[OptimState, ...]:
    """The master and the two moments."""
    return (
        MASTER,
        OptimState(name="exp_avg", dtype=precision.exp_avg_dtype),
        OptimState(name="exp_avg_sq", dtype=precision.exp_avg_sq_dtype),
    )


def bytes_of(states: Iterable[OptimState]) -> int:
    """Bytes of an element."""
    return sum(BYTES_OF[state.dtype] for state in states)


def master_is_param(strategy: Strategy, *, is_fp32: bool) -> bool:
    """Whether the shard of fp32 parameters is the master: where their degrees are equal."""
    return is_fp32 and strategy.params == strategy.optim
