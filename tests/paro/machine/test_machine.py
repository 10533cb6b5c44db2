"""Machines as data: rates, link limits, and times between measured sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paro.collectives.schedule import Op
from paro.machine.machine import (
    BandwidthSource,
    Machine,
    MeasuredTime,
    Nic,
    bits_per_second,
    fit_link,
    least_seconds,
    rate_text,
    seconds,
)
from paro.topology import Axes, Link
from tests.helpers.refusals import refused
from tests.paro.planning.cases import speed

GATHER, SCATTER, REDUCE = Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE
BITS = 10**8


def machine(
    world_size: int = 8,
    group_size: int = 4,
    intra: int | None = None,
    inter: int | None = None,
    **more: Any,
) -> Machine:
    links = {"intra": intra and speed(intra / 1e9), "inter": inter and speed(inter / 1e9)}
    sizes = {"world_size": world_size, "group_size": group_size}
    return Machine(name="two-nodes", source="a test", **sizes, **links, **more)


def measured(name: str, curve: dict[int, float], op: Op = GATHER) -> tuple[MeasuredTime, ...]:
    return tuple(
        MeasuredTime(axes=Axes.BOTH, op=op, algorithm=name, bytes=size, seconds=time)
        for size, time in curve.items()
    )


def line(latency: float, bandwidth: float, *sizes: int) -> dict[int, float]:
    """Seconds by bytes."""
    return {size: latency + size / bandwidth for size in sizes}


@pytest.mark.parametrize(
    ("text", "bits"),
    [("100mbit", 10**8), ("8gbit", 8 * 10**9), ("2.5Gbit", 2_500_000_000), ("64kbit", 64_000),
     ("9bit", 9), (" 0.1mbit", 10**5)],
)  # fmt: skip
def test_rates_as_tc_spells_them(text: str, bits: int) -> None:
    assert bits_per_second(text) == bits


@pytest.mark.parametrize("text", ["", "fast", "100", "12.5GB/s", "-1mbit", "0mbit", "1e3kbit"])
def test_what_is_no_rate_is_refused_by_its_text(text: str) -> None:
    refused(lambda: bits_per_second(text), "is no rate: write it as 100mbit", repr(text))


@settings(deadline=None)
@given(st.integers(min_value=1, max_value=10**14))
def test_a_rate_is_read_as_it_was_written(bits: int) -> None:
    assert bits_per_second(rate_text(bits)) == bits


UNIFORM, SHARED = machine(intra=BITS, inter=BITS), machine(nic=Nic.SHARED, inter=BITS)


@pytest.mark.parametrize(
    ("given", "axes", "megabytes", "expected"),
    [
        (machine(inter=BITS), Axes.BOTH, 32, 0.320),
        (machine(8, 2, inter=BITS), Axes.BOTH, 32, 0.960),
        (replace(SHARED, inter=speed(4 * BITS / 1e9)), Axes.BOTH, 32, 0.320),
        (SHARED, Axes.BOTH, 32, 1.280),
        # 3/4 of the buffer inside, 1/8 of it between groups: the slower kind of links decides.
        (UNIFORM, Axes.BOTH, 1, 0.75 * 0.08),
        (replace(UNIFORM, intra=speed(7 * BITS / 1e9)), Axes.BOTH, 1, 0.125 * 0.08),
        (machine(intra=BITS), Axes.BOTH, 1, 0.06),
        (UNIFORM, Axes.INTRA, 1, 0.75 * 0.08),
        # A rank's whole buffer, not a fourth of it, crosses its NIC; or four ranks' cross one.
        (UNIFORM, Axes.INTER, 1, 0.5 * 0.08),
        (SHARED, Axes.INTER, 1, 4 * 0.5 * 0.08),
        (machine(), Axes.BOTH, 1, None),
        (machine(inter=BITS), Axes.INTRA, 1, None),
        # One group has no links between groups, whatever the file has.
        (machine(4, 4, inter=BITS), Axes.INTRA, 1, None),
    ],
)
def test_the_busiest_links_bound_the_time(
    given: Machine, axes: Axes, megabytes: int, expected: float | None
) -> None:
    for op, times in ((GATHER, 1), (SCATTER, 1), (REDUCE, 2)):
        bound = least_seconds(given, op, axes, megabytes * 10**6)
        assert bound == (expected and pytest.approx(times * expected, rel=1e-12))


LINE, MEASURED = (
    line(2e-3, 1e8, 4_000, 64_000, 1_000_000),
    {4_000: 0.001, 64_000: 0.0012, 10**6: 0.02},
)
LAW = {size: 1e-6 * size**0.7 for size in (1_000, 1_000_000)}


@pytest.mark.parametrize(
    ("curve", "size", "expected"),
    [
        *((dict(reversed(MEASURED.items())), size, MEASURED[size]) for size in MEASURED),
        # Between two sizes a power law is kept; outside it is latency and bandwidth.
        *((LAW, size, 1e-6 * size**0.7) for size in (3_000, 50_000, 900_000)),
        *((LINE, size, 2e-3 + size / 1e8) for size in (0, 1, 500, 5_000_000, 10**9)),
        ({1_000: 2e-3, 4_000: 1e-3}, 10, 2e-3),  # noise: less data never takes longer
        ({1_000: 1e-3, 4_000: 9e-3}, 500, 0.5e-3),  # and nothing takes negative time
        ({1_000: 1e-3, 4_000: 0.5e-3}, 8_000, 1e-3),  # bandwidth is limited
        ({1_000: 1e-3, 4_000: 9e-3}, 8_000, 18e-3),  # and so is the cost per byte
        ({1_000: 1e-3}, 10, 1e-3),  # one size shows neither
        ({1_000: 1e-3}, 4_000, 4e-3),
    ],
)
def test_times_between_and_outside_the_measured_sizes(
    curve: dict[int, float], size: int, expected: float
) -> None:
    of_curve = machine(measured=measured("ring", curve))
    found = seconds(of_curve, GATHER, Axes.BOTH, "ring", size)
    assert found == pytest.approx(expected, rel=1e-9)


# Equally fast at 40 kB, where 3 ms more latency equal 3/4 of the transfer time.
FEW_STEPS = measured("native", line(1e-3, 1e7, 4_000, 64_000, 1_000_000))


@pytest.mark.parametrize(
    ("axes", "nic", "steps", "share"),
    [
        (Axes.INTRA, Nic.PER_RANK, 3, 3 / 4),
        (Axes.INTER, Nic.PER_RANK, 1, 1 / 2),
        (Axes.INTER, Nic.SHARED, 1, 4 / 2),
    ],
)
def test_links_are_fitted_to_the_fastest(axes: Axes, nic: Nic, steps: int, share: float) -> None:
    latency, bits = 3e-4, 94_000_000
    rows = [
        MeasuredTime(
            axes=axes,
            op=op,
            algorithm=name,
            bytes=size,
            seconds=slower * passes * (steps * latency + 8 * share * size / bits),
        )
        for op, passes in ((GATHER, 1), (SCATTER, 1), (REDUCE, 2))
        for name, slower in (("ring", 1.0), ("flat", 1.7))
        for size in (4_000, 64_000, 1_000_000)
    ]
    fitted = fit_link(machine(nic=nic, measured=(*rows, *FEW_STEPS)), Link(axes.value))
    assert fitted.latency_seconds == pytest.approx(latency, rel=1e-6)
    assert fitted.bits_per_second == pytest.approx(bits, rel=1e-6)
    assert fitted.bandwidth_source is BandwidthSource.FITTED
    # Hand-written values stay; a faster link leaves more of the time to latency.
    faster = machine(nic=nic, measured=tuple(rows), **{axes.value: 2 * bits})
    other = fit_link(faster, Link(axes.value))
    assert other.bits_per_second == 2 * bits
    assert other.latency_seconds > latency
    assert other.bandwidth_source is BandwidthSource.TYPED


def test_links_that_nobody_measured() -> None:
    assert fit_link(machine(measured=FEW_STEPS), Link.INTER) is None
    assert fit_link(machine(inter=BITS), Link.INTER) == speed(BITS / 1e9)


@pytest.mark.parametrize(
    ("field", "value"),
    [("world_size", 0), ("group_size", 3), ("group_size", 0), ("measured", FEW_STEPS * 2)],
)
def test_a_machine_that_cannot_be_is_refused(field: str, value: object) -> None:
    refused(lambda: replace(machine(), **{field: value}), field)
