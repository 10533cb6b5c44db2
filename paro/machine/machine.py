"""A cluster as data: its ranks, devices and link speeds, and its measured collectives."""

# A group is the ranks that fast links join, such as a node. An intra link is a rank's own link
# inside its group; an inter link is a NIC: one per rank ("per-rank") or one per group ("shared").
# Sizes in bytes are of the unsharded buffer: an all-gather's output, a reduce-scatter's input.
# Measurements hold only for the ranks on which they were made; links and devices for any number.

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from enum import Enum
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Annotated, Any, Literal

from paro.collectives.schedule import COLLECTIVES, Op
from paro.errors import UserError, about, count_text
from paro.files.schema import Count, Positive
from paro.topology import MOST_RANKS, Axes, Link

_MAX = 1e30  # the largest time, size or rate: sums and products stay finite
Rate = Annotated[float, (1 / _MAX, _MAX)]  # above 0
Amount = Annotated[float, (0, _MAX)]
Share = Annotated[float, (0, 0.999)]
# (number of busy thread blocks (CTAs), factor of compute time), in increasing order of numbers.
Slowdown = tuple[tuple[Annotated[int, range(2**20)], Annotated[float, (1.0, 1e3)]], ...]
LaunchOrder = Literal["free", "implicit"]
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


class Nic(Enum):
    """Owner of a link between groups."""

    PER_RANK = "per-rank"
    SHARED = "shared"  # one link for all ranks of a group


class BandwidthSource(Enum):
    """Source of a bandwidth."""

    TYPED = "typed"  # the nominal bandwidth of the link, as a user wrote it
    FITTED = "fitted"  # the bandwidth that the fastest measured collectives achieve on the link


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """Speed of one kind of link; `latency_seconds` is the latency of one ring step."""

    bandwidth: str  # as tc writes it: 25gbit
    bandwidth_source: BandwidthSource
    latency_seconds: Amount

    @staticmethod
    def mistakes(fields: Mapping[str, Any]) -> list[str]:
        """Say what is wrong with the bandwidth, which may be missing."""
        try:
            bits_per_second(fields.get("bandwidth", "1bit"))
        except UserError as error:
            return [f"bandwidth: {error}"]
        return []

    @cached_property
    def bits_per_second(self) -> int:
        return bits_per_second(self.bandwidth)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTime:
    """The time of one collective: the slowest rank's median."""

    axes: Axes
    op: Op
    algorithm: Literal[*COLLECTIVES]  # type: ignore[valid-type]
    bytes: Positive
    seconds: Rate
    cpu_seconds: Amount | None = None  # processor time of a rank, the mean over ranks
    busy_seconds: Amount | None = None  # the time while all ranks compute; only for CPU ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device of a rank.

    FLOPs count attention in full, as MFU does: a kernel that skips half of a causal attention
    appears to run at up to twice the FLOP/s.
    """

    name: str
    memory_bytes: Positive
    reserved_bytes: Count  # memory in use before there is a model: CUDA context, interpreter
    peak_flops: Rate  # peak FLOP/s of matmuls in the compute dtype
    sustained_flops: Rate  # FLOP/s of training without communication
    memory_bytes_per_second: Rate  # bandwidth of memory-bound work: updates, sums
    coding_bytes_per_second: Rate | None = None  # bandwidth of quantizing and dequantizing
    # Bandwidth between host and device, in both ways at once, while all devices of a node copy.
    host_bytes_per_second: Rate | None = None
    step_seconds: Amount = 0.0  # constant time per step, for any model and batch
    piece_seconds: Amount = 0.0  # time per extra slice of a part of the model, under rotation
    job_seconds: Amount = 0.0  # constant time per job in a comm stream that is no collective
    attention_flops: Rate | None = None  # FLOP/s of core attention; None: sustained_flops
    parts_flops: Rate | None = None  # FLOP/s of ring or saved attention; None: attention_flops
    documents_flops: Rate | None = None  # FLOP/s within documents; None: attention_flops
    cores: Rate | None = None  # cores per CPU rank, for compute and communication; None: a GPU
    communicator_bytes: Count | None = None  # bytes of an NCCL communicator; None: a default
    fragmentation: Share | None = None  # share of tensors' bytes that torch's allocator adds
    slowed: Slowdown | None = None  # slowdown of computing by thread blocks that collectives occupy

    @staticmethod
    def mistakes(fields: Mapping[str, Any]) -> list[str]:
        """Say which of these fields, of which some may be missing, are above their limit."""
        limits = (("reserved_bytes", "memory_bytes"), ("sustained_flops", "peak_flops"))
        return [
            f"{name}: {fields[name]} is not allowed, it must be at most {most} ({fields[most]:g})"
            for name, most in limits
            if {name, most} <= fields.keys() and fields[name] > fields[most]
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpeed:
    """Speed of some groups relative to the machine's; a group is as slow as its slowest rank."""

    num_groups: Positive
    compute: Rate = 1.0
    intra: Rate = 1.0
    inter: Rate = 1.0


