"""What optimizers keep of every element that they update: names in checkpoints, types, sizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paro.layout import Shape
from paro.precision import BYTES_OF, PrecisionConfig
from paro.strategy import Strategy

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
    """The master and the two moments."""
    return (
        MASTER,
        OptimState(name=MOMENTS[0], dtype=precision.exp_avg_dtype),
        OptimState(name=MOMENTS[1], dtype=precision.exp_avg_sq_dtype),
    )


def muon_states(precision: PrecisionConfig) -> tuple[OptimState, ...]:
    """The master and the momentum."""
    return MASTER, OptimState(name=MOMENTUM, dtype=precision.exp_avg_dtype)


def is_for_muon(name: str, shape: Shape) -> bool:
    """Whether Muon, if it is chosen, updates a parameter: the matrices of blocks."""
    return name.startswith("blocks.") and len(shape) > 1


def kept_numels(numel: int, muon_stop: int, size: int) -> tuple[int, int]:
    """For how many elements of a unit a rank keeps Muon's states, and for how many AdamW's.

    Muon updates the elements before `muon_stop` of the flat buffer of `numel`. A rank's range, of
    `size`, may have less of either: all ranks take as much as the one that has most.
    """
    in_last = max(0, min(size, muon_stop - (numel - size)))
    return min(muon_stop, size), size - in_last


def optimizer_bytes(
    precision: PrecisionConfig, numel: int, muon_stop: int, size: int, *, has_master: bool
) -> int:
    """Bytes of a rank's optimizer states of a unit, of which it updates `size` elements."""
    by_muon, by_adamw = kept_numels(numel, muon_stop, size)
    kept = by_muon * bytes_of(muon_states(precision)[1:])
    kept += by_adamw * bytes_of(adamw_states(precision)[1:])
    return kept + has_master * size * bytes_of([MASTER])


def bytes_of(states: Iterable[OptimState]) -> int:
    """Bytes of an element."""
    return sum(BYTES_OF[state.dtype] for state in states)


def master_is_param(strategy: Strategy, *, is_fp32: bool) -> bool:
    """Whether the shard of fp32 parameters is the master: where their degrees are equal."""
    return is_fp32 and strategy.params == strategy.optim
