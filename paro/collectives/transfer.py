"""One collective under way: its chunks in a buffer, what has arrived, what is still to be sent."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from paro.collectives.schedule import CHUNKS_UNDER_WAY, Chunk, Schedule
from paro.collectives.wire import Pending, Wire
from paro.groups import Run, Use
from paro.lanes import Job

_TAGS = 1 << 31  # what a backend's tag can hold


class Level(NamedTuple):
    """Where the messages of a schedule's level go: a process group, and the first one's tag."""

    use: Use
    run: Run
    first_tag: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """The whole buffer, the type on the wire, and where every chunk lies."""

    whole: Tensor
    travel: torch.dtype
    ranges: list[list[tuple[int, int]]]  # by owner and piece

    def view(self, chunk: Chunk) -> Tensor:
        start, stop = self.ranges[chunk.owner][chunk.piece]
        return self.whole[start:stop]

    def outgoing(self, chunk: Chunk) -> Tensor:
        """The chunk as it is sent: itself, or a copy in the wire's type."""
        return self.view(chunk).to(self.travel)

    def landing(self, chunk: Chunk, *, adds: bool) -> Tensor:
        """Where the chunk is received: at its place, or beside it."""
        view = self.view(chunk)
        if not adds and self.travel == self.whole.dtype:
            return view
        return torch.empty_like(view, dtype=self.travel)

    def take(self, chunk: Chunk, landed: Tensor, *, adds: bool) -> None:
        """Puts what has landed where it belongs."""
        view = self.view(chunk)
        if adds:
            view.add_(landed)
        elif landed.data_ptr() != view.data_ptr():
            view.copy_(landed)


class Transfer:
    """A schedule on its way; its jobs run level by level in threads, or step by step."""

    def __init__(
        self,
        schedule: Schedule,
        levels: Sequence[Level],
        members: Sequence[int],
        buffer: Buffer,
        wire: Wire,
    ) -> None:
        self.schedule = schedule
        self._steps = schedule.steps
        self._levels = levels
        self._members = members  # the rank at every place
        self._buffer = buffer
        self._wire = wire
        self._tags = {
            index: (levels[level].first_tag + number) % _TAGS
            for level, indices in enumerate(schedule.of_level)
            for number, index in enumerate(indices)
        }
        # Shared by the threads of all levels.
        self._changed = threading.Condition()
        self._arrived = [False] * len(self._steps)
        self._unsent = [len(indices) for indices in schedule.of_level]
        self._sends: list[deque[Pending]] = [deque() for _ in levels]
        self._failed = False

    def step_job(self, index: int) -> Job:
        """Sends and receives of one step, together."""

        def job() -> None:
            step = self._steps[index]
            send, receive = step.send, step.receive
            level = self._levels[step.level]
            landed = self._buffer.landing(receive.chunk, adds=receive.adds)
            self._wire.exchange(
                level.use,
                level.run,
                (self._buffer.outgoing(send.chunk), self._members[send.peer]),
                (landed, self._members[receive.peer]),
                tag=self._tags[index],
            )
            self._buffer.take(receive.chunk, landed, adds=receive.adds)

        return job

    def level_job(self, level: int) -> Job:
        """All steps of one level, in a thread of its own beside those of the other levels."""

        def job() -> None:
            try:
                self._run_level(level)
            except BaseException:
                with self._changed:
                    self._failed = True
                    self._changed.notify_all()
                raise

        return job

    def _run_level(self, level: int) -> None:
        todo = deque(self.schedule.of_level[level])
        posted: deque[tuple[Tensor, Pending]] = deque()
        ahead = iter(self.schedule.of_level[level])

        def post() -> None:
            index = next(ahead, None)
            if index is not None:
                posted.append(self._post(index))

        for _ in range(CHUNKS_UNDER_WAY):
            post()
        self._send([i for i in todo if not self._steps[i].send.after])
        while todo:
            index = todo.popleft()
            landed, pending = posted.popleft()
            pending.wait()
            receive = self._steps[index].receive
            self._await(partial(self._all_arrived, receive.after))
            self._buffer.take(receive.chunk, landed, adds=receive.adds)
            self._arrive(index)
            post()
            # A converted copy lives until it has left.
            while len(self._sends[level]) > CHUNKS_UNDER_WAY:
                self._sends[level].popleft().wait()
        # Some are sent by the threads of other levels.
        self._await(lambda: self._unsent[level] == 0)
        while self._sends[level]:
            self._sends[level].popleft().wait()

    def _post(self, index: int) -> tuple[Tensor, Pending]:
        step = self._steps[index]
        level, receive = self._levels[step.level], step.receive
        landing = self._buffer.landing(receive.chunk, adds=receive.adds)
        peer = self._members[receive.peer]
        return landing, self._wire.receive(level.use, level.run, landing, peer, self._tags[index])

    def _arrive(self, index: int) -> None:
        """Notes an arrival and sends what waited for nothing else."""
        with self._changed:
            self._arrived[index] = True
            followers = self.schedule.followers[index]
            ready = [i for i in followers if self._all_arrived(self._steps[i].send.after)]
            self._changed.notify_all()
        self._send(ready)

    def _send(self, indices: Sequence[int]) -> None:
        for index in indices:
            step = self._steps[index]
            level, send = self._levels[step.level], step.send
            outgoing, peer = self._buffer.outgoing(send.chunk), self._members[send.peer]
            pending = self._wire.send(level.use, level.run, outgoing, peer, self._tags[index])
            with self._changed:
                self._sends[step.level].append(pending)
                self._unsent[step.level] -= 1
                self._changed.notify_all()

    def _all_arrived(self, steps: Sequence[int]) -> bool:
        return all(self._arrived[index] for index in steps)

    def _await(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failed or condition())
            if self._failed:
                raise RuntimeError("the collective failed over its other links")
