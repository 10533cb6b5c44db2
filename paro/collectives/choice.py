"""The choice of an algorithm for a collective by its size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paro.collectives.schedule import Op
from paro.topology import Axes


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmChoice:
    """The algorithms to choose from and the function that picks one, the same on every rank.

    `best` gets the collective, the kinds of axes that it uses, and the bytes of the whole buffer
    in the communication dtype; it returns one of `names`.
    """

    names: tuple[str, ...]
    best: Callable[[Op, Axes, int], str]
