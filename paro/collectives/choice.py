"""Which algorithm carries out a collective, by its size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paro.collectives.schedule import Op
from paro.topology import Axes


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmChoice:
    """The algorithms to choose from, and which is best; every rank must choose alike.

    `best` gets the collective, the kinds of axes that it crosses, and the bytes of the whole
    buffer as they travel.
    """

    names: tuple[str, ...]
    best: Callable[[Op, Axes, int], str]
