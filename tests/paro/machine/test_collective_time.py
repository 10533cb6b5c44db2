"""Times of collectives, and the choice by these; machine files, whose mistakes name the field."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from paro.collectives.hops import h_ring_hops, ho_ring_hops, ring_hops
from paro.collectives.schedule import Op, make_schedule
from paro.machine.collective_time import (
    CollectiveTimes,
    TimedJob,
    choice_of,
    chunk_count_by,
    fastest_num_chunks,
    pipeline_seconds,
)
from paro.machine.files import (
    SHIPPED,
    find_machine,
    machine_from_json,
    machine_to_json,
    read_machine,
    shipped_machines,
)
from paro.machine.machine import BandwidthSource, Machine, MeasuredTime, Nic
from paro.topology import Axes, make_topology
from tests.helpers.ranks import ROOT
from tests.helpers.refusals import refused
from tests.helpers.requests import sent_fraction
from tests.paro.planning.cases import DEVICE, machine, plan_request, speed
from tools.planning.tables import letter_rows

between = partial(MeasuredTime, axes=Axes.INTER, algorithm="native")


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("name", ["ring", "h-ring", "ho-ring"])
def test_ring_formulas_are_those_of_the_schedules(op: Op, name: str) -> None:
    """With one kind of links infinitely fast, the other's time is the bytes of its schedule."""
    hops = {"ring": ring_hops, "h-ring": h_ring_hops, "ho-ring": ho_ring_hops}[name]
    size = 1 << 26
    flows = 1 if name == "ring" else 8
    sizes = (32,) if name == "ring" else (8, 4)
    schedule = make_schedule(op, hops, sizes, 0, 1)
    run = make_topology(world_size=32, group_size=8, degrees=()).axes
    slow = CollectiveTimes(machine(intra=1e9, inter=1), name).seconds(op, run, size)
    sent = sent_fraction(schedule, 32, 1, len(sizes) - 1) * size * 8
    assert slow == pytest.approx(flows * sent / (8 * 1e9), rel=1e-6)
    if name != "ring":
        slow = CollectiveTimes(machine(intra=1, inter=1e9), name).seconds(op, run, size)
        inside = sent_fraction(schedule, 32, 1, 0) * size * 8 / 1e9
        assert slow == pytest.approx(inside, rel=0.2)  # and the last chunk
        assert slow >= inside * (1 - 1e-9)


def test_a_flat_ring_pays_the_latency_of_every_hop() -> None:
    """Through 4 groups of 8: 3 hops between groups, 28 inside them."""
    run = make_topology(world_size=32, group_size=8, degrees=()).axes
    late = replace(machine(), intra=speed(1e9, 3e-6), inter=speed(1e9, 14e-6))
    seconds = CollectiveTimes(late, "flat").seconds(Op.ALL_GATHER, run, 1 << 10)
    assert seconds == pytest.approx(3 * 14e-6 + 28 * 3e-6, rel=1e-3)


def test_what_a_measured_collective_wants() -> None:
    size = 800_000
    row = between(op=Op.ALL_REDUCE, bytes=size, seconds=0.02, cpu_seconds=0.001, busy_seconds=0.03)
    share = replace(DEVICE, cores=0.25)
    run = make_topology(world_size=32, group_size=8, degrees=()).axes[1:]
    times = CollectiveTimes(machine(inter=0.05, measured=(row,), device=share), "native")
    (((job,),),) = (times.phases(Op.ALL_REDUCE, run, size),)
    link = 2 * 3 / 4 * 8 * size * 8 / (8 * 0.05e9)
    assert link > 0.02  # a link slower than assumed is busy all the time, not longer
    assert job == TimedJob(stream=(1,), seconds=0.02, intra=0.0, inter=1.0, cpu=0.2, slowed=1.5)
    fast = CollectiveTimes(machine(inter=5, measured=(row,), device=share), "native")
    (((job,),),) = (fast.phases(Op.ALL_REDUCE, run, size),)
    assert job.inter == pytest.approx(link / 100 / 0.02)


CORES = 0.25


def measured_job(num_bytes: int, *, cores: float | None = CORES) -> TimedJob:
    """An all-gather between two groups, measured at two sizes, whose small one has a fast start."""
    rows = tuple(
        between(op=Op.ALL_GATHER, bytes=size, seconds=seconds, cpu_seconds=cpu)
        for size, seconds, cpu in ((64_000, 0.009, 0.0005), (256_000, 0.047, 0.0009))
    )
    device = replace(DEVICE, cores=cores)
    sizes = {"world_size": 4, "group_size": 2}
    given = Machine(name="measured", source="", measured=rows, device=device, **sizes)
    topology = make_topology(world_size=4, group_size=2, degrees=(4,))
    span = tuple(axis for axis in topology.axes if axis.inner == 2)
    ((found,),) = CollectiveTimes(given, "native").phases(Op.ALL_GATHER, span, num_bytes)
    return found


