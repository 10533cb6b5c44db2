"""Ring, H-Ring and HO-Ring by point-to-point messages: schedules, carried out step by step."""

# NCCL and gloo hide the messages of a ring; here they are explicit. A `Schedule` lists the sends
# and receives of this rank, each on a level: the ring inside groups or the one between them.
# With overlap every level has a comm stream, a thread that runs the steps of the level. Receives
# are posted ahead and complete in order. The thread that receives a chunk immediately sends all
# messages that waited for the chunk, on any level. Without overlap the training thread runs the
# steps one by one, each a paired send and receive.
#
# Messages of a level have consecutive numbers as tags, across collectives, so any thread can send
# them. Both ends count equally, because all ranks run the same program.

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice, pairwise

import torch
from torch import Tensor

from paro.collectives.choice import ring_levels
from paro.collectives.hops import ALGORITHMS
from paro.collectives.interface import CollectiveRequest, Collectives
from paro.collectives.schedule import (
    MESSAGES_UNDER_WAY,
    Chunks,
    Op,
    Schedule,
    count_chunks,
    cut,
    make_schedule,
)
from paro.collectives.wire import Pending, Wire
from paro.distributed.comm_stream import DONE, AllEvents, Event
from paro.topology import AxisSpan, StreamKind


@dataclass(eq=False)
class ScheduledCollectives(Collectives):
    """Collectives by a point-to-point algorithm of hops.py."""

    resources: Resources
    _algorithm: str

    def run(self, request: CollectiveRequest) -> Event:
        op, whole, span, comm_dtype, shard, after, _ = request
        if not span:
            return after
        own = request._replace(shard=None).own(self.groups.rank)
        if shard is not None and shard.data_ptr() != own.data_ptr():
            outer = ring_levels(self._algorithm, span)[-1]
            after = self._submit(StreamKind.GATHER, outer, partial(own.copy_, shard), after=after)
        event = self._start(request._replace(after=after))
        if op is not Op.ALL_REDUCE or whole.dtype == comm_dtype:
            return event
        # Round this rank's shard as the other ranks received it.
        return self.run_after(span, lambda: own.copy_(own.to(comm_dtype)), after=event)

    def _start(self, request: CollectiveRequest) -> Event:
        kind, parts = request.stream_kind, ring_levels(self._algorithm, request.span)
        transfer = self._transfer(request, parts)
        if self.groups.resources.streams.runs_concurrently:
            after, run = request.after, transfer.run_level
            jobs = (partial(run, level) for level in range(len(parts)))
            pairs = zip(parts, jobs, strict=True)
            return AllEvents([self._submit(kind, part, job, after=after) for part, job in pairs])
        # Without overlap every job, that of `after` too, runs while it is submitted.
        for index, step in enumerate(transfer.schedule.steps):
            self._submit(kind, parts[step.level], partial(transfer.run_step, index))
        return DONE

    def _transfer(self, request: CollectiveRequest, parts: Sequence[AxisSpan]) -> Transfer:
        op, whole, span, comm_dtype, *_ = request
        members = self.groups.topology.members(span, self.groups.rank)
        wires = [Wire(self.groups, request.stream_kind, part) for part in parts]
        sizes = tuple(len(wire.members) for wire in wires)
        shard_numel = whole.numel() // len(members)
        # The second bound keeps every chunk of a small shard non-empty.
        num_chunks = min(count_chunks(shard_numel * comm_dtype.itemsize), max(1, shard_numel // 8))
        if request.units > 1:  # h-ring joins uncut shards, but shards of units lie apart
            num_chunks = max(2, num_chunks)
        hops, position = ALGORITHMS[self._algorithm], members.index(self.groups.rank)
        schedule = make_schedule(op, hops, sizes, position, num_chunks)
        ranges = [cut(*request.range_of(member), num_chunks) for member in members]
        groups = [self.resources[wire.kind, wire.span] for wire in wires]
        return Transfer(schedule, wires, groups, members, whole, comm_dtype, ranges)


class MessageBuffers:
    """Buffers for messages that are not received in place, reused by later messages.

    On a CPU allocating new memory costs more than the sum itself.
    """

    def __init__(self) -> None:
        self._slots: dict[int, Tensor] = {}

    def slot(self, number: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor of `numel` elements, in the memory of slot `number`."""
        num_bytes = numel * dtype.itemsize
        slot = self._slots.get(number)
        if slot is None or slot.numel() < num_bytes:
            slot = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self._slots[number] = slot
        return slot[:num_bytes].view(dtype)


@dataclass(slots=True)
class GroupResources:
    """Message tags and scratch buffers of a process group, shared by all algorithms on it."""

    tags: Iterator[int] = field(default_factory=count)
    scratch: MessageBuffers = field(default_factory=MessageBuffers)


Resources = defaultdict[tuple[StreamKind, AxisSpan], GroupResources]


@dataclass(eq=False)
class Transfer:
    """A schedule in execution: by one thread per level, or step by step."""

    schedule: Schedule
    wires: Sequence[Wire]  # [level]
    groups: Sequence[GroupResources]  # [level]
    members: Sequence[int]  # [position] -> rank
    whole: Tensor
    comm_dtype: torch.dtype
    ranges: Sequence[Sequence[tuple[int, int]]]  # [owner][chunk] -> (start, stop)

    def __post_init__(self) -> None:
        self._steps = self.schedule.steps
        self._tags = {
            index: next(group.tags)
            for group, indices in zip(self.groups, self.schedule.of_level, strict=True)
            for index in indices
        }
        # State shared by the threads of all levels.
        self._changed = threading.Condition()
        self._arrived = [False] * len(self._steps)
        self._unsent = [len(indices) for indices in self.schedule.of_level]
        self._sends: list[deque[Pending]] = [deque() for _ in self.wires]
        self._failure: BaseException | None = None  # the first exception on any level

    def run_step(self, index: int) -> None:
        """Run the paired send and receive of one step."""
        landed, pending = self._post(index, 0)
        self._send([index])
        pending.wait()
        self._take(index, landed)
        self._sends[self._steps[index].level].pop().wait()

    def run_level(self, level: int) -> None:
        """Run all steps of one level; levels run concurrently, each in a thread."""
        try:
            self._run_level(level)
        except BaseException as failure:
            with self._changed:
                self._failure = self._failure or failure
                self._changed.notify_all()
            raise

    def _run_level(self, level: int) -> None:
        steps = self.schedule.of_level[level]
        receives = (self._post(i, n % MESSAGES_UNDER_WAY) for n, i in enumerate(steps))
        posted = deque(islice(receives, MESSAGES_UNDER_WAY))
        self._send([i for i in steps if not self._steps[i].send.after])
        for index in steps:
            landed, pending = posted.popleft()
            pending.wait()
            self._await(partial(self._all_arrived, self._steps[index].receive.after))
            self._take(index, landed)
            self._arrive(index)
            posted.extend(islice(receives, 1))
            # Waiting for old sends bounds the number of converted copies, which live until sent.
            while len(self._sends[level]) > MESSAGES_UNDER_WAY:
                self._sends[level].popleft().wait()
        # Some messages of this level are sent by the threads of other levels.
        self._await(lambda: self._unsent[level] == 0)
        while self._sends[level]:
            self._sends[level].popleft().wait()

    def _post(self, index: int, slot: int) -> tuple[Tensor, Pending]:
        level, _, receive = self._steps[index]
        landing = self._view(receive.chunks)
        if receive.adds or landing.dtype != self.comm_dtype:  # else received in place
            scratch = self.groups[level].scratch
            landing = scratch.slot(slot, landing.numel(), self.comm_dtype, landing.device)
        peer = self.members[receive.peer]
        return landing, self.wires[level].receive(landing, peer, self._tags[index])

    def _take(self, index: int, landed: Tensor) -> None:
        """Add a received message to its chunks, or copy it there."""
        receive = self._steps[index].receive
        view = self._view(receive.chunks)
        if receive.adds:
            view.add_(landed)
        elif landed.data_ptr() != view.data_ptr():
            view.copy_(landed)

    def _arrive(self, index: int) -> None:
        """Record an arrival and send the messages whose dependencies are now complete."""
        with self._changed:
            self._arrived[index] = True
            followers = self.schedule.followers[index]
            ready = [i for i in followers if self._all_arrived(self._steps[i].send.after)]
            self._changed.notify_all()
        self._send(ready)

    def _send(self, indices: Sequence[int]) -> None:
        for index in indices:
            level, send, _ = self._steps[index]
            outgoing = self._view(send.chunks).to(self.comm_dtype)  # a view, or a copy
            peer = self.members[send.peer]
            pending = self.wires[level].send(outgoing, peer, self._tags[index])
            with self._changed:
                self._sends[level].append(pending)
                self._unsent[level] -= 1
                self._changed.notify_all()

    def _view(self, chunks: Chunks) -> Tensor:
        """Return the chunks of one message, as a view of the buffer."""
        ranges = sorted(self.ranges[chunk.owner][chunk.number] for chunk in chunks)
        assert all(a[1] == b[0] for a, b in pairwise(ranges)), f"{chunks} are no neighbours"
        return self.whole[ranges[0][0] : ranges[-1][1]]

    def _all_arrived(self, steps: Sequence[int]) -> bool:
        return all(self._arrived[index] for index in steps)

    def _await(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or condition())
            if self._failure is not None:  # raised on every level, not only on the failed level
                raise RuntimeError(f"elsewhere {self._failure}") from self._failure
