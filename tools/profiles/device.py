"""Work of a GPU's streams in the steps of a trace of torch's profiler."""

# [Note: a trace of a GPU]
# Kernels, copies and memsets are complete events of the categories below, in microseconds; `args`
# names the stream. A range that the program opens is there twice: on its thread, and, as
# gpu_user_annotation, on each stream from the first kernel launched in it to the last one. A kernel
# counts for the innermost range alone: the mark of the last step ends before its update, which is a
# range of its own. The ranges of the host begin and end before the GPU does that work, so the steps
# are those of the compute stream where the trace has them, with all other ranges there.

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NotRequired, TypedDict

from paro.errors import UserError
from paro.files.schema import Count, Figure, conform
from tools.profiles.kernel_class import (
    CLASSES,
    COPIES,
    ELEMENTWISE,
    NCCL,
    NOT_COMPUTING,
    OPTIMIZER,
    OTHER,
    class_of,
)

_COPIES = ("gpu_memcpy", "gpu_memset")
_WORK = ("kernel", *_COPIES)
_RANGE = "gpu_user_annotation"
_STEP, _OWN, _UPDATE, _LANE = "ProfilerStep#", "paro/", "paro/update", "paro/lane:"

Interval = tuple[float, float]


class _Placed(TypedDict):
    stream: Count


class Event(TypedDict):
    """A range of time, in microseconds."""

    name: str
    ts: Figure
    dur: Annotated[float, (0.0, 1e30)]


class _Work(Event):
    cat: str
    args: _Placed


class _Range(Event):
    """A range of the program on its thread (`tid` a thread) or on the GPU (a stream)."""

    tid: int
    cat: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel or a copy; seconds from the start of the first step."""

    name: str
    kind: str
    stream: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Gap:
    """Seconds in which the compute stream was idle, and the work before and after."""

    start: float
    seconds: float
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Kernel:
    """All runs of a kernel."""

    name: str
    kind: str
    runs: int
    seconds: float


@dataclass(frozen=True)
class DeviceProfile:
    """The activities of a rank's GPU from the start of the first step to the end of the last."""

    rank: int
    num_steps: int
    seconds: float
    compute_stream: int
    work: tuple[Work, ...]  # sorted by start
    lanes: Mapping[int, str]  # the names of the comm streams by CUDA stream

    @cached_property
    def busy(self) -> float:
        """Seconds in which any stream worked."""
        return self._seconds_of(CLASSES)

    @cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """The idle times of the compute stream, in their order."""
        gaps, until, before = [], 0.0, "the start of the steps"
        for item in self.work:
            if item.stream != self.compute_stream:
                continue
            if item.start > until:
                gaps.append(Gap(until, item.start - until, before, item.name))
            if item.end >= until:
                until, before = item.end, item.name
        if until < self.seconds:
            gaps.append(Gap(until, self.seconds - until, before, "the end of the steps"))
        return tuple(gaps)

    @cached_property
    def nccl(self) -> float:
        """Seconds in which any kernel of NCCL ran."""
        return self._seconds_of((NCCL,))

    @cached_property
    def exposed(self) -> float:
        """Seconds in which kernels of NCCL ran, and none that computes."""
        computing = {*CLASSES}.difference(NOT_COMPUTING)
        return self._seconds_of({*computing, NCCL}) - self._seconds_of(computing)

    def _seconds_of(self, kinds: Collection[str]) -> float:
        """Return seconds in which work of any of these classes ran."""
        return length((item.start, item.end) for item in self.work if item.kind in kinds)

    @cached_property
    def by_class(self) -> dict[str, float]:
        """Seconds of all kernels and copies, by class."""
        seconds_of = dict.fromkeys(CLASSES, 0.0)
        for item in self.work:
            seconds_of[item.kind] += item.end - item.start
        return seconds_of

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """Kernels and copies by name and class, those with the most time first."""
        sums_of: dict[tuple[str, str], tuple[int, float]] = {}
        for item in self.work:
            runs, seconds = sums_of.get((item.name, item.kind), (0, 0.0))
            sums_of[item.name, item.kind] = runs + 1, seconds + item.end - item.start
        rows = (Kernel(name, kind, *sums) for (name, kind), sums in sums_of.items())
        return tuple(sorted(rows, key=lambda row: (-row.seconds, row.name)))