@pytest.mark.parametrize("num_bytes", [512, 4_000, 16_000])
def test_a_small_message_takes_at_least_its_processor_time(num_bytes: int) -> None:
    """The line through the measured sizes leaves no latency, but a call's work remains."""
    least = 0.0005 - 64_000 * 0.0004 / 192_000  # of a message without bytes
    work = least + (0.0005 - least) * num_bytes / 64_000
    found, on_gpu = measured_job(num_bytes), measured_job(num_bytes, cores=None)
    assert on_gpu.seconds == pytest.approx(0.009 * num_bytes / 64_000)
    assert on_gpu.cpu == 0.0
    assert found.seconds == pytest.approx(max(work / CORES, on_gpu.seconds))
    assert found.seconds * found.cpu == pytest.approx(work / CORES)


SPAN = make_topology(world_size=12, group_size=4, degrees=()).axes
NUM_BYTES = 48_000_000


def linked(intra: float, inter: float, latency: float = 0.0) -> Machine:
    """Links of so many bytes per second."""
    within, between = (speed(8e-9 * rate, latency) for rate in (intra, inter))
    return replace(machine(world_size=12, group_size=4), intra=within, inter=between)


@pytest.mark.parametrize("num_chunks", [1, 4])
def test_the_shorter_level_hides_but_for_a_chunk(num_chunks: int) -> None:
    for inter in (1e8, 4e9):
        given = linked(1e9, inter)
        within, between = 0.75 * NUM_BYTES / 1e9, 2 / 3 * NUM_BYTES / 4 / inter
        both = max(within, between) + min(within, between) / num_chunks
        for op in (Op.ALL_GATHER, Op.REDUCE_SCATTER):
            found = pipeline_seconds(given, op, SPAN, NUM_BYTES, num_chunks)
            assert found == pytest.approx(both, rel=1e-9)


@pytest.mark.parametrize("op", Op)
def test_more_chunks_pay_until_latency_does_not(op: Op) -> None:
    assert fastest_num_chunks(linked(1e9, 1e8), op, SPAN, NUM_BYTES) == 8
    assert fastest_num_chunks(linked(1e9, 1e8, latency=1.0), op, SPAN, NUM_BYTES) == 1


def test_gpus_run_pipelines_and_cpu_ranks_single_messages() -> None:
    gpus = linked(1e9, 3e8, latency=1e-5)
    ours = CollectiveTimes(gpus, "ho-ring").seconds(Op.ALL_GATHER, SPAN, NUM_BYTES)
    num_chunks = fastest_num_chunks(gpus, Op.ALL_GATHER, SPAN, NUM_BYTES)
    assert ours == pipeline_seconds(gpus, Op.ALL_GATHER, SPAN, NUM_BYTES, num_chunks)
    native = CollectiveTimes(gpus, "native").seconds(Op.ALL_GATHER, SPAN, NUM_BYTES)
    within, between = (0.75 * NUM_BYTES / 1e9, 2 / 3 * NUM_BYTES / 4 / 3e8)
    assert max(within, between) < ours < native
    cpus = replace(gpus, device=replace(DEVICE, cores=1.0))
    assert CollectiveTimes(cpus, "ho-ring").seconds(Op.ALL_GATHER, SPAN, NUM_BYTES) < ours


