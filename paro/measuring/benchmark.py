"""Benchmark of this machine's collectives: timed runs of an algorithm, and curves over sizes."""

# As in nccl-tests, a run is some repetitions of one collective on buffers of one size, between two
# barriers. A first run of one repetition is not counted: it decides how often the next runs repeat.
# A result is the median, over counted runs, of the slowest rank's time.
#
# Idle process groups cost processor time, because their threads keep waking up. On a machine of two
# cores 8 idle ranks took 0.015 of a core, with the groups of one algorithm 0.06, with the groups of
# all five algorithms 0.19. Making and closing groups takes 0.1 to 0.2 s. So only the groups of the
# running algorithm exist, and it runs all sizes before the next algorithm's groups are made.
# tools/bench_collectives.py runs for minutes, in which a machine's speed drifts: there algorithms
# alternate (tools/collective_timing/rounds.py).

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import NamedTuple

import torch
from torch import Tensor

from paro.collectives.api import Collectives, make_collectives
from paro.collectives.choice import needed_groups
from paro.collectives.interface import CollectiveRequest
from paro.collectives.schedule import Op
from paro.distributed.control import Control
from paro.distributed.groups import make_groups, make_resources
from paro.distributed.process_group import RuntimeConfig
from paro.distributed.timers import synchronize, time_of
from paro.layout import ALIGN, round_up
from paro.machine.collective_time import choice_of
from paro.machine.machine import Device, Machine, MeasuredTime, fit_link
from paro.topology import COLLECTIVE_STREAMS, AxisSpan, Link, Topology, axes_of, nested_range

# A run repeats a small collective until it takes about this long, within the limits below. Every
# repetition has a buffer of its own, so that each result can be checked.
RUN_SECONDS = 0.02
MOST_REPEATS = 20
# Ranks leave a barrier at different times, which would falsify a single collective that is short.
LEAST_REPEATS = 3
SHORT_SECONDS = 0.2
# Bytes of all buffers of a rank: more would not stay in the cache that CPU ranks share.
MOST_BYTES = {"cpu": 4 << 20, "cuda": 4 << 30}
SIZES = tuple(4 << (10 + 2 * step) for step in range(8))  # bytes of the unsharded buffer
# The two largest timed sizes give the bandwidth for all larger sizes. So the larger one must not be
# mostly latency: 4 and 16 KB say nothing about 1 MB.
_GROWTH = 3  # the second timed size takes at least this many times as long as the smallest


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCollective:
    """Collective on an unsharded buffer of `numel` elements along an axis span."""

    op: Op
    span: AxisSpan
    numel: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def shard_of(self, rank: int) -> slice:
        return slice(*nested_range(self.span, rank, self.numel))


