"""What optimizers keep of every element that they update: names in checkpoints, types, sizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paro.layout import Shape
from paro.precision import BYTES_OF, PrecisionConfig

PARAM = "param"  # the state of the master, or of the parameter itself where it is frozen


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimState:
    """One value that the optimizer keeps of every element that it updates."""

    name: str
    dtype: str = "fp32"  # a name of `BYTES_OF`


MASTER = OptimState(name=PARAM)
MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum_buffer"
STATE_NAMES = (PARAM, *MOMENTS, MOMENTUM)


def adamw_states(precision: PrecisionConfig) -> tuple[OptimState, ...]:
    """Return the master and the two moments."""
    return (
        MASTER,
        OptimState(name=MOMENTS[0], dtype=precision.exp_avg_dtype),
        OptimState(name=MOMENTS[1], dtype=precision.exp_avg_sq_dtype),
    )


def muon_states(precision: PrecisionConfig) -> tuple[OptimState, ...]:
    """Return the master and the momentum."""
    return MASTER, OptimState(name=MOMENTUM, dtype=precision.exp_avg_dtype)


def is_for_muon(name: str, shape: Shape) -> bool:
    """Return whether Muon, if it is chosen, updates a parameter: the matrices of blocks."""
    return name.startswith("blocks.") and len(shape) > 1


def bytes_of(states: Iterable[OptimState]) -> int:
    """Return bytes of an element."""
    return sum(BYTES_OF[state.dtype] for state in states)