@pytest.mark.parametrize("num_chunks", [1, 4])
def test_levels_on_the_same_links_do_not_overlap(num_chunks: int) -> None:
    """Groups of 6 ranks on nodes of 2: both levels of a pipeline use NICs."""
    given = replace(linked(1e9, 1e8), group_size=2)
    span = make_topology(world_size=12, group_size=6, degrees=()).axes
    took = [
        CollectiveTimes(given, "native").seconds(op, part, size)
        for op, part, size in (
            (Op.ALL_GATHER, span[:1], NUM_BYTES),
            (Op.ALL_GATHER, span[1:], NUM_BYTES // 6),
        )
    ]
    found = pipeline_seconds(given, Op.ALL_GATHER, span, NUM_BYTES, num_chunks)
    assert found == pytest.approx(sum(took), rel=1e-9)
    inside = replace(given, group_size=12)
    assert pipeline_seconds(inside, Op.ALL_GATHER, span, NUM_BYTES, num_chunks) < found
    for one in (given, inside, replace(given, device=replace(DEVICE, cores=1.0))):
        jobs = CollectiveTimes(one, "ho-ring").phases(Op.ALL_GATHER, span, NUM_BYTES)[0]
        assert sum(job.intra + job.inter for job in jobs) == pytest.approx(1.0)


def measured_machine(**small_and_large: tuple[float, float]) -> Machine:
    """Every algorithm's seconds for a kilobyte and for a megabyte, the same for all collectives."""
    rows = tuple(
        MeasuredTime(axes=axes, op=op, algorithm=name.replace("_", "-"), bytes=size, seconds=time)
        for name, times in small_and_large.items()
        for size, time in zip((1_000, 1_000_000), times, strict=True)
        for op in Op
        for axes in Axes
    )
    return Machine(name="m", source="typed", world_size=4, group_size=2, measured=rows)


def test_small_messages_take_the_one_that_wants_few_steps() -> None:
    choice = choice_of(
        "auto", measured_machine(h_ring=(1e-3, 1e-1), ho_ring=(2e-3, 5e-2)), by_nccl=False
    )
    assert choice.names == ("h-ring", "ho-ring")
    best = [choice.best(Op.ALL_GATHER, Axes.BOTH, size) for size in (10, 10**3, 10**6, 10**8)]
    assert best == ["h-ring", "h-ring", "ho-ring", "ho-ring"]


def test_under_nccl_rings_of_single_messages_are_not_chosen() -> None:
    rows = measured_machine(h_ring=(1e-3, 1e-3), native=(2e-3, 2e-3), ring=(1e-3, 1e-3))
    choice = choice_of("auto", rows, by_nccl=True)
    assert choice.names == ("native",)
    rings = measured_machine(ring=(1.0, 1.0))
    refused(lambda: choice_of("auto", rings, by_nccl=True), "no all_gather over intra axes")


def test_chunks_follow_the_links_or_the_size_alone() -> None:
    span = make_topology(world_size=32, group_size=8, degrees=()).axes
    bare = Machine(name="m", source="typed", world_size=32, group_size=8)
    known = replace(bare, intra=speed(2000, 1e-5), inter=speed(100, 1e-5))
    sizes = (10**5, 10**8, 10**10)
    assert [chunk_count_by(known)(Op.ALL_GATHER, span, size) for size in sizes] == [1, 3, 8]
    for unknown in (None, bare):
        assert [chunk_count_by(unknown)(Op.ALL_GATHER, span, size) for size in sizes] == [1, 4, 4]


def test_what_was_not_measured_is_named() -> None:
    whole = measured_machine(native=(1.0, 2.0))
    for axes in (Axes.BOTH, Axes.INTER):
        rows = tuple(r for r in whole.measured if (r.op, r.axes) != (Op.ALL_REDUCE, axes))
        choose = partial(choice_of, "auto", replace(whole, measured=rows), by_nccl=False)
        refused(choose, f"no all_reduce over {axes.value} axes")
    # One group has no links between groups.
    one_group = replace(whole, group_size=4, measured=rows)
    assert choice_of("auto", one_group, by_nccl=False).names == ("native",)


MACHINE = Machine(
    name="two-nodes",
    source="typed in a test",
    world_size=8,
    group_size=4,
    nic=Nic.SHARED,
    nics=2,
    launch_order="implicit",
    conditions={"ranks": "8 ranks in groups of 4"},
    inter=replace(speed(0.094310123, 3.1e-4), bandwidth_source=BandwidthSource.FITTED),
    measured=(
        MeasuredTime(
            axes=Axes.BOTH, op=Op.ALL_GATHER, algorithm="ring", bytes=4_000, seconds=0.1 / 3
        ),
        between(op=Op.ALL_REDUCE, bytes=32_000_000, seconds=2, cpu_seconds=0.5, busy_seconds=3.0),
    ),
)
HEAD = Machine(name="empty", source="", world_size=4, group_size=4)
SLOWED = replace(HEAD, device=replace(DEVICE, slowed=((8, 1.1), (16, 1.25))))


@pytest.mark.parametrize("machine", [MACHINE, HEAD, SLOWED])
def test_what_is_written_is_read(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(machine_to_json(machine), encoding="utf-8")
    assert read_machine(path) == machine


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("format",), "paro-machine-9", "format: 'paro-machine-9' is none of paro-machine-1"),
        (("world_size",), 1 << 40, "world_size: 1099511627776 is not allowed, it must be 1 to"),
        (("measured", 0, "algorithm"), "magic", "measured[0].algorithm: 'magic' is none of native"),
        (("measured", 1, "bytes"), 0, "measured[1].bytes: 0 is not allowed"),
        (("measured", 0, "seconds"), float("nan"), "measured[0].seconds: nan is not allowed"),
        (("device", "reserved_bytes"), 81e9, "device.reserved_bytes: 81000000000 is not allowed"),
        (("device", "fragmentation"), 1.0, "fragmentation: 1.0 is not allowed"),
        (("device", "slowed"), [[16, 0.5]], "device.slowed[0][1]: 0.5 is not allowed"),
        (("uneven",), [{"num_groups": 3, "inter": 0.5}], "uneven: it lists 3 groups of 2"),
    ],
)
def test_a_mistake_names_the_field(
    keys: tuple[str | int, ...], value: object, message: str
) -> None:
    *places, last = keys
    fields: Any = json.loads(machine_to_json(replace(MACHINE, device=DEVICE)))
    reduce(getitem, places, fields)[last] = value
    made = partial(machine_from_json, json.dumps(fields), "machine file m.json")
    refused(made, "m.json:", message)


