"""The states that optimizers have of every element: names in checkpoints, types, sizes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro.layout import Shape, UnitLayout
from paro.precision import BYTES_OF, PrecisionConfig

if TYPE_CHECKING:
    from torch import Tensor

PARAM = "param"  # the fp32 master of a parameter, or a frozen parameter itself
SENT = "sent"  # parameters as ranks received them, where quantized updates differ from masters
GRAD_ERRORS = "grad_errors"  # quantization errors of gradients; valid only on the same ranks

# States of outer steps. Of states that differ from group to group, `of_group` names those of one.
# Moments of the first group keep their names: runs with other groups continue with them.
ANCHOR = "outer_anchor"  # parameters on which groups last agreed
OUTER_MOMENTUM = "outer_momentum"
BEGUN = "outer_begun"  # a group's masters when the round in flight began
MASTER_OF_GROUP = "outer_master"
SHARED_BY_GROUPS = (PARAM, ANCHOR, OUTER_MOMENTUM)  # states that are equal in all groups


def of_group(state: str, group: int) -> str:
    """Name a state of one of the groups that train alone."""
    return state if group == 0 and state in STATE_NAMES else f"{state}@{group}"


def of_other_group(name: str, group: int) -> str:
    """Name a parameter's state in another of the groups that train alone."""
    kind, _, parameter = name.partition(".")
    plain = kind.partition("@")[0]
    return name if plain in SHARED_BY_GROUPS else f"{of_group(plain, group)}.{parameter}"


def group_of(name: str) -> int:
    """Return the group that trains alone whose state this is; 0 also for states of all."""
    return int(name.partition(".")[0].partition("@")[2] or 0)


def is_of_group(name: str) -> bool:
    """Say whether a state of a parameter has meaning only for equal groups that train alone."""
    kind = name.partition(".")[0]
    return kind == ANCHOR or "@" in kind


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimState:
    """A value that the optimizer has for every element that it updates."""

    name: str
    dtype: str = "fp32"  # the type of the value: a name of `BYTES_OF`


MASTER = OptimState(name=PARAM)
MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum_buffer"
EMA = "ema"  # the average of a parameter
STATE_NAMES = (PARAM, *MOMENTS, MOMENTUM, EMA)


def adamw_states(precision: PrecisionConfig) -> tuple[OptimState, ...]:
    """Return AdamW's states: the master and the two moments."""
    return (
        MASTER,
        OptimState(name=MOMENTS[0], dtype=precision.exp_avg_dtype),
        OptimState(name=MOMENTS[1], dtype=precision.exp_avg_sq_dtype),
    )


def muon_states(precision: PrecisionConfig) -> tuple[OptimState, ...]:
    """Return Muon's states: the master and the momentum."""
    return MASTER, OptimState(name=MOMENTUM, dtype=precision.exp_avg_dtype)


def averages(precision: PrecisionConfig) -> tuple[OptimState, ...]:
    """Return the state of averaged weights (EMA) of all trained parameters; empty without."""
    return () if precision.ema_decay is None else (OptimState(name=EMA),)


def is_for_muon(name: str, shape: Shape) -> bool:
    """Say whether a parameter is a matrix of a block, which Muon updates in a run with Muon."""
    return name.startswith("blocks.") and len(shape) > 1


def bytes_of(states: Iterable[OptimState]) -> int:
    """Count bytes of an element in some states."""
    return sum(BYTES_OF[state.dtype] for state in states)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatShard:
    """A rank's contiguous range of a unit's flat buffer, as checkpoints save and load it."""

    layout: UnitLayout
    start: int  # index of values[0] in the unit's flat buffer
    values: Tensor  # 1-D
    state: str  # the name of the state in `values`: of STATE_NAMES, SENT or GRAD_ERRORS
    rank: int = 0
    replicas: Sequence[int] = (0,)  # the ranks that hold this range, `rank` included

    def own_part(self, writers: Collection[int]) -> tuple[int, int]:
        """Return the range [begin, end) of `values` that this rank writes.

        The replicas in `writers` divide the range equally; ranks outside `writers` write elsewhere.
        """
        sharing = [rank for rank in self.replicas if rank in writers]
        numel, index = self.values.numel(), sharing.index(self.rank)
        return index * numel // len(sharing), (index + 1) * numel // len(sharing)
