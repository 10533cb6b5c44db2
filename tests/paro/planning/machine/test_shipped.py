"""Shipped machines name their sources; wrong ones are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest

from paro.collectives.schedule import Op
from paro.planning.machine.files import (
    SHIPPED,
    find_machine,
    machine_from_json,
    machine_to_json,
    shipped_machines,
)
from paro.planning.machine.machine import Measured
from paro.planning.search.planner import letter_rows
from paro.topology import Axes
from tests.helpers.refusals import refused
from tests.paro.planning.cases import machine, workload


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
    measured = machine(measured=(row,))
    more = partial(measured.for_world, 64, subject="--paro-machine")
    refused(more, "--paro-machine", "32 ranks in groups of 8 ... 64")
    bare = replace(machine(), device=None)
    refused(lambda: workload(machine=bare), "machine typed: device is missing")
    unlinked = workload(machine=machine(inter=100, **{"uneven": ()}))
    unlinked = replace(unlinked, machine=replace(unlinked.machine, inter=None))
    refused(lambda: letter_rows(unlinked), "machine typed: links.inter is missing")


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("sustained_flops", 400e12, "device.sustained_flops: ... peak_flops (3e+14)"),
        ("memory_bytes", 0, "device.memory_bytes: 0 is not allowed"),
        ("reserved_bytes", 81e9, "device.reserved_bytes: 81000000000 is not allowed"),
        ("communicator_bytes", -1, "device.communicator_bytes: -1 is not allowed"),
        ("fragmentation", 1.0, "device.fragmentation: 1.0 is not allowed, it must be 0 or more"),
        ("peak_flops", "fast", "device.peak_flops: 'fast' is of the wrong type"),
        ("colour", 1, "device.colour: is unknown; the fields are name, memory_bytes"),
    ],
)
def test_impossible_devices_are_named(field: str, value: object, told: str) -> None:
    fields = json.loads(machine_to_json(machine()))
    fields["device"][field] = value
    refused(lambda: machine_from_json(json.dumps(fields), "file"), "file:", told)


def test_too_many_uneven_groups() -> None:
    fields = json.loads(machine_to_json(machine()))
    fields["uneven"] = [{"num_groups": 5, "inter": 0.5}]
    refused(lambda: machine_from_json(json.dumps(fields), "file"), "uneven: it lists 5 groups of 4")
