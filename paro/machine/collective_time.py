"""Cost model of collectives on a machine: their time, and the links and cores that they occupy."""

# A collective takes the measured time where the machine file has it (machine.py interpolates), else
# the time of a latency-bandwidth model (alpha-beta): T = steps * latency + bytes / bandwidth, by
# the ring formulas of collectives/hops.py. An all-gather of s ranks along an axis, with an output
# of V bytes (of a reduce-scatter: an input), takes
#
#     inside a group    (s - 1) latency + (s - 1) / s * V / a rank's link
#     between groups    (s - 1) latency + flows * (s - 1) / s * V / a group's NICs together
#
# where flows is the number of ranks of a group that send between groups: all ranks, or fewer for an
# axis that begins below the group size. All flows have equal size. An all-reduce of few bytes on
# many ranks uses a tree of 2 log2(s) hops.
#
# The simulated step overlaps collectives with computing and with each other. So a collective is a
# list of phases, one after the other. A phase is a set of jobs that run at once, each in a comm
# stream, as collectives/ runs them:
#
#     native                one phase per axis: gathers outermost first, reductions innermost first
#     flat                  one phase of one job over all axes
#     ring, h-ring, ho-ring one phase, one job per kind of link; on GPUs ho-ring is a pipeline of
#                           collectives/pipeline.py, otherwise messages from point to point

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

from paro.collectives.choice import AlgorithmChoice, ChunkCount
from paro.collectives.pipeline import MAX_CHUNKS, default_num_chunks, make_pipeline
from paro.collectives.schedule import NCCL_COLLECTIVES, Op, count_chunks
from paro.errors import UserError
from paro.layout import chunk_numel
from paro.machine.caching import cached_by
from paro.machine.machine import (
    LinkSpeed,
    Machine,
    Nic,
    fastest_algorithm,
    measured_at,
    passes,
    seconds,
)
from paro.topology import Axes, Axis, AxisSpan, Link, split_by_link

StreamAxes = tuple[int, ...]  # the axes that a comm stream serves


class TimedJob(NamedTuple):
    """Work for one comm stream, with the shares of time for which it occupies links and cores.

    Jobs that use a kind of link at the same time share it. On CPU ranks computing loses the
    processor time that jobs take.
    """

    seconds: float  # duration if the job shares links and cores with no other work
    stream: StreamAxes = ()
    intra: float = 0.0  # share of the duration, from 0 to 1, in which links inside groups are busy
    inter: float = 0.0  # share of the duration, from 0 to 1, in which links between groups are busy
    cpu: float = 0.0  # share of the duration, from 0 to 1, in which a rank's cores are busy
    slowed: float = 1.0  # factor of the duration while ranks compute


ParallelJobs = tuple[TimedJob, ...]