def test_all_mistakes_of_a_file_are_told_at_once() -> None:
    fields = json.loads(machine_to_json(machine()))
    del fields["source"], fields["nic"], fields["device"]["reserved_bytes"]
    fields |= {"group_size": 3, "intra": {}}
    fields["links"]["inter"] = {"bandwidth": "fast", "latency_seconds": -1}
    message = refused(lambda: machine_from_json(json.dumps(fields), "file")).split("; ")
    named = [text.removeprefix("file: ").split(": ")[0] for text in message]
    assert [name for name in named if not name.startswith("the fields are")] == [
        *("source", "nic", "intra"),
        *(f"links.inter.{name}" for name in ("bandwidth_source", "latency_seconds", "bandwidth")),
        *("device.reserved_bytes", "group_size"),
    ]
    fields = json.loads(machine_to_json(machine()))
    fields["device"] |= {"memory_bytes": 0, "sustained_flops": 1e30, "cores": -1}
    absurd = "device.memory_bytes: 0 ... cores: -1 ... sustained_flops: 1e"
    refused(lambda: machine_from_json(json.dumps(fields), "file"), absurd)


def test_the_page_shows_a_file_to_copy(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```json\n(.*?)^```$", page, re.S | re.M)
    path = tmp_path / "nodes-of-4.json"
    path.write_text(example, encoding="utf-8")
    copied = find_machine(str(path))
    assert (copied.name, copied.group_size, copied.nic) == (path.stem, 4, Nic.SHARED)
    assert copied.inter.bits_per_second == 25e9
    found = letter_rows(plan_request(machine=copied, group_size=4, global_batch_size=64))
    assert all(row.seconds > 0 for row in found)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, " cannot be read: No such file"),
        (b"fast", " is not valid JSON"),
        (b'{"name": "a", "name": "b"}', ": name: is there 2 times"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "machine.json"
    if content is not None:
        path.write_bytes(content)
    refused(lambda: read_machine(path), f"machine file {path}{message}")


@pytest.mark.parametrize("name", shipped_machines())
def test_every_figure_of_a_shipped_machine_names_its_source(name: str) -> None:
    text = (SHIPPED / f"{name}.json").read_text(encoding="utf-8")
    shipped = find_machine(name)
    assert machine_from_json(machine_to_json(shipped), "again") == shipped
    fields = json.loads(text)
    sources = fields["sources"]
    for link in ("intra", "inter"):
        for figure in ("bandwidth", "latency_seconds"):
            assert sources[f"links.{link}.{figure}"], figure
    for figure in set(fields["device"]) - {"name"}:
        assert sources[f"device.{figure}"], figure
    assert sources["world_size"]
    assert sources["group_size"]


def test_machines_that_do_not_exist_or_do_not_match() -> None:
    refused(lambda: find_machine("nowhere"), "--paro-machine nowhere ... dgx-h100")
    refused(lambda: find_machine("measure"), "--paro-machine measure ... none is started: give")
    shipped = partial(find_machine("dgx-h100").for_world, 12, subject="--paro-machine")
    refused(shipped, "--paro-machine", "groups of 8 ... 12 ranks")
    row = MeasuredTime(axes=Axes.INTRA, op=Op.ALL_GATHER, algorithm="native", bytes=8, seconds=1e-3)
    more = partial(machine(measured=(row,)).for_world, 64, subject="--paro-machine")
    refused(more, "--paro-machine", "32 ranks in groups of 8 ... 64")
    bare = replace(machine(), device=None)
    refused(lambda: plan_request(machine=bare), "machine typed: device is missing")
    unlinked = plan_request(machine=machine(inter=100, **{"uneven": ()}))
    unlinked = replace(unlinked, machine=replace(unlinked.machine, inter=None))
    refused(lambda: letter_rows(unlinked), "machine typed: links.inter is missing")
