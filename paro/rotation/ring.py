"""A ring of point-to-point transfers along one axis: what a rank holds, its neighbour gets."""

# Ranks along the axis stand at places 0 .. d - 1. Clockwise, a rank sends to the next place and
# receives from the one before; counter-clockwise the other way round. Four places, each with its
# own slice at first, and what they hold after one and two shifts clockwise:
#
#     place        0  1  2  3
#     at first     0  1  2  3
#     clockwise    3  0  1  2
#     clockwise    2  3  0  1

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from datetime import timedelta
from enum import Enum

import torch
from torch import Tensor

from paro.collectives.wire import Pending, Wire
from paro.distributed.byte_counter import ByteCounter
from paro.distributed.comm_stream import CommStreams, Event, Stage
from paro.distributed.groups import Groups, Use, make_groups
from paro.layout import chunk_numel
from paro.topology import Axis, AxisSpan, Topology

_TAGS = 1 << 31  # what a backend's tag can hold


class Turn(Enum):
    """Which way slices travel: by how many places a shift moves them."""

    CLOCKWISE = 1
    COUNTER_CLOCKWISE = -1


class _Underway:
    """A shift whose messages the backend's own threads carry; `step_reduce` is what ends it."""

    def __init__(self, stream: Hashable, step_reduce: Callable[[], None]) -> None:
        self._stream = stream
        self._finish: Callable[[], None] | None = step_reduce

    def wait(self) -> None:
        step_reduce, self._finish = self._finish, None
        if step_reduce is not None:
            step_reduce()

    def stages(self) -> Iterator[Stage]:
        if self._finish is not None:
            yield self._stream, self


class Ring:
    """This rank's place among those along `axis`, with a lane and a process group of its own.

    Every rank calls `shift` alike and in one order, and waits for the events that it returns in
    that order. Buffers belong to the ring from the call to the end of the event; after an exception
    the ring is unusable.
    """

    def __init__(
        self, axis: Axis, groups: Groups, streams: CommStreams, traffic: ByteCounter
    ) -> None:
        self._run = (axis,)
        self._groups = groups
        self._streams = streams
        self._stream = (Use.ROTATE, axis.index)
        self._wire = Wire(groups, traffic)
        self._members = groups.topology.members(self._run, groups.rank)
        self._next_tag = 0
        self.size = axis.size
        self.position = axis.digit(groups.rank)

    def home_of(self, num_shifts: int) -> int:
        """The place whose slice is here after so many shifts clockwise."""
        return (self.position - num_shifts) % self.size

    def shift(self, outgoing: Tensor, incoming: Tensor, turn: Turn) -> Event:
        """Starts one step: `outgoing` to the one neighbour, into `incoming` from the other."""
        assert outgoing.data_ptr() != incoming.data_ptr(), "a shift in place needs room beside"
        tag = self._take_tags(1)
        if not self._streams.runs_concurrently:
            return self._streams.submit(
                self._stream, lambda: self._exchange(outgoing, incoming, turn, tag)
            )
        messages = self._receive(incoming, turn, tag), self._send(outgoing, turn, tag)

        def step_reduce() -> None:
            for message in messages:
                message.wait()

        return _Underway(self._stream, step_reduce)

    def shift_in_place(self, values: Tensor, beside: Tensor, turn: Turn) -> Event:
        """Starts one step within one buffer, in chunks that land in `beside`, two at a time.

        A chunk is overwritten when it has left. Where jobs have threads, all chunks set out at
        once and the next one lands while one is copied; on streams each is one grouped exchange.
        """
        step = beside.numel() // 2
        chunks = values.split(step)
        landings = [
            beside[number % 2 * step :][: chunk.numel()] for number, chunk in enumerate(chunks)
        ]
        first_tag = self._take_tags(len(chunks))

        def job() -> None:
            for number, (chunk, landed) in enumerate(zip(chunks, landings, strict=True)):
                self._exchange(chunk, landed, turn, first_tag + number)
                chunk.copy_(landed)

        if self._streams.runs_concurrently:
            return self._exchange_ahead(chunks, landings, turn, first_tag)
        return self._streams.submit(self._stream, job)

    def _exchange_ahead(
        self, chunks: Sequence[Tensor], landings: Sequence[Tensor], turn: Turn, first_tag: int
    ) -> Event:
        def receive(number: int) -> Pending:
            return self._receive(landings[number], turn, first_tag + number)

        arriving = deque(receive(number) for number in range(min(2, len(chunks))))
        leaving = [
            self._send(chunk, turn, first_tag + number) for number, chunk in enumerate(chunks)
        ]

        def step_reduce() -> None:
            for number, chunk in enumerate(chunks):
                arriving.popleft().wait()
                leaving[number].wait()
                chunk.copy_(landings[number])
                if number + 2 < len(chunks):
                    arriving.append(receive(number + 2))

        return _Underway(self._stream, step_reduce)

    def close(self) -> None:
        """Gives the process group back; its lane ends with the others'."""
        self._groups.close()

    def _send(self, tensor: Tensor, turn: Turn, tag: int) -> Pending:
        to, _ = self._neighbours(turn)
        return self._wire.send(Use.ROTATE, self._run, tensor, to, tag % _TAGS)

    def _receive(self, tensor: Tensor, turn: Turn, tag: int) -> Pending:
        _, source = self._neighbours(turn)
        return self._wire.receive(Use.ROTATE, self._run, tensor, source, tag % _TAGS)

    def _exchange(self, outgoing: Tensor, incoming: Tensor, turn: Turn, tag: int) -> None:
        to, source = self._neighbours(turn)
        self._wire.exchange(
            Use.ROTATE, self._run, (outgoing, to), (incoming, source), tag=tag % _TAGS
        )

    def _neighbours(self, turn: Turn) -> tuple[int, int]:
        """To whom, and from whom."""
        to = self._members[(self.position + turn.value) % self.size]
        return to, self._members[(self.position - turn.value) % self.size]

    def _take_tags(self, number: int) -> int:
        first = self._next_tag
        self._next_tag += number
        return first


def make_ring(
    degree: int,
    *,
    topology: Topology,
    rank: int,
    streams: CommStreams,
    traffic: ByteCounter,
    timeout: timedelta | None,
) -> Ring:
    """The ring of the ranks that hold one full copy at `degree`; collective over the world.

    Without a timeout nothing is connected: that is for a rank which is planned and never runs.
    """
    run = topology.axes_between(1, degree)
    assert len(run) == 1, f"{degree} ranks are no axis of {topology}"
    runs: dict[Use, frozenset[AxisSpan]] = {} if timeout is None else {Use.ROTATE: frozenset({run})}
    groups = make_groups(topology, rank, runs, timeout or timedelta())
    return Ring(run[0], groups, streams, traffic)


def room_beside(numel: int, dtype: torch.dtype) -> int:
    """How many elements an exchange in place takes beside a buffer of so many: two chunks."""
    return 2 * chunk_numel(numel, dtype.itemsize)
