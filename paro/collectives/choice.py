"""The choice of an algorithm for a collective by its size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paro.collectives.schedule import Op
from paro.topology import Axes, AxisSpan, axes_of

BestOf = Callable[[Op, Axes, int], str]
Pieces = Callable[[Op, AxisSpan, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmChoice:
    """The algorithms to choose from and the function that picks one, the same on every rank.

    `best` gets the collective, the kinds of axes that it uses, and the bytes of the whole buffer
    in the communication dtype; it returns one of `names`. None: the first of `names`.

    `pieces` makes ho-ring a pipeline of the backend's own collectives, as NCCL needs it, and gives
    its number of pieces for a collective, its span and bytes. None: messages from point to point.
    """

    names: tuple[str, ...]
    best: BestOf | None = None
    pieces: Pieces | None = None

    @property
    def pipelines(self) -> bool:
        """Whether ho-ring is a pipeline."""
        return self.pieces is not None

    def of(self, op: Op, span: AxisSpan, num_bytes: int) -> str:
        """Return the algorithm of a collective along a span that is not empty."""
        return self.names[0] if self.best is None else self.best(op, axes_of(span), num_bytes)