@dataclass(frozen=True, eq=False)
class CollectiveTimes:
    """Times of a machine's collectives by one algorithm, or (auto) by the fastest for each size."""

    machine: Machine
    algorithm: str

    @cached_by(lambda op, span, num_bytes: (op, span, num_bytes))
    def phases(self, op: Op, span: AxisSpan, num_bytes: int) -> tuple[ParallelJobs, ...]:
        """Return the jobs of a collective along an axis span, on `num_bytes` unsharded."""
        if not span or num_bytes == 0:
            return ()
        is_auto = self.algorithm == "auto"
        algorithm = self._fastest(op, span, num_bytes) if is_auto else self.algorithm
        if algorithm == "native":
            return tuple((job,) for job in self._native(op, span, num_bytes))
        if algorithm == "flat":
            return ((self._whole(op, span, num_bytes, "flat"),),)
        return (self._rings(op, span, num_bytes, algorithm),)

    def seconds(self, op: Op, span: AxisSpan, num_bytes: int) -> float:
        """Return the time of a collective from start to end, if it shares links with no other."""
        phases = self.phases(op, span, num_bytes)
        return math.fsum(max(job.seconds for job in phase) for phase in phases)

    def shift(self, span: AxisSpan, num_bytes: int, in_place: bool) -> tuple[ParallelJobs, ...]:
        """Return the jobs of a shift: every rank of a ring sends its slice to the next rank.

        A pass round the ring sends the messages of a ring all-gather, so a shift takes as long as
        one step of a ring all-gather. In place, two chunks of a slice are in flight at a time, and
        have arrived before the next two are sent.
        """
        if not span or num_bytes == 0:
            return ()
        num_shifts, slice_bytes = _size(span) - 1, num_bytes // _size(span)
        kind = "cuda" if self.machine.is_of_gpus else "cpu"
        chunk = chunk_numel(slice_bytes, 1, device_type=kind)
        turns = -(-slice_bytes // (2 * chunk)) if in_place else 1
        job = self._whole(Op.ALL_GATHER, span, num_bytes // turns, self._as_ring(span))
        return ((job._replace(seconds=job.seconds / num_shifts * turns),),)

    def hop(self, span: AxisSpan, num_bytes: int) -> TimedJob:
        """Return the job of a message from every rank of a span to the next, over one NIC each."""
        whole, size = num_bytes * _size(span), _size(span)
        job = self._whole(Op.ALL_GATHER, span, whole, self._as_ring(span), own_nics=True)
        return job._replace(seconds=job.seconds / (size - 1))

    def exchange(self, span: AxisSpan, num_bytes: int) -> TimedJob:
        """Return the job of an all-to-all: `num_bytes` from each rank of a span to each other rank.

        It takes as long as two all-gathers at the same time, inside groups and between them, in
        which a rank sends as many bytes.
        """
        size, group_size = _size(span), self.machine.group_size
        inside = min(size, group_size)
        jobs = []
        for inner, outer, peers in ((1, inside, inside - 1), (group_size, size, size - inside)):
            if peers:
                axis = Axis(index=0, inner=inner, outer=outer, link=Link.INTRA)
                whole = num_bytes * peers * axis.size // (axis.size - 1)
                jobs.append(self._whole(Op.ALL_GATHER, (axis,), whole, self._as_ring((axis,))))
        longest = max(job.seconds for job in jobs)
        return TimedJob(
            stream=tuple(axis.index for axis in span),
            seconds=longest,
            intra=sum(job.seconds * job.intra for job in jobs) / longest,
            inter=sum(job.seconds * job.inter for job in jobs) / longest,
            cpu=min(1.0, sum(job.seconds * job.cpu for job in jobs) / longest),
            slowed=max(job.slowed for job in jobs),
        )

    def _as_ring(self, span: AxisSpan) -> str:
        """Return the measured algorithm that sends messages as a ring does."""
        axes = _axes(self.machine, span)
        names = {row.algorithm for row in self.machine.measured if row.axes is axes}
        rings = [name for name in ("ring", "h-ring", "ho-ring") if name in names]
        return rings[0] if rings else "native" if names else "ring"

    def _fastest(self, op: Op, span: AxisSpan, num_bytes: int) -> str:
        names = algorithms_of(self.machine, by_nccl=False)
        of_names = {name: CollectiveTimes(self.machine, name) for name in names}
        return min(names, key=lambda name: of_names[name].seconds(op, span, num_bytes))

    def _native(self, op: Op, span: AxisSpan, num_bytes: int) -> list[TimedJob]:
        """Return one job per axis in time order; an all-reduce reduces, all-reduces and gathers."""
        inwards = [(axis, num_bytes // (axis.inner // span[0].inner)) for axis in span]
        steps: list[tuple[Op, Axis, int]]
        if op is Op.ALL_GATHER:
            steps = [(op, *step) for step in reversed(inwards)]
        elif op is Op.REDUCE_SCATTER:
            steps = [(op, *step) for step in inwards]
        else:
            steps = [(Op.REDUCE_SCATTER, *step) for step in inwards[:-1]]
            steps.append((op, *inwards[-1]))
            steps += [(Op.ALL_GATHER, *step) for step in reversed(inwards[:-1])]
        return [self._whole(kind, (axis,), size, "native") for kind, axis, size in steps]

    def _whole(
        self, op: Op, span: AxisSpan, num_bytes: int, algorithm: str, *, own_nics: bool = False
    ) -> TimedJob:
        """Return one job over all axes of a span; with `own_nics` each flow has one NIC."""
        job, busy = self._measured(op, span, num_bytes, algorithm), 1.0
        if job is None or _has_links(self.machine, span):
            latency, on_links = _ring(self.machine, op, span, num_bytes, own_nics=own_nics)
            busy = 1.0 if job is None else min(1.0, on_links / job.seconds)
            job = job or TimedJob(latency + on_links)
        return self._along(span, job, busy)

    def _along(self, span: AxisSpan, job: TimedJob, busy: float) -> TimedJob:
        """Return a job that occupies the links of a span for the share `busy` of its time."""
        stream = tuple(axis.index for axis in span)
        if _uses_nics(self.machine, span):
            return job._replace(stream=stream, inter=busy)
        return job._replace(stream=stream, intra=busy)

    def _rings(self, op: Op, span: AxisSpan, num_bytes: int, algorithm: str) -> ParallelJobs:
        """Return a job per kind of link, each as long as the collective, busy for a share of it."""
        machine = self.machine
        inner, outer = split_by_link(span)
        if algorithm == "ring" or not (inner and outer):
            return (self._whole(op, span, num_bytes, algorithm),)
        within = sum(_ring(machine, op, inner, num_bytes))
        between = sum(_ring(machine, op, outer, num_bytes // _size(inner)))
        shares_links = _uses_nics(machine, inner) == _uses_nics(machine, outer)
        job = self._measured(op, span, num_bytes, algorithm)
        if job is None and algorithm == "ho-ring" and machine.is_of_gpus:
            num_chunks = fastest_num_chunks(machine, op, span, num_bytes)
            job = TimedJob(pipeline_seconds(machine, op, span, num_bytes, num_chunks))
        elif job is None and algorithm == "ho-ring" and not shares_links:
            # The last chunk from another group still has to be sent on inside the group.
            num_chunks = count_chunks(num_bytes // _size(inner) // _size(outer))
            chunk_bytes = num_bytes // _size(outer) // num_chunks
            job = TimedJob(max(within, between) + sum(_ring(machine, op, inner, chunk_bytes)))
        elif job is None:
            job = TimedJob(within + between)
        return tuple(
            self._along(
                part,
                job._replace(cpu=job.cpu * seconds / (within + between)),
                min(1.0, seconds / job.seconds),
            )
            for part, seconds in ((inner, within), (outer, between))
        )

    def _measured(self, op: Op, span: AxisSpan, num_bytes: int, algorithm: str) -> TimedJob | None:
        """Return a collective as measured, whatever its links; None if none was measured.

        An axis that is smaller or larger than the measured one takes as long as the measured axis
        with a buffer for which each rank sends as many bytes.
        """
        machine = self.machine
        if not machine.measured:
            return None
        axes = _axes(machine, span)
        ranks = {
            Axes.INTRA: machine.group_size,
            Axes.INTER: machine.num_groups,
            Axes.BOTH: machine.world_size,
        }[axes]
        size = _size(span)
        if ranks == 1:
            return None
        equal_bytes = round(num_bytes * ((size - 1) / size) / ((ranks - 1) / ranks))
        key = machine, op, axes, algorithm, max(1, equal_bytes)
        time = seconds(*key)
        busy = measured_at(*key, figure=lambda row: row.busy_seconds) or time
        cpu = measured_at(*key, figure=lambda row: row.cpu_seconds) or 0.0
        cores = machine.device.cores if machine.device else None
        working = 0.0 if cores is None else cpu / cores
        time = max(time, working)  # below the measured sizes the extrapolation may be shorter
        return TimedJob(time, cpu=working / time, slowed=max(1.0, busy / time))


def _size(span: AxisSpan) -> int:
    return span[-1].outer // span[0].inner


def _axes(machine: Machine, span: AxisSpan) -> Axes:
    """Return the links that a span uses in groups of the machine (not of the strategy)."""
    if not _uses_nics(machine, span):
        return Axes.INTRA
    return Axes.BOTH if span[0].outer <= machine.group_size else Axes.INTER


def _uses_nics(machine: Machine, span: AxisSpan) -> bool:
    return span[-1].outer > machine.group_size


def _ring(
    machine: Machine, op: Op, span: AxisSpan, num_bytes: float, *, own_nics: bool = False
) -> tuple[float, float]:
    """Return a ring's total latency, and the time for which its slowest links are busy.

    The ranks of a group are neighbours in the ring of a span. A group's flows share the bandwidth
    of all its NICs; with `own_nics` a flow uses at most one NIC.
    """
    size, share = _size(span), 1.0
    if not _uses_nics(machine, span):
        speed = speed_of(machine, Link.INTRA)
        lap = (size - 1) * speed.latency_seconds
    else:
        speed = speed_of(machine, Link.INTER)
        flows = min(span[0].inner, machine.group_size)
        inside = machine.group_size // flows  # ring ranks per group
        crossings = size // inside - 1
        lap = crossings * speed.latency_seconds
        if inside > 1:
            lap += (size - 1 - crossings) * speed_of(machine, Link.INTRA).latency_seconds
        share = 1.0 if own_nics else flows / machine.group_size
        if machine.nic is Nic.SHARED:
            share = max(flows, machine.nics) if own_nics else flows
    latency = passes(op) * lap
    if op is Op.ALL_REDUCE:
        latency = min(latency, 2 * math.ceil(math.log2(size)) * speed.latency_seconds)
    seconds_per_byte = 8 * share / speed.bits_per_second
    return latency, passes(op) * num_bytes * (size - 1) / size * seconds_per_byte


def pipeline_seconds(
    machine: Machine, op: Op, span: AxisSpan, num_bytes: int, num_chunks: int
) -> float:
    """Simulate a pipeline of two levels, inside and between groups; a level runs stages in turn.

    No stages overlap if both levels use one kind of links (the machine's groups may differ).
    """
    inner, outer = split_by_link(span)
    size = num_bytes / num_chunks
    stages = make_pipeline(op, num_chunks)
    took = {
        (kind, level): sum(_ring(machine, kind, part, part_size))
        for kind in {stage.op for stage in stages}
        for level, part, part_size in ((0, inner, size), (1, outer, size / _size(inner)))
    }
    links = [_uses_nics(machine, part) for part in (inner, outer)]
    free = dict.fromkeys(links, 0.0)
    ends: list[float] = []
    for stage in stages:
        link = links[stage.level]
        begin = free[link] if stage.after is None else max(free[link], ends[stage.after])
        ends.append(begin + took[stage.op, stage.level])
        free[link] = ends[-1]
    return ends[-1]


def fastest_num_chunks(machine: Machine, op: Op, span: AxisSpan, num_bytes: int) -> int:
    """Return the number of chunks with which a pipeline is fastest; link speeds must be known."""
    seconds_with = partial(pipeline_seconds, machine, op, span, num_bytes)
    return min(range(1, MAX_CHUNKS + 1), key=seconds_with)


def _has_links(machine: Machine, span: AxisSpan) -> bool:
    """Return whether the speed of all links that a span uses is known."""
    axes = _axes(machine, span)
    used = [link for link in Link if axes in (Axes(link.value), Axes.BOTH)]
    return all(machine.link(link) is not None for link in used)


def speed_of(machine: Machine, link: Link) -> LinkSpeed:
    speed = machine.link(link)
    if speed is None:
        raise UserError(
            f"machine {machine.name}: links.{link.value} is missing: measure it with "
            "tools/bench_collectives.py --machine-file, or type it"
        )
    return speed


def algorithms_of(machine: Machine | None, *, by_nccl: bool) -> tuple[str, ...]:
    """Return the measured algorithms; with `by_nccl` only those that run under NCCL.

    Without measurements: the backend's own algorithm and the fastest of this project.
    """
    names = dict.fromkeys(row.algorithm for row in machine.measured) if machine else {}
    allowed = (name for name in names if not by_nccl or name in NCCL_COLLECTIVES)
    return tuple(allowed) or ("native", "ho-ring")


def scalar_seconds(machine: Machine) -> float:
    """Return the time of an all-reduce of a few numbers over all ranks."""
    sizes = {Link.INTRA: machine.group_size, Link.INTER: machine.num_groups}
    sizes = {link: ranks for link, ranks in sizes.items() if ranks > 1}
    rows = [row for row in machine.measured if row.op is Op.ALL_REDUCE]
    if sizes and rows:  # rows of the axes in which all ranks take part
        widest = max((row.axes for row in rows), key=list(Axes).index)
        return min(row.seconds for row in rows if row.axes is widest)
    return math.fsum(
        2 * math.ceil(math.log2(ranks)) * speed_of(machine, link).latency_seconds
        for link, ranks in sizes.items()
    )


def chunk_count_by(machine: Machine | None) -> ChunkCount:
    """Return a function that chooses the number of a pipeline's chunks, by link speeds if known."""
    if machine is None or machine.intra is None or machine.inter is None:
        return lambda _op, _span, num_bytes: default_num_chunks(num_bytes)
    return cache(partial(fastest_num_chunks, machine))


def choice_of(name: str, machine: Machine | None, *, by_nccl: bool) -> AlgorithmChoice:
    """Return the choice of --paro-collective: a named algorithm, or the fastest on `machine`.

    Raises `UserError` if the machine's measurements lack a collective on an axis.
    """
    num_chunks = chunk_count_by(machine) if by_nccl else None
    if machine is None or name != "auto":
        return AlgorithmChoice(names=(name,), num_chunks=num_chunks)
    names = algorithms_of(machine, by_nccl=by_nccl)
    rows = tuple(row for row in machine.measured if row.algorithm in names)
    machine = replace(machine, measured=rows)
    kinds = [Axes.INTRA] * (machine.group_size > 1) + [Axes.INTER] * (machine.num_groups > 1)
    for axes in [*kinds, Axes.BOTH] if len(kinds) == 2 else kinds:
        for op in Op:
            fastest_algorithm(machine, op, axes, 1)
    best = cache(partial(fastest_algorithm, machine))
    return AlgorithmChoice(names=names, best=best, num_chunks=num_chunks)
