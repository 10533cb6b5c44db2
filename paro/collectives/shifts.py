"""A point-to-point ring along an axis span: a shift sends each rank's slice to its neighbour."""

# Ranks along the span have positions 0 .. d - 1. Clockwise, a rank sends to the next position and
# receives from the previous one; counter-clockwise the opposite. The slices held at four positions
# at the start and after one and two clockwise shifts:
#
#     position     0  1  2  3
#     at first     0  1  2  3
#     clockwise    3  0  1  2
#     clockwise    2  3  0  1

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from torch import Tensor

from paro.collectives.interface import Endpoint
from paro.collectives.wire import Wire
from paro.distributed.comm_stream import Event, Stage
from paro.topology import AxisSpan, StreamKind


class ShiftDirection(Enum):
    """Direction of a shift; the value is the change of a slice's position."""

    CLOCKWISE = 1
    COUNTER_CLOCKWISE = -1


class _Underway:
    """A shift in flight on the backend's own threads; `finish` is called to complete it."""

    def __init__(self, stream: Hashable, finish: Callable[[], None]) -> None:
        self._stream = stream
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def stages(self) -> Iterator[Stage]:
        if self._finish is not None:
            yield self._stream, self


@dataclass(eq=False)
class Ring(Endpoint):
    """A ring of the ranks along `span`, as this rank uses it, with its own comm stream.

    An empty span is a ring of one rank, which never shifts.

    All ranks must call `shift` with matching arguments in the same order and wait for the events in
    that order. Buffers belong to the ring until their event has completed. After an exception
    the ring is unusable.
    """

    kind: StreamKind
    span: AxisSpan

    def __post_init__(self) -> None:
        self._members = self.groups.topology.members(self.span, self.groups.rank)
        self._next_tag = 0
        self.size = len(self._members)
        self.position = self._members.index(self.groups.rank)

    def owner_of(self, num_shifts: int) -> int:
        """Return the position whose slice this rank holds after `num_shifts` clockwise shifts."""
        return (self.position - num_shifts) % self.size

    def shift(self, outgoing: Tensor, incoming: Tensor, direction: ShiftDirection) -> Event:
        """Start a shift: send `outgoing` to one neighbour, fill `incoming` from the other."""
        assert outgoing.data_ptr() != incoming.data_ptr(), "a shift in place needs scratch"
        return self._shift([(outgoing, incoming)], direction, in_place=False)

    def shift_in_place(self, values: Tensor, scratch: Tensor, direction: ShiftDirection) -> Event:
        """Start a shift within `values`, in chunks received into `scratch`.

        A chunk is overwritten after it has been sent; `scratch` holds two chunks. With threads all
        sends start at once and receives overlap copies; on CUDA a chunk is one grouped exchange.
        """
        step = scratch.numel() // 2
        pairs = [
            (chunk, scratch[number % 2 * step :][: chunk.numel()])
            for number, chunk in enumerate(values.split(step))
        ]
        return self._shift(pairs, direction, in_place=True)

    def _shift(
        self, pairs: Sequence[tuple[Tensor, Tensor]], direction: ShiftDirection, in_place: bool
    ) -> Event:
        """Send the first tensor of every pair and receive into the second, in order."""
        wire, first = Wire(self.groups, self.kind, self.span), self._next_tag
        self._next_tag += len(pairs)
        to = self._members[(self.position + direction.value) % self.size]
        source = self._members[(self.position - direction.value) % self.size]

        def exchange() -> None:
            for tag, (outgoing, incoming) in enumerate(pairs, first):
                wire.exchange({to: outgoing}, {source: incoming}, tag=tag)
                if in_place:
                    outgoing.copy_(incoming)

        if not self.groups.resources.streams.runs_concurrently:
            return self._submit(self.kind, self.span, exchange)

        receives = (wire.receive(into, source, tag) for tag, (_, into) in enumerate(pairs, first))
        arriving = deque(islice(receives, 2))
        leaving = [wire.send(outgoing, to, tag) for tag, (outgoing, _) in enumerate(pairs, first)]

        def finish() -> None:
            for (outgoing, incoming), sent in zip(pairs, leaving, strict=True):
                arriving.popleft().wait()
                sent.wait()
                if in_place:
                    outgoing.copy_(incoming)
                arriving.extend(islice(receives, 1))

        return _Underway((self.kind, *self.span), finish)
