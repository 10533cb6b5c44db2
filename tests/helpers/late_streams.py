"""Comm streams whose jobs run as late as waits allow, in a random order: finds missing waits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from paro.collectives.scheduled import MessageBuffers
from paro.distributed.comm_stream import DONE, AllEvents, Event, Job, Stage
from paro.sharding.buffers import ElasticBuffer


@dataclass(slots=True, eq=False)
class _LateEvent:
    """A stored job, and the jobs that must run before it: its stream's last one and `after`."""

    streams: LateStreams
    job: Job | None
    needs: list[_LateEvent]
    buffers: list[tuple[ElasticBuffer, int]] = field(default_factory=list)

    def wait(self) -> None:
        self.streams.run(self)

    def stages(self) -> Iterator[Stage]:
        return iter(())


class LateStreams:
    """Stores jobs at submit; a wait runs only the jobs it needs, in a random topological order.

    The order is drawn from `seed`, so it is the same on all ranks, which wait in the same order.
    A job runs at submit with probability `eager`, with what it needs. Like CUDA's streams, and
    unlike threads, it queues one job per message. `in_order` is NCCL's rule under
    NCCL_LAUNCH_ORDER_IMPLICIT: a job begins after all jobs submitted earlier have begun, on any
    stream, so it also needs what these need.
    """

    runs_concurrently = False

    def __init__(self, seed: int, *, eager: float, in_order: bool = False) -> None:
        self._random = Random(seed)
        self._eager = eager
        self._in_order = in_order
        self._last: dict[Hashable, _LateEvent] = {}
        self._begun: list[_LateEvent] = []  # what has run once the last submitted job has begun
        self._after: list[_LateEvent] | None = None  # collects what `after` stands for

    def submit(self, stream: Hashable, job: Job, *, after: Event = DONE) -> Event:
        needs = self._needed_by(after)
        if stream in self._last:
            needs.append(self._last[stream])
        if self._in_order:
            needs = self._begun = list(dict.fromkeys((*self._begun, *needs)))
        event = _LateEvent(self, job, [need for need in needs if need.job is not None])
        event.buffers = [(buffer, _FREED[buffer]) for buffer in _buffers_in(job)]
        self._last[stream] = event
        if self._random.random() < self._eager:
            self.run(event)
        return event

    def close(self) -> None:
        for event in list(self._last.values()):
            self.run(event)

    def run(self, event: _LateEvent) -> None:
        """Runs the jobs that `event` needs and its own; inside `submit`, only notes it."""
        if self._after is not None:
            self._after.append(event)
            return
        left = _unfinished(event)
        while left:
            ready = [one for one in left if all(need.job is None for need in one.needs)]
            self._run_one(chosen := self._random.choice(ready))
            left.remove(chosen)

    def _needed_by(self, after: Event) -> list[_LateEvent]:
        # As on CUDA, where `after` is waited for on the comm stream: it may stand for several.
        noted: list[_LateEvent] = []
        self._after = noted
        try:
            after.wait()
        finally:
            self._after = None
        return noted

    def _run_one(self, event: _LateEvent) -> None:
        assert event.job is not None
        try:
            for buffer, freed in event.buffers:
                if not buffer.alive or _FREED[buffer] != freed:
                    raise RuntimeError("a job runs on storage that was freed after its submit")
            with torch.no_grad():
                event.job()
        except BaseException:
            self._last.clear()  # else `close` would run what is left
            raise
        event.job = None
        event.needs.clear()
        event.buffers.clear()


def _unfinished(event: _LateEvent) -> list[_LateEvent]:
    """The jobs that have not run of `event` and of what it needs, in the order found."""
    found: dict[int, _LateEvent] = {}
    todo = [event]
    while todo:
        one = todo.pop()
        if one.job is not None and id(one) not in found:
            found[id(one)] = one
            todo += one.needs
    return list(found.values())


_BUFFERS: dict[int, ElasticBuffer] = {}  # by storage
_FREED: WeakKeyDictionary[ElasticBuffer, int] = WeakKeyDictionary()  # how often


def _buffers_in(job: Callable[..., Any]) -> list[ElasticBuffer]:
    """The buffers whose views a job's function refers to."""
    found: dict[int, ElasticBuffer] = {}
    seen: set[int] = set()
    todo: list[Any] = [job]
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            key = value.untyped_storage()._cdata
            if key in _BUFFERS:
                found[key] = _BUFFERS[key]
        elif isinstance(value, _LateEvent | AllEvents):
            continue  # what it stands for runs before
        elif isinstance(value, list | tuple):
            todo += value
        elif isinstance(value, partial):
            todo += [value.func, *value.args, *value.keywords.values()]
        elif is_dataclass(value) and not isinstance(value, type):
            todo += [getattr(value, one.name) for one in fields(value)]
        elif callable(value):
            todo += [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
            todo.append(getattr(value, "__self__", None))
    return list(found.values())


@contextmanager
def poisoned_buffers() -> Iterator[None]:
    """Fills every buffer that is allocated meanwhile with NaN, and counts how often it is freed."""
    make, alloc, free, slot = (
        ElasticBuffer.__init__,
        ElasticBuffer.alloc,
        ElasticBuffer.free,
        MessageBuffers.slot,
    )

    def noted_make(self: ElasticBuffer, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _BUFFERS[self.values.untyped_storage()._cdata] = self
        _FREED[self] = 0

    def poisoned_alloc(self: ElasticBuffer) -> None:
        alloc(self)
        self.values.fill_(torch.nan)

    def noted_free(self: ElasticBuffer) -> None:
        free(self)
        _FREED[self] += 1

    def poisoned_slot(self: MessageBuffers, number: int, *args: Any) -> Tensor:
        had = self._slots.get(number)
        result = slot(self, number, *args)
        if self._slots[number] is not had:
            result.fill_(torch.nan if result.is_floating_point() else 0xA5)  # codes are bytes
        return result

    with (
        patch.object(ElasticBuffer, "__init__", noted_make),
        patch.object(ElasticBuffer, "alloc", poisoned_alloc),
        patch.object(ElasticBuffer, "free", noted_free),
        patch.object(MessageBuffers, "slot", poisoned_slot),
    ):
        try:
            yield
        finally:
            _BUFFERS.clear()