def ranks_mistakes(fields: Mapping[str, Any]) -> list[str]:
    """Say what is wrong with `world_size` and `group_size`, of which one may be missing."""
    ranks, group = fields.get("world_size"), fields.get("group_size", 1)
    wrong = []
    if ranks is not None and not 0 < ranks <= MOST_RANKS:
        wrong.append(f"world_size: {ranks} is not allowed, it must be 1 to {MOST_RANKS}")
    if group < 1 or (ranks or group) % group:
        divisor = f"a divisor of world_size ({ranks})"
        wrong.append(f"group_size: {group} is not allowed, it must be {divisor}")
    return wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`world_size` ranks in groups of `group_size`: links, measurements and device, if known."""

    name: str
    source: str
    world_size: int
    group_size: int
    nic: Nic = Nic.PER_RANK
    nics: int = 1  # NICs in a group's shared link; a message between two ranks uses one NIC
    intra: LinkSpeed | None = None
    inter: LinkSpeed | None = None
    measured: tuple[MeasuredTime, ...] = ()
    device: Device | None = None
    uneven: tuple[GroupSpeed, ...] = ()  # groups of another speed than the machine's
    launch_order: LaunchOrder = "free"  # "implicit": collectives start in the host's launch order
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)  # by field of the file
    conditions: Mapping[str, str] = field(default_factory=dict, hash=False)  # of a measurement

    def __post_init__(self) -> None:
        sizes = {"world_size": self.world_size, "group_size": self.group_size}
        if wrong := ranks_mistakes(sizes):
            raise UserError(*wrong)
        rows = ((row.axes, row.op, row.algorithm, row.bytes) for row in self.measured)
        for row, following in pairwise(sorted(rows, key=str)):
            if row == following:
                what = f"{row[1].value} over {row[0].value} axes by {row[2]}, {row[3]} bytes"
                raise UserError(f"measured: {what}, is there twice")
        if (num_uneven := sum(part.num_groups for part in self.uneven)) > self.num_groups:
            raise UserError(f"uneven: it lists {num_uneven} groups of {self.num_groups}")

    @property
    def is_of_gpus(self) -> bool:
        """True if ranks are GPUs, which communicate by NCCL: only CPU ranks have `cores`."""
        return self.device is None or self.device.cores is None

    def for_world(self, world_size: int, *, subject: str) -> Machine:
        """Return this machine with another world size; a `UserError` begins with `subject`."""
        if world_size == self.world_size:
            return self
        ranks = count_text(world_size, "rank")
        if self.measured:
            raise UserError(
                f"{subject} {self.name} was measured on {self.world_size} ranks in groups of "
                f"{self.group_size}, this is for {ranks}: measure it there with "
                "tools/bench_collectives.py --machine-file, or leave out what was measured"
            )
        group_size = min(self.group_size, world_size)
        if world_size % group_size != 0:
            raise UserError(
                f"{subject} {self.name} has groups of {group_size}, which do not divide the "
                f"{ranks}: choose a multiple of {group_size}"
            )
        with about(f"{subject} {self.name} for {ranks}: "):
            return replace(self, world_size=world_size, group_size=group_size)

    @property
    def num_groups(self) -> int:
        return self.world_size // self.group_size

    def link(self, link: Link) -> LinkSpeed | None:
        return self.intra if link is Link.INTRA else self.inter


def bits_per_second(text: str) -> int:
    """Parse a rate as tc writes it: 100mbit, 2.5gbit."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(_UNITS)})", text.strip().lower())
    bits = round(Decimal(match[1]) * _UNITS[match[2]]) if match else 0
    if not 0 < bits <= _MAX:
        raise UserError(f"{text!r} is no rate: write it as 100mbit or 2.5gbit")
    return bits


