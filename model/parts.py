"""How a model describes its units, and the parts of them that can be computed slice by slice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedPart:
    """A method of a unit that can be computed one slice of its weights at a time.

    `join(module, slices, *args)` equals `method(*args)`: it calls each of `slices` once, in order,
    and each call runs `of_slice` with a slice of the weights instead of the whole weights.
    """

    method: str
    of_slice: str
    cuts: Mapping[str, int]  # its matrices' names, and the dim along which each is cut
    replicated: tuple[str, ...] = ()  # parameters that every slice reads whole
    join: Callable[..., Tensor]
    of_rows: bool = False  # whether the module's `first_row` is set to the slice's first row
    of_starts: bool = False  # whether `starts` of the module gets where the slices of weights begin
    shares: int | None = None  # indivisible shares, if it can only be cut between them


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """A unit module: its parameters are gathered while it runs; `name` is its module path."""

    name: str
    module: nn.Module
    parts: tuple[SlicedPart, ...]
    borrows: tuple[str, ...] = ()  # other units whose parameters it reads
    backward_needs_weight: bool = True
    recomputed: bool = False  # whether backward recomputes its forward