def is_of_device(events: Iterable[dict[str, Any]]) -> bool:
    return any(event.get("cat") in _WORK for event in events)


def device_profile(events: Sequence[dict[str, Any]], rank: int, what: str) -> DeviceProfile:
    """Build the profile of a trace's complete events; `UserError` for a damaged one."""
    device_events = [event for event in events if event.get("cat") in _WORK]
    work: list[_Work] = conform(device_events, list[_Work], f"{what}: traceEvents")
    named = [event for event in events if str(event.get("name")).startswith((_STEP, _OWN))]
    ranges: list[_Range] = conform(named, list[_Range], f"{what}: traceEvents")
    on_device = [event for event in ranges if event.get("cat") == _RANGE]
    stream = _compute_stream(work)
    here = [event for event in on_device if event["tid"] == stream]
    steps = [event for event in here if event["name"].startswith(_STEP)] or [
        event for event in ranges if event.get("cat") != _RANGE and event["name"].startswith(_STEP)
    ]
    if not steps:
        raise UserError(f"{what}: no step of a training")
    within = here if steps[0] in here else steps
    begin = min(event["ts"] for event in within)
    end = max(event["ts"] + event["dur"] for event in within)
    if end - begin < 1e-3:  # a nanosecond
        raise UserError(f"{what}: its steps have no length")
    updates = union(
        (event["ts"], event["ts"] + event["dur"]) for event in here if event["name"] == _UPDATE
    )
    in_steps = sorted(_in_steps(work, stream, updates, (begin, end)), key=lambda item: item.start)
    if not in_steps:
        raise UserError(f"{what}: the GPU did nothing in its steps")
    lanes = {
        event["tid"]: event["name"].removeprefix(_LANE)
        for event in on_device
        if event["name"].startswith(_LANE)
    }
    return DeviceProfile(rank, len(steps), (end - begin) / 1e6, stream, tuple(in_steps), lanes)


def _compute_stream(work: Iterable[_Work]) -> int:
    """Return the stream with the most time of kernels that compute; without one, of all work."""
    seconds: dict[int, tuple[float, float]] = {}
    for event in work:
        computes = event["cat"] not in _COPIES and class_of(event["name"]) not in NOT_COMPUTING
        computed, all_work = seconds.get(event["args"]["stream"], (0.0, 0.0))
        seconds[event["args"]["stream"]] = (
            computed + computes * event["dur"],
            all_work + event["dur"],
        )
    return max(sorted(seconds), key=lambda stream: seconds[stream])


def _in_steps(
    work: Iterable[_Work], compute: int, updates: Sequence[Interval], steps: Interval
) -> Iterable[Work]:
    """Return the work in the steps; elementwise kernels in `updates` are the optimizer's."""
    begin, end = steps
    starts = [start for start, _ in updates]
    for event in work:
        start, stop = event["ts"], event["ts"] + event["dur"]
        stream = event["args"]["stream"]
        if stop <= begin or start >= end:
            continue
        kind = COPIES if event["cat"] in _COPIES else class_of(event["name"])
        index = bisect_right(starts, start) - 1
        is_update = stream == compute and index >= 0 and start < updates[index][1]
        if is_update and kind in (ELEMENTWISE, OTHER):
            kind = OPTIMIZER
        first, last = max(start, begin), min(stop, end)
        yield Work(event["name"], kind, stream, (first - begin) / 1e6, (last - begin) / 1e6)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge times into intervals that do not overlap, sorted."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Return the time that is in any of them."""
    return sum(end - start for start, end in union(intervals))
