"""A cluster as data: its ranks, the speed of its links, and how long its collectives take."""

# An intra link is a rank's own inside its group; an inter link is a NIC, of which every rank has
# one ("per-rank") or the ranks of a group have one together ("shared"). `bytes` are those of the
# whole buffer: what a gather makes, what a reduce-scatter starts from. What was measured holds for
# the ranks that it was measured on; links and devices alone hold for any number of groups.

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from enum import Enum
from itertools import pairwise

from paro.collectives.schedule import Op
from paro.topology import Axes, Link

MOST_RANKS = 1 << 20  # of a world that one may plan for
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


class Nic(Enum):
    """Whose a link between groups is."""

    PER_RANK = "per-rank"
    SHARED = "shared"  # by the ranks of a group


class BandwidthSource(Enum):
    """Where a bandwidth comes from."""

    TYPED = "typed"  # what the link can do
    FITTED = "fitted"  # what the fastest collectives make of it


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """One kind of links: `latency_seconds` is that of one step of a ring."""

    bits_per_second: int
    latency_seconds: float
    bandwidth_source: BandwidthSource

    def __post_init__(self) -> None:
        _check_number("bandwidth in bits per second", self.bits_per_second)
        _check_number("latency_seconds", self.latency_seconds, or_zero=True)

    @property
    def is_typed(self) -> bool:
        return self.bandwidth_source is BandwidthSource.TYPED


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One collective as it was timed: the slowest rank's median."""

    axes: Axes
    op: Op
    algorithm: str
    num_bytes: int
    seconds: float
    cpu_seconds: float | None = None  # of a rank's processor time, the mean over ranks
    busy_seconds: float | None = None  # `seconds` while all ranks compute; CPU ranks

    def __post_init__(self) -> None:
        _check_number("bytes", self.num_bytes)
        _check_number("seconds", self.seconds)
        _check_number("cpu_seconds", self.cpu_seconds or 0.0, or_zero=True)
        _check_number("busy_seconds", self.busy_seconds or 0.0, or_zero=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a rank computes with.

    FLOPs count attention in full, as MFU does: a kernel that leaves half of a causal attention out
    is the faster for it.
    """

    name: str
    memory_bytes: int
    reserved_bytes: int  # of those: the driver, the libraries' buffers, fragmentation
    peak_flops: float  # FLOP/s of the type that one computes in
    sustained_flops: float  # what training without communication gets of it
    memory_bytes_per_second: float  # for what only reads and writes: updates, sums
    step_seconds: float = 0.0  # of a step, whatever its size
    piece_seconds: float = 0.0  # of a further slice into which a part of a model is cut
    cores: float | None = None  # CPU ranks: a rank's share, which sending takes from computing

    def __post_init__(self) -> None:
        _check_number("device.memory_bytes", self.memory_bytes)
        within = 0 <= self.reserved_bytes < self.memory_bytes
        _check("device.reserved_bytes", self.reserved_bytes, within, "less than memory_bytes")
        _check_number("device.peak_flops", self.peak_flops)
        within = 0 < self.sustained_flops <= self.peak_flops
        name = f"device.sustained_flops of {self.peak_flops:g}"
        _check(name, self.sustained_flops, within, "positive, and no more than peak_flops")
        _check_number("device.memory_bytes_per_second", self.memory_bytes_per_second)
        _check_number("device.step_seconds", self.step_seconds, or_zero=True)
        _check_number("device.piece_seconds", self.piece_seconds, or_zero=True)
        _check_number("device.cores", 1 if self.cores is None else self.cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpeed:
    """How fast some groups are beside what the machine says; a group is as slow as its slowest."""

    num_groups: int
    compute: float = 1.0
    intra: float = 1.0
    inter: float = 1.0

    def __post_init__(self) -> None:
        for name in ("num_groups", "compute", "intra", "inter"):
            _check_number(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`world_size` ranks in groups of `group_size`, and what is known of them."""

    name: str
    source: str
    world_size: int
    group_size: int
    nic: Nic = Nic.PER_RANK
    intra: LinkSpeed | None = None
    inter: LinkSpeed | None = None
    measured: tuple[Measured, ...] = ()
    device: Device | None = None
    uneven: tuple[GroupSpeed, ...] = ()  # groups that differ; all others are as the machine says
    sources: tuple[tuple[str, str], ...] = ()  # a figure's place in the file, and whence it is

    def __post_init__(self) -> None:
        possible = 0 < self.world_size <= MOST_RANKS
        _check("world_size", self.world_size, possible, f"1 to {MOST_RANKS}")
        divides = self.group_size > 0 and self.world_size % self.group_size == 0
        name = f"group_size of {self.world_size} ranks"
        _check(name, self.group_size, divides, "one of their divisors")
        rows = [(row.axes, row.op, row.algorithm, row.num_bytes) for row in self.measured]
        for row, following in pairwise(sorted(rows, key=str)):
            if row == following:
                what = f"{row[1].value} over {row[0].value} axes by {row[2]}, {row[3]} bytes"
                raise ValueError(f"measured: {what}, is there twice")
        num_uneven = sum(part.num_groups for part in self.uneven)
        if num_uneven > self.num_groups:
            raise ValueError(f"uneven: {num_uneven} groups cannot be, there are {self.num_groups}")

    def for_world(self, world_size: int, *, told: str) -> Machine:
        """The same machine with another number of groups; `told` is what asks for it."""
        if world_size == self.world_size:
            return self
        if self.measured:
            raise ValueError(
                f"{told} {self.name} was measured on {self.world_size} ranks in groups of "
                f"{self.group_size}, this is for {world_size} ranks: measure it there with "
                "tools/bench_collectives.py --machine-file, or leave out what was measured"
            )
        group_size = min(self.group_size, world_size)
        if world_size % group_size != 0:
            raise ValueError(
                f"{told} {self.name} has groups of {group_size}, which do not divide the "
                f"{world_size} ranks: choose a multiple of {group_size}"
            )
        try:
            return replace(self, world_size=world_size, group_size=group_size)
        except ValueError as error:
            raise ValueError(f"{told} {self.name} for {world_size} ranks: {error}") from error

    @property
    def num_groups(self) -> int:
        return self.world_size // self.group_size

    def link(self, link: Link) -> LinkSpeed | None:
        return self.intra if link is Link.INTRA else self.inter


def _check(field: str, value: object, holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"{field}: {value} cannot be, it must be {rule}")


def _check_number(field: str, value: float, *, or_zero: bool = False) -> None:
    holds = 0 < value < math.inf or (or_zero and value == 0)
    _check(field, value, holds, "a number of 0 or more" if or_zero else "a positive number")


def bits_per_second(text: str) -> int:
    """From tc's spelling of rates: 100mbit, 2.5gbit."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(_UNITS)})", text.strip().lower())
    bits = round(Decimal(match[1]) * _UNITS[match[2]]) if match else 0
    if bits <= 0:
        raise ValueError(f"{text!r} is no rate: write it as 100mbit or 2.5gbit")
    return bits


def rate_text(bits: int) -> str:
    """The rate as `bits_per_second` reads it, in its largest unit."""
    unit = next((u for u in reversed(_UNITS) if bits >= _UNITS[u]), "bit")
    return f"{(Decimal(bits) / _UNITS[unit]).normalize():f}{unit}"


# How long a collective takes


def fastest_algorithm(machine: Machine, op: Op, axes: Axes, num_bytes: int) -> str:
    """The algorithm that takes the least time for a buffer of this size, by what was measured."""
    names = dict.fromkeys(r.algorithm for r in machine.measured if (r.axes, r.op) == (axes, op))
    if not names:
        raise ValueError(
            f"machine {machine.name}: no {op.value} over {axes.value} axes was measured; measure "
            "it with tools/bench_collectives.py --machine-file"
        )
    return min(names, key=lambda name: seconds(machine, op, axes, name, num_bytes))


def seconds(machine: Machine, op: Op, axes: Axes, algorithm: str, num_bytes: int) -> float:
    """How long a collective takes on a buffer of this size, from those that were measured."""
    found = measured_at(machine, op, axes, algorithm, num_bytes)
    if found is None:
        raise ValueError(
            f"machine {machine.name}: no {op.value} over {axes.value} axes by {algorithm} was "
            "measured; measure it with tools/bench_collectives.py --machine-file"
        )
    return found


def measured_at(
    machine: Machine,
    op: Op,
    axes: Axes,
    algorithm: str,
    num_bytes: int,
    figure: Callable[[Measured], float | None] = lambda row: row.seconds,
) -> float | None:
    """A figure of a collective on a buffer of this size; None where it was never measured.

    Straight lines between the measured sizes, both on logarithmic scales. Outside it is latency and
    bandwidth: those of the two smallest sizes below them, that of the two largest beyond.
    """
    assert num_bytes >= 0, f"{num_bytes} bytes"
    curve = sorted(
        (row.num_bytes, found)
        for row in machine.measured
        if (row.axes, row.op, row.algorithm) == (axes, op, algorithm) and (found := figure(row))
    )
    if not curve:
        return None
    sizes = [size for size, _ in curve]
    index = bisect_left(sizes, num_bytes)
    if index == 0:
        return _below(curve, num_bytes)
    if index == len(curve):
        return _beyond(curve, num_bytes)
    (low, at_low), (high, at_high) = curve[index - 1 : index + 1]
    share = math.log(num_bytes / low) / math.log(high / low)
    return at_low * (at_high / at_low) ** share


Curve = list[tuple[int, float]]  # (bytes, seconds), ascending


def _below(curve: Curve, num_bytes: int) -> float:
    """A part of the smallest size's time is latency; all of it where that cannot be told."""
    size, at_size = curve[0]
    latency = at_size
    if len(curve) > 1:
        larger, at_larger = curve[1]
        slope = (at_larger - at_size) / (larger - size)
        latency = min(max(at_size - slope * size, 0.0), at_size)  # noise may bend the line
    return latency + (at_size - latency) * num_bytes / size


def _beyond(curve: Curve, num_bytes: int) -> float:
    """The bytes beyond the largest size, at the bandwidth between the last two sizes."""
    size, at_size = curve[-1]
    slope = at_size / size  # as if nothing were latency: the most it can be
    if len(curve) > 1:
        smaller, at_smaller = curve[-2]
        between = (at_size - at_smaller) / (size - smaller)
        slope = min(slope, between) if between > 0 else slope
    return at_size + slope * (num_bytes - size)


# What the links allow


def least_seconds(machine: Machine, op: Op, axes: Axes, num_bytes: int) -> float | None:
    """The time that no algorithm can beat, by those links whose speed is known; None if none is.

    Both kinds of links work at the same time, each for as long as its bytes take: what HO-Ring
    comes close to, and the others do not.
    """
    loads = [(machine.link(link), load) for link, load in _loads(machine, axes, num_bytes).items()]
    times = [8 * load / speed.bits_per_second for speed, load in loads if load and speed]
    return _passes(op) * max(times) if times else None


def _loads(machine: Machine, axes: Axes, num_bytes: int) -> dict[Link, float]:
    """The bytes that a link of each kind carries at least in one gather or one reduce-scatter.

    The volumes X and Y of closed_form.py. For groups of m, ng of them, and a buffer of V bytes,
    whatever the algorithm: V (m - 1) / m reach a rank inside its group, and V (ng - 1) / ng reach
    a group, over m NICs or over one. Along inter axes alone every rank has a buffer of its own.
    """
    m, ng = machine.group_size, machine.num_groups
    within = m if axes is not Axes.INTER else 1
    between = ng if axes is not Axes.INTRA else 1
    sharing = m if machine.nic is Nic.SHARED else 1
    return {
        Link.INTRA: num_bytes * (within - 1) / within,
        Link.INTER: num_bytes / within * (between - 1) / between * sharing,
    }


def _passes(op: Op) -> int:
    """An all-reduce is a reduce-scatter and a gather."""
    return 2 if op is Op.ALL_REDUCE else 1


def fit_link(machine: Machine, link: Link, typed: int | None = None) -> LinkSpeed | None:
    """Latency and bandwidth of a kind of links from the collectives along its axes alone.

    Fitted to the fastest algorithm of every op and size, as a ring that takes the time of its
    steps and of its bytes; relative errors count. A bandwidth that was typed is taken as it is.
    Without measurements there is only what was typed, with no latency.
    """
    axes = Axes(link.value)
    ranks = machine.group_size if link is Link.INTRA else machine.num_groups
    best: dict[tuple[Op, int], float] = {}
    for row in machine.measured:
        if row.axes is axes:
            key = (row.op, row.num_bytes)
            best[key] = min(row.seconds, best.get(key, math.inf))
    # Per measured second: seconds = latency * steps + bits / bandwidth becomes 1 = ...
    steps = [_passes(op) * (ranks - 1) / time for (op, _), time in best.items()]
    bits = [
        8 * _passes(op) * _loads(machine, axes, num_bytes)[link] / time
        for (op, num_bytes), time in best.items()
    ]
    if typed is not None:
        latency = _slope(steps, [1 - x / typed for x in bits])
        source = BandwidthSource.TYPED
        return LinkSpeed(bits_per_second=typed, latency_seconds=latency, bandwidth_source=source)
    if not best:
        return None
    latency, per_bit = _two_slopes(steps, bits)
    return LinkSpeed(
        bits_per_second=max(1, round(1 / per_bit)),
        latency_seconds=latency,
        bandwidth_source=BandwidthSource.FITTED,
    )


def _slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The a >= 0 with the least squares of a x - y."""
    squares = sum(x * x for x in xs)
    return max(0.0, _dot(xs, ys) / squares) if squares else 0.0


def _two_slopes(xs: Sequence[float], zs: Sequence[float]) -> tuple[float, float]:
    """The a >= 0 and b > 0 with the least squares of a x + b z - 1."""
    ones = [1.0] * len(xs)
    xx, xz, zz = _dot(xs, xs), _dot(xs, zs), _dot(zs, zs)
    determinant = xx * zz - xz * xz
    if determinant > 1e-9 * xx * zz:  # else one size alone tells nothing of latency
        a = (_dot(xs, ones) * zz - _dot(zs, ones) * xz) / determinant
        b = (_dot(zs, ones) * xx - _dot(xs, ones) * xz) / determinant
        if a >= 0 and b > 0:
            return a, b
    return 0.0, _slope(zs, ones)


def _dot(xs: Sequence[float], ys: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(xs, ys, strict=True))