def timed_collectives(
    op: Op, span: AxisSpan, sizes: Sequence[int], *, ranks: int, dtype: torch.dtype = torch.float32
) -> list[TimedCollective]:
    """Make one collective per size in bytes, rounded up to a multiple of `ranks` elements."""
    numels = dict.fromkeys(-(-size // (dtype.itemsize * ranks)) * ranks for size in sizes)
    return [TimedCollective(op=op, span=span, numel=numel, dtype=dtype) for numel in numels]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedInput:
    """Input of a rank to a collective, and the expected result."""

    collective: TimedCollective
    shard: slice
    values: Tensor  # the input: this rank's shard for an all-gather, else the unsharded buffer
    expected: Tensor  # the result: this rank's shard for a reduce-scatter, else unsharded

    def fill(self, buffer: Tensor) -> None:
        """Copy the input into `buffer`; elements that an all-gather must write become NaN."""
        if self.collective.op is Op.ALL_GATHER:
            buffer.fill_(torch.nan)
            buffer[self.shard].copy_(self.values)
        else:
            buffer.copy_(self.values)

    def is_right(self, buffer: Tensor) -> bool:
        """Return whether `buffer` holds the expected result."""
        result = buffer[self.shard] if self.collective.op is Op.REDUCE_SCATTER else buffer
        return torch.equal(result, self.expected)


def zero_input(collective: TimedCollective, rank: int, device: torch.device) -> CheckedInput:
    """Make an input of zeros, which takes no time to draw and sum."""
    shard = collective.shard_of(rank)
    whole = torch.zeros(collective.numel, dtype=collective.dtype, device=device)
    values = whole[shard] if collective.op is Op.ALL_GATHER else whole
    expected = whole[shard] if collective.op is Op.REDUCE_SCATTER else whole
    return CheckedInput(collective=collective, shard=shard, values=values, expected=expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveResult:
    """Times of one collective by one algorithm: seconds of the slowest rank in each counted run."""

    collective: TimedCollective
    algorithm: str
    repeats: int
    seconds_by_round: tuple[float, ...]
    correct: bool
    cpu_seconds: float | None = None  # a rank's processor time, the mean over ranks
    busy_seconds: float | None = None  # the time while every rank also computes

    @property
    def seconds(self) -> float:
        return median(self.seconds_by_round)


class TimedRun(NamedTuple):
    """Seconds of a repetition, and whether all results were right, on one rank or on all ranks."""

    seconds: float
    correct: bool
    cpu_seconds: float = 0.0  # processor time of all threads; on all ranks: the mean over ranks
    busy_seconds: float | None = None  # the time while every rank also computes


def over_ranks(runs: Sequence[TimedRun]) -> TimedRun:
    """Combine the figures of all ranks for one run."""
    busy = [run.busy_seconds for run in runs if run.busy_seconds is not None]
    return TimedRun(
        seconds=max(run.seconds for run in runs),
        correct=all(run.correct for run in runs),
        cpu_seconds=fmean(run.cpu_seconds for run in runs),
        busy_seconds=max(busy) if busy else None,
    )


def result_of(
    collective: TimedCollective, algorithm: str, runs: Sequence[TimedRun], repeats: int
) -> CollectiveResult:
    """Compute medians over all runs but the first, of which only the results are checked."""
    counted = runs[1:]
    busy = [run.busy_seconds for run in counted if run.busy_seconds is not None]
    return CollectiveResult(
        collective=collective,
        algorithm=algorithm,
        repeats=repeats,
        seconds_by_round=tuple(run.seconds for run in counted),
        correct=all(run.correct for run in runs),
        cpu_seconds=median(run.cpu_seconds for run in counted),
        busy_seconds=median(busy) if busy else None,
    )


def count_repeats(collective: TimedCollective, seconds: float, device_type: str) -> int:
    """Compute how often a run repeats a collective that takes `seconds`."""
    room = max(1, MOST_BYTES[device_type] // collective.num_bytes)
    least = LEAST_REPEATS if seconds < SHORT_SECONDS else 1
    return max(least, min(math.ceil(RUN_SECONDS / seconds), MOST_REPEATS, room))


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveBenchmark:
    """Benchmark of some algorithms on a topology, each with `rounds` counted runs."""

    control: Control
    topology: Topology
    runtime: RuntimeConfig
    algorithms: tuple[str, ...]
    rounds: int
    machine: Machine | None = None  # link speeds, for the number of ho-ring's chunks under NCCL
    while_computing: bool = False  # also time every collective while all ranks compute

    @contextmanager
    def collectives(self, name: str, spans: frozenset[AxisSpan]) -> Iterator[Collectives]:
        """Make the collectives of an algorithm, whose process groups exist in the block."""
        config, device = self.runtime, self.control.device
        choice = choice_of(name, self.machine, by_nccl=config.by_nccl)
        spans_of_groups = needed_groups(choice, dict.fromkeys(COLLECTIVE_STREAMS, spans))
        shared, rank = make_resources(device, config.distributed_backend), self.control.world.rank
        groups = make_groups(self.topology, rank, spans_of_groups, config, shared, device=device)
        made = make_collectives(choice, groups)
        yield made
        made.close()  # skipped after an exception: with a dead peer it would hang

    def run(self, collectives: Collectives, checked: CheckedInput, repeats: int) -> TimedRun:
        """Time a run of this rank; all ranks of the span begin it together.

        On GPUs an untimed collective comes first, which all ranks end together. The hosts' barrier
        is not enough: hosts leave it at times that differ by as much as a collective takes.
        """
        device, timed = self.control.device, checked.collective
        ahead = int(device.type == "cuda")
        shape = ahead + repeats, round_up(timed.numel, ALIGN)
        registered, values = collectives.groups.registered, checked.values.new_empty(0)
        num_bytes = math.prod(shape) * timed.dtype.itemsize
        registered.reserve({True: (num_bytes, 1)}, self.control)
        registered.resize(values.untyped_storage(), num_bytes, trains=True)
        buffers = values.resize_(shape)[:, : timed.numel].unbind()
        for buffer in buffers:
            checked.fill(buffer)

        def run_in(buffers: Sequence[Tensor]) -> None:
            for buffer in buffers:
                collectives.run(CollectiveRequest(timed.op, buffer, timed.span, timed.dtype)).wait()

        synchronize(device)
        self.control.barrier()
        run_in(buffers[:ahead])
        took = time_of(lambda: run_in(buffers[ahead:]), device)
        return TimedRun(
            took.wall / repeats, all(map(checked.is_right, buffers)), took.cpu / repeats
        )

    def run_and_compute(
        self, collectives: Collectives, checked: CheckedInput, repeats: int
    ) -> float:
        """Time a short run of this rank, and return a repetition's seconds.

        Meanwhile another thread multiplies matrices, as small as those of a block in training.
        """
        end, device = threading.Event(), self.control.device
        left, right = torch.ones(128, 256, device=device), torch.ones(256, 256, device=device)

        def compute() -> None:
            while not end.is_set():
                torch.mm(left, right)

        thread = threading.Thread(target=compute, daemon=True)
        thread.start()
        try:
            return self.run(collectives, checked, min(repeats, LEAST_REPEATS)).seconds
        finally:
            end.set()
            thread.join()

    def run_on_all(self, collectives: Collectives, checked: CheckedInput, repeats: int) -> TimedRun:
        """Time a run, and combine the figures of all ranks; collective."""
        return over_ranks(self.control.gather(self.run(collectives, checked, repeats)))

    def time_zeros(
        self, collectives: Collectives, name: str, timed: TimedCollective
    ) -> CollectiveResult:
        """Time a collective by an algorithm, on zeros; collective over all ranks."""
        control = self.control
        checked = zero_input(timed, control.world.rank, control.device)
        runs = [self.run_on_all(collectives, checked, 1)]
        repeats = count_repeats(timed, runs[0].seconds, control.device.type)
        runs += [self.run_on_all(collectives, checked, repeats) for _ in range(self.rounds)]
        if self.while_computing:
            busy = max(control.gather(self.run_and_compute(collectives, checked, repeats)))
            runs[-1] = runs[-1]._replace(busy_seconds=busy)
        return result_of(timed, name, runs, repeats)

    def seconds_to_time(self, timed: TimedCollective, like: CollectiveResult) -> float:
        """Estimate how long `time_zeros` takes at most, from a result for more or fewer bytes."""
        longer = max(1.0, timed.num_bytes / like.collective.num_bytes)
        once = longer * like.seconds
        repeats = count_repeats(timed, once, self.control.device.type)
        busy = longer * (like.busy_seconds or 0.0) * min(repeats, LEAST_REPEATS)
        return (1 + self.rounds * repeats) * once + busy


def time_links(
    benchmark: CollectiveBenchmark,
    spans: Sequence[AxisSpan],
    *,
    most_bytes: int,
    seconds: float,
    say: Callable[[str], None],
) -> list[CollectiveResult]:
    """Time every op along these spans by all algorithms, in about `seconds`; collective.

    A curve has the smallest size and one that is not mostly latency (or the largest), then further
    sizes as long as time is left for the curve. The largest size is `most_bytes`, or one step more.
    """
    results: list[CollectiveResult] = []
    end = time.monotonic() + seconds
    sizes = [size for size in SIZES if size < 4 * most_bytes or size in SIZES[:2]]
    num_curves = len(spans) * len(benchmark.algorithms) * len(Op)
    for span in spans:
        say(f"links, {axes_of(span).value}")
        for name in benchmark.algorithms:
            left = benchmark.control.gather(end - time.monotonic())[0]
            share = left / num_curves
            num_curves -= len(Op)
            with benchmark.collectives(name, frozenset({span})) as collectives:
                for op in Op:
                    timed = timed_collectives(op, span, sizes, ranks=benchmark.topology.world_size)
                    results += _curve(benchmark, collectives, name, timed, share)
    return results


def _curve(
    benchmark: CollectiveBenchmark,
    collectives: Collectives,
    name: str,
    timed: Sequence[TimedCollective],
    seconds: float,
) -> list[CollectiveResult]:
    """Time a collective at two or more of `sizes`, as `seconds` allow."""
    smallest, *larger = timed
    result = benchmark.time_zeros(collectives, name, smallest)
    results = {smallest.num_bytes: result}
    enough = _GROWTH * result.seconds
    for each in larger:
        checked = zero_input(each, benchmark.control.world.rank, benchmark.control.device)
        runs = (benchmark.run_on_all(collectives, checked, 1) for _ in range(2))
        # The minimum over runs is the least disturbed one.
        if min(run.seconds for run in runs) >= enough or each is larger[-1]:
            result = results[each.num_bytes] = benchmark.time_zeros(collectives, name, each)
            if result.seconds >= enough:
                break
    far = result.collective.num_bytes
    for each in sorted(larger, key=lambda each: abs(math.log(each.num_bytes / far))):
        used = sum(benchmark.seconds_to_time(done.collective, done) for done in results.values())
        expected = benchmark.seconds_to_time(each, result)
        if each.num_bytes not in results and used + expected <= seconds:
            results[each.num_bytes] = benchmark.time_zeros(collectives, name, each)
    return [results[size] for size in sorted(results)]


def with_measured(
    machine: Machine, results: Sequence[CollectiveResult], device: Device | None, *, source: str
) -> Machine:
    """Add the right results to a machine, and links fitted to them."""
    measured = tuple(
        MeasuredTime(
            axes=axes_of(result.collective.span),
            op=result.collective.op,
            algorithm=result.algorithm,
            bytes=result.collective.num_bytes,
            seconds=result.seconds,
            cpu_seconds=result.cpu_seconds,
            busy_seconds=result.busy_seconds,
        )
        for result in results
        if result.correct
    )
    machine = replace(machine, source=source, device=device, measured=measured)
    intra, inter = (fit_link(machine, link) for link in Link)
    return replace(machine, intra=intra, inter=inter)