def rate_text(bits: int) -> str:
    """Format a rate for `bits_per_second`, in its largest unit."""
    unit = next((u for u in reversed(_UNITS) if bits >= _UNITS[u]), "bit")
    return f"{(Decimal(bits) / _UNITS[unit]).normalize():f}{unit}"


# Time of a collective, from measurements


def fastest_algorithm(machine: Machine, op: Op, axes: Axes, num_bytes: int) -> str:
    """Return the fastest algorithm for this buffer size; `UserError` if none was measured."""
    names = dict.fromkeys(r.algorithm for r in machine.measured if (r.axes, r.op) == (axes, op))
    if not names:
        raise _unmeasured(machine, f"{op.value} over {axes.value} axes")
    return min(names, key=lambda name: seconds(machine, op, axes, name, num_bytes))


def seconds(machine: Machine, op: Op, axes: Axes, algorithm: str, num_bytes: int) -> float:
    """Return the time of a collective at this buffer size; `UserError` if it was never measured."""
    time = measured_at(machine, op, axes, algorithm, num_bytes)
    if time is None:
        raise _unmeasured(machine, f"{op.value} over {axes.value} axes by {algorithm}")
    return time


def _unmeasured(machine: Machine, what: str) -> UserError:
    advice = "measure it with tools/bench_collectives.py --machine-file"
    return UserError(f"machine {machine.name}: no {what} was measured; {advice}")


def measured_at(
    machine: Machine,
    op: Op,
    axes: Axes,
    algorithm: str,
    num_bytes: int,
    figure: Callable[[MeasuredTime], float | None] = lambda row: row.seconds,
) -> float | None:
    """Return a measured figure of a collective at this buffer size; None if it was never measured.

    Between measured sizes it interpolates linearly on log-log scales. Below the smallest size it
    uses the latency and bandwidth of the two smallest sizes, above the largest size the bandwidth
    of the two largest sizes.
    """
    assert num_bytes >= 0, f"{num_bytes} bytes"
    curve = sorted(
        (row.bytes, value)
        for row in machine.measured
        if (row.axes, row.op, row.algorithm) == (axes, op, algorithm) and (value := figure(row))
    )
    if not curve:
        return None
    index = bisect_left(curve, num_bytes, key=itemgetter(0))
    if index == 0:
        return _below(curve, num_bytes)
    if index == len(curve):
        return _beyond(curve, num_bytes)
    (low, at_low), (high, at_high) = curve[index - 1 : index + 1]
    share = math.log(num_bytes / low) / math.log(high / low)
    return at_low * (at_high / at_low) ** share


Curve = list[tuple[int, float]]  # (bytes, seconds) in increasing order of bytes


def _below(curve: Curve, num_bytes: int) -> float:
    """Extrapolate below the smallest size, whose time is latency in part, or entirely."""
    size, at_size = curve[0]
    latency = at_size
    if len(curve) > 1:
        larger, at_larger = curve[1]
        slope = (at_larger - at_size) / (larger - size)
        latency = min(max(at_size - slope * size, 0.0), at_size)  # noise may bend the line
    return latency + (at_size - latency) * num_bytes / size


def _beyond(curve: Curve, num_bytes: int) -> float:
    """Add the bytes beyond the largest size, at the bandwidth between the last two sizes."""
    size, at_size = curve[-1]
    slope = at_size / size  # upper bound: no latency
    if len(curve) > 1:
        smaller, at_smaller = curve[-2]
        between = (at_size - at_smaller) / (size - smaller)
        slope = min(slope, between) if between > 0 else slope
    return at_size + slope * (num_bytes - size)


