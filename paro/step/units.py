"""The units of a model with the layouts of their flat buffers, from which all else is computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from paro.layout import UnitLayout

EMPTY = UnitLayout((), 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A unit: the layouts of its two flat buffers, and what decides how they are sent.

    Engine and planner build and count a model from a list of these, in forward order.
    """

    name: str
    part: str = ""  # where weights rotate: the part of the model that reads these
    trainable: UnitLayout = EMPTY
    frozen: UnitLayout = EMPTY
    borrows: tuple[str, ...] = ()  # other units whose parameters it also reads (a tied head)
    backward_needs_weight: bool = True
    replicated: bool = False  # params and grads are whole on every rank, under any strategy
    matrices: tuple[tuple[int, ...], ...] = ()  # that Muon would update: offset, rows, columns
    bucket_size: int = 1  # units of the bucket that begins with this one; 0 in its others

    @property
    def trainable_numel(self) -> int:
        """Elements of the parameters that train, with padding."""
        return self.trainable.numel

    @property
    def numel(self) -> int:
        return self.trainable.numel + self.frozen.numel

    @property
    def traffic_kind(self) -> tuple[int, ...]:
        """The same collectives of units of equal kind send the same."""
        numels = self.trainable.numel, self.frozen.numel, self.trainable.decayed_stop
        return *numels, self.replicated, self.bucket_size

    @property
    def trains(self) -> tuple[bool, ...]:
        """Whether the parameters of each of its buffers train."""
        return (True,) * bool(self.trainable.numel) + (False,) * bool(self.frozen.numel)


class Buffer(NamedTuple):
    """One of the flat buffers of a unit: that of the parameters that train, or of the others."""

    unit: Unit
    trains: bool
    unit_index: int

    @property
    def name(self) -> str:
        return self.unit.name if self.trains else f"{self.unit.name} (frozen)"

    @property
    def layout(self) -> UnitLayout:
        return self.unit.trainable if self.trains else self.unit.frozen


def buffers_of(units: Iterable[Unit]) -> list[Buffer]:
    """Return all buffers, by their numbers."""
    return [
        Buffer(unit, trains, index) for index, unit in enumerate(units) for trains in unit.trains
    ]
