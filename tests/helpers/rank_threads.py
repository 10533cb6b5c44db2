"""Runs ranks as threads of one process that share a device: copies in the order of events."""

# [Note: ranks as threads]
# For GPUs where NCCL refuses several ranks. Every rank is a thread with a compute stream of its own
# and the comm streams of the product. A collective is a meeting of its group's threads: each says
# which tensor it brings and records an event on the comm stream that called it; each then copies
# from the others' tensors after their events, and its stream waits until the others have copied.
# So the host waits only until all ranks have queued the collective, and the order on the GPU is
# that of events alone, as with NCCL. The ranks submit in one order: see [Note: stream order].
#
# Backward must run in its rank's own thread: autograd has only one thread per device.

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from paro.collectives import wire
from paro.distributed import groups
from paro.distributed.comm_stream import InlineStreams
from paro.distributed.control import Control
from paro.distributed.world import World
from tests.helpers.ranks import RankError

Result = TypeVar("Result")

_SECONDS = 120.0  # that a rank waits for the others
_here = threading.local()  # `rank` of this thread, and how many groups it has made


class Group:
    """A process group: its threads meet in the order in which all of them submit."""

    def __init__(self, members: Sequence[int]) -> None:
        self.members = list(members)
        self.barrier = threading.Barrier(len(members), timeout=_SECONDS)
        self._brought: list[Any] = [None] * len(members)
        self._boxes: dict[Hashable, SimpleQueue[Any]] = {}

    @property
    def place(self) -> int:
        return self.members.index(_here.rank)

    def meet(self, value: object) -> list[Any]:
        """What every member brings, by place."""
        self._brought[self.place] = value
        self.barrier.wait()
        brought = list(self._brought)
        self.barrier.wait()  # nobody brings the next value before all have read
        return brought

    def box(self, *of: Hashable) -> SimpleQueue[Any]:
        """Returns the queue of messages of one kind from one member to another."""
        return self._boxes.setdefault(of, SimpleQueue())

    def take(self, *of: Hashable) -> Any:
        """The first that is in a box, once there is one."""
        end = time.monotonic() + _SECONDS
        while not self.barrier.broken and time.monotonic() < end:
            with suppress(Empty):
                return self.box(*of).get(timeout=0.1)
        raise threading.BrokenBarrierError

    def offer(self, value: object, device: torch.device) -> list[Any]:
        """What every member brings; the current stream waits until it may be read."""
        brought = self.meet((value, _recorded(device)))
        for _, event in brought:
            _wait_for(event)
        return [each for each, _ in brought]

    def part(self, device: torch.device) -> None:
        """Lets the current stream wait until all members have read what it brought."""
        for event in self.meet(_recorded(device)):
            _wait_for(event)


def _recorded(device: torch.device) -> torch.cuda.Event | None:
    return torch.cuda.current_stream().record_event() if device.type == "cuda" else None


def _wait_for(event: torch.cuda.Event | None) -> None:
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def _all_gather(whole: Tensor, shard: Tensor, group: Group) -> None:
    parts = whole.view(len(group.members), -1)
    for place, other in enumerate(group.offer(shard, whole.device)):
        if place != group.place or other.data_ptr() != parts[place].data_ptr():
            parts[place].copy_(other)
    group.part(whole.device)


def _reduce_scatter(own: Tensor, whole: Tensor, group: Group) -> None:
    parts = [other.view(len(group.members), -1) for other in group.offer(whole, whole.device)]
    total = torch.stack([part[group.place] for part in parts]).sum(0, dtype=torch.float32)
    group.part(whole.device)
    own.copy_(total)


def _all_reduce(whole: Tensor, group: Group) -> None:
    total = torch.stack(group.offer(whole, whole.device)).sum(0, dtype=torch.float32)
    group.part(whole.device)
    whole.copy_(total)


@dataclass(frozen=True, slots=True)
class _Message:
    """Stands for torch's P2POp."""

    op: Callable[..., object]
    tensor: Tensor
    peer: int
    group: Group
    tag: int = 0


def _all_to_all(received: Tensor, sent: Tensor, group: Group) -> None:
    rows = received.view(len(group.members), -1)
    for place, other in enumerate(group.offer(sent, sent.device)):
        rows[place].copy_(other.view(len(group.members), -1)[group.place])
    group.part(sent.device)