# Lower bounds and fits from link speeds


def least_seconds(machine: Machine, op: Op, axes: Axes, num_bytes: int) -> float | None:
    """Return a lower bound over all algorithms, by links of known speed; None without any.

    It is the time of the slower kind of links, if both are always busy. HO-Ring comes close to it,
    the other algorithms do not.
    """
    loads = [(machine.link(link), load) for link, load in _loads(machine, axes, num_bytes).items()]
    times = [8 * load / speed.bits_per_second for speed, load in loads if load and speed]
    return passes(op) * max(times) if times else None


def _loads(machine: Machine, axes: Axes, num_bytes: int) -> dict[Link, float]:
    """Return the least bytes on a link of each kind in one all-gather or one reduce-scatter.

    For ng groups of m ranks, V bytes and any algorithm: a rank receives V (m - 1) / m inside its
    group, and a group receives V (ng - 1) / ng, over m NICs or one. Along inter axes alone every
    rank has a buffer of its own.
    """
    m, ng = machine.group_size, machine.num_groups
    within = m if axes is not Axes.INTER else 1
    between = ng if axes is not Axes.INTRA else 1
    sharing = m if machine.nic is Nic.SHARED else 1
    return {
        Link.INTRA: num_bytes * (within - 1) / within,
        Link.INTER: num_bytes / within * (between - 1) / between * sharing,
    }


def passes(op: Op) -> int:
    """Return the passes over the data: an all-reduce is a reduce-scatter and an all-gather."""
    return 2 if op is Op.ALL_REDUCE else 1


def fit_link(machine: Machine, link: Link) -> LinkSpeed | None:
    """Fit latency and bandwidth of one kind of link to collectives along its axes alone.

    It minimizes squares of relative errors over the fastest algorithm of every op and size, in a
    model of rings: latency of all steps plus time of all bytes. A typed bandwidth stays as it is.
    Without measurements the result is the typed bandwidth with latency 0, or None.
    """
    axes = Axes(link.value)
    ranks = machine.group_size if link is Link.INTRA else machine.num_groups
    best: dict[tuple[Op, int], float] = {}
    for row in machine.measured:
        if row.axes is axes:
            best[row.op, row.bytes] = min(row.seconds, best.get((row.op, row.bytes), math.inf))
    # Divided by measured seconds: seconds = latency * steps + bits / bandwidth becomes 1 = ...
    steps = [passes(op) * (ranks - 1) / time for (op, _), time in best.items()]
    bits = [
        8 * passes(op) * _loads(machine, axes, num_bytes)[link] / time
        for (op, num_bytes), time in best.items()
    ]
    speed = machine.link(link)
    if speed is not None and speed.bandwidth_source is BandwidthSource.TYPED:
        latency = _slope(steps, [1 - x / speed.bits_per_second for x in bits])
        return replace(speed, latency_seconds=latency)
    if not best:
        return None
    latency, per_bit = _two_slopes(steps, bits)
    rate, source = rate_text(max(1, round(1 / per_bit))), BandwidthSource.FITTED
    return LinkSpeed(bandwidth=rate, bandwidth_source=source, latency_seconds=latency)


def _slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the a >= 0 that minimizes the sum of (a x - y)^2."""
    squares = sum(x * x for x in xs)
    return max(0.0, _dot(xs, ys) / squares) if squares else 0.0


def _two_slopes(xs: Sequence[float], zs: Sequence[float]) -> tuple[float, float]:
    """Return the a >= 0 and b > 0 that minimize the sum of (a x + b z - 1)^2."""
    xx, xz, zz = _dot(xs, xs), _dot(xs, zs), _dot(zs, zs)
    determinant = xx * zz - xz * xz
    if determinant > 1e-9 * xx * zz:  # else: one size does not determine the latency
        a = (sum(xs) * zz - sum(zs) * xz) / determinant
        b = (sum(zs) * xx - sum(xs) * xz) / determinant
        if a >= 0 and b > 0:
            return a, b
    return 0.0, _slope(zs, [1.0] * len(zs))


def _dot(xs: Sequence[float], ys: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(xs, ys, strict=True))
