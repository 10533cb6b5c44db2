"""Machine files: read back as written, sources of shipped ones; mistakes name file and field."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paro.collectives.schedule import Op
from paro.machine.files import (
    SHIPPED,
    find_machine,
    machine_from_json,
    machine_to_json,
    read_machine,
    shipped_machines,
)
from paro.machine.machine import BandwidthSource, Device, GroupSpeed, Machine, Measured, Nic
from paro.topology import Axes
from tests.helpers.ranks import ROOT
from tests.helpers.refusals import refused
from tests.paro.planning.cases import DEVICE, machine, plan_request, speed
from tools.planning.tables import letter_rows

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
        Measured(axes=Axes.BOTH, op=Op.ALL_GATHER, algorithm="ring", bytes=4_000, seconds=0.1 / 3),
        Measured(
            axes=Axes.INTER,
            op=Op.ALL_REDUCE,
            algorithm="flat",
            bytes=32_000_000,
            seconds=2,
            cpu_seconds=0.5,
            busy_seconds=3.0,
        ),
    ),
)
HEAD = Machine(name="empty", source="", world_size=4, group_size=4)


SLOWED = replace(DEVICE, slowed=((8, 1.1), (16, 1.25)))


@pytest.mark.parametrize("machine", [MACHINE, HEAD, replace(HEAD, device=SLOWED)])
def test_what_is_written_is_read(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(machine_to_json(machine), encoding="utf-8")
    assert read_machine(path) == machine


def changed(keys: tuple[str | int, ...], value: object) -> str:
    """The machine's text with one field replaced, or removed if the value is `...`."""
    given = replace(MACHINE, device=machine().device)
    fields: Any = json.loads(machine_to_json(given))
    place = fields
    for key in keys[:-1]:
        place = place[key]
    if value is ...:
        del place[keys[-1]]
    else:
        place[keys[-1]] = value
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("keys", "value", "told"),
    [
        (("format",), "paro-machine-9", "format: 'paro-machine-9' is none of paro-machine-1"),
        (("group_size",), 3, "group_size: 3 ... a divisor of world_size (8)"),
        (("world_size",), 1 << 40, "world_size: 1099511627776 is not allowed, it must be 1 to"),
        (("measured", 0, "algorithm"), "magic", "measured[0].algorithm: 'magic' is none of native"),
        (("links", "inter", "bandwidth"), "fast", "links.inter.bandwidth: 'fast' is no rate"),
        (("links", "inter", "latency_seconds"), -1, "latency_seconds: -1 is not allowed"),
        (("measured", 1, "bytes"), 0, "measured[1].bytes: 0 is not allowed"),
        (("measured", 0, "seconds"), float("nan"), "measured[0].seconds: nan is not allowed"),
        (("device", "sustained_flops"), 400e12, "device.sustained_flops: ... peak_flops (3e+14)"),
        (("device", "memory_bytes"), 0, "device.memory_bytes: 0 is not allowed"),
        (("device", "reserved_bytes"), 81e9, "device.reserved_bytes: 81000000000 is not allowed"),
        (("device", "fragmentation"), 1.0, "fragmentation: 1.0 is not allowed"),
        (("device", "slowed"), [[16, 0.5]], "device.slowed[0][1]: 0.5 is not allowed"),
        (("uneven",), [{"num_groups": 3, "inter": 0.5}], "uneven: it lists 3 groups of 2"),
    ],
)
def test_a_mistake_names_the_field(keys: tuple[str | int, ...], value: object, told: str) -> None:
    refused(lambda: machine_from_json(changed(keys, value), "machine file m.json"), "m.json:", told)


def test_all_mistakes_of_a_file_are_told_at_once() -> None:
    fields = json.loads(machine_to_json(machine()))
    del fields["source"], fields["nic"], fields["device"]["reserved_bytes"]
    fields |= {"group_size": 3, "intra": {}}
    fields["links"]["inter"] = {"bandwidth": "fast", "latency_seconds": -1}
    told = refused(lambda: machine_from_json(json.dumps(fields), "file")).split("; ")
    named = [text.removeprefix("file: ").split(": ")[0] for text in told]
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
    named = {f.name for kind in (Device, GroupSpeed) for f in dataclasses.fields(kind)}
    section = page[page.index("\n## Machine files\n") : page.index("\n### Measure a machine\n")]
    assert {*json.loads(example), *named} <= set(re.findall(r"\w+", section))
    found = letter_rows(plan_request(machine=copied, group_size=4, global_batch_size=64))
    assert all(row.seconds > 0 for row in found)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, " cannot be read: No such file"),
        (b"fast", " is not valid JSON"),
        (b"[]", ": [] is no object"),
        (b"[" * 100_000, " is nested too deeply"),
        (b'{"name": "a", "name": "b"}', ": name: is there 2 times"),
        (b"\xff\xfe\x00", " is not UTF-8 text"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, content: bytes | None, told: str) -> None:
    path = tmp_path / "machine.json"
    if content is not None:
        path.write_bytes(content)
    refused(lambda: read_machine(path), f"machine file {path}{told}")


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
    row = Measured(axes=Axes.INTRA, op=Op.ALL_GATHER, algorithm="native", bytes=8, seconds=1e-3)
    more = partial(machine(measured=(row,)).for_world, 64, subject="--paro-machine")
    refused(more, "--paro-machine", "32 ranks in groups of 8 ... 64")
    bare = replace(machine(), device=None)
    refused(lambda: plan_request(machine=bare), "machine typed: device is missing")
    unlinked = plan_request(machine=machine(inter=100, **{"uneven": ()}))
    unlinked = replace(unlinked, machine=replace(unlinked.machine, inter=None))
    refused(lambda: letter_rows(unlinked), "machine typed: links.inter is missing")