def _exchange(messages: Sequence[_Message]) -> list[Any]:
    """Any number of messages to and from members; those between two arrive in their order."""
    group, device = messages[0].group, messages[0].tensor.device
    sent = [message for message in messages if message.op is dist.isend]
    for message in sent:
        group.box(_here.rank, message.peer).put((message.tensor, _recorded(device)))
    for message in messages:
        if message.op is dist.irecv:
            tensor, event = group.take(message.peer, _here.rank)
            _wait_for(event)
            message.tensor.copy_(tensor)
            group.box(_here.rank, message.peer, "read").put(_recorded(device))
    for message in sent:
        _wait_for(group.take(message.peer, _here.rank, "read"))
    return []


class _ThreadControl(Control):
    """Sums and gathers of all threads."""

    def __init__(self, world: World, device: torch.device, everybody: Group) -> None:
        super().__init__(world, device)
        self._everybody = everybody

    def sum(self, values: list[float]) -> list[float]:
        return [sum(column) for column in zip(*self._everybody.meet(values), strict=True)]

    def gather(self, value: object) -> list[Any]:
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # for tensors in it, which others read
        return self._everybody.meet(value)


@dataclass(slots=True)
class _Threads:
    """The ranks of one run, and the groups that they have made so far."""

    world_size: int
    device: torch.device
    groups: list[Group] = field(default_factory=list)
    failures: list[tuple[int, str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def new_group(self, members: Sequence[int], **_: object) -> Group | None:
        """The same object for the same call of every rank."""
        with self._lock:
            number, _here.num_groups = _here.num_groups, _here.num_groups + 1
            if number == len(self.groups):
                self.groups.append(Group(members))
            group = self.groups[number]
        assert group.members == list(members), "the ranks make different groups"
        return group if _here.rank in members else None

    def run(self, rank: int, work: Callable[[], None]) -> None:
        _here.rank, _here.num_groups = rank, 1  # the first is of all ranks
        try:
            with torch.autograd.set_multithreading_enabled(False), ExitStack() as stack:
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)
                    stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))
                work()
                if self.device.type == "cuda":
                    torch.cuda.current_stream().synchronize()
        except BaseException:
            self.failures.append((rank, traceback.format_exc()))
            for group in self.groups:
                group.barrier.abort()


@contextmanager
def _threads_for_processes(threads: _Threads) -> Iterator[None]:
    """Replaces what the product calls of torch.distributed; on a CPU nothing overlaps."""
    with ExitStack() as stack:
        for owner, name, value in (
            (wire, "_all_gather", _all_gather),
            (wire, "_reduce_scatter", _reduce_scatter),
            (dist, "all_reduce", _all_reduce),
            (dist, "all_to_all_single", _all_to_all),
            (dist, "P2POp", _Message),
            (dist, "batch_isend_irecv", _exchange),
            (dist, "get_backend", lambda _group: "nccl"),
            (dist, "new_group", threads.new_group),
            (dist, "destroy_process_group", lambda _group: None),
            (groups, "_nccl_options", lambda *_, **__: None),
        ):
            stack.enter_context(patch.object(owner, name, value))
        if threads.device.type == "cpu":
            inline = patch.object(groups, "ThreadStreams", lambda _device: InlineStreams())
            stack.enter_context(inline)
        yield


def run_rank_threads(
    function: Callable[[Control], Result], world_size: int, device: torch.device
) -> list[Result]:
    """The results of `function(control)` on ranks that are threads, by rank.

    What it builds runs the code of NCCL ranks. Raises `RankError` with the first failure.
    """
    threads = _Threads(world_size, device, [Group(range(world_size))])
    results: dict[int, Result] = {}

    def work(rank: int) -> None:
        world = World(rank=rank, size=world_size)
        results[rank] = function(_ThreadControl(world, device, threads.groups[0]))

    with _threads_for_processes(threads):
        running = [
            threading.Thread(target=threads.run, args=(rank, lambda rank=rank: work(rank)))
            for rank in range(world_size)
        ]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    if threads.failures:
        rank, text = next(
            (found for found in threads.failures if "BrokenBarrierError" not in found[1]),
            threads.failures[0],
        )
        raise RankError(f"rank {rank} of {world_size}, a thread, failed\n{text}")
    return [results[rank] for rank in range(world_size)]
