"""What a model says of its units, and of the parts of them that may be computed slice by slice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedPart:
    """A method of a unit that may be computed slice by slice of its weights.

    `join(module, slices, *args)` equals `method(*args)`: it calls every one of `slices` once, in
    order, and each runs `of_slice` with a slice of the weights in the place of the whole ones.
    """

    method: str
    of_slice: str
    cuts: Mapping[str, int]  # its matrices, by the dim along which they are cut
    beside: tuple[str, ...] = ()  # parameters that every slice reads whole
    join: Callable[..., Tensor]
    of_rows: bool = False  # whether a slice is told its first row, in `first_row`
    shares: int | None = None  # that it is cut between, where it cannot be cut anywhere


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """A part of the model that is whole while it runs, by its name in the module tree."""

    name: str
    module: nn.Module
    parts: tuple[SlicedPart, ...]
    borrows: tuple[str, ...] = ()  # units whose parameters it reads too
    backward_needs_weight: bool = True
    recomputed: bool = False  # whether backward runs its forward again
