"""Reads and writes machine files: JSON, typed by hand or from tools/bench_collectives.py."""

#     {"format": "paro-machine-1",
#      "name": "two-nodes",
#      "source": "where the figures come from",
#      "world_size": 8, "group_size": 4, "nic": "per-rank",
#      "links": {
#       "intra": null,
#       "inter": {"bandwidth": "100mbit", "bandwidth_source": "typed", "latency_seconds": 3e-4}},
#      "measured": [
#       {"axes": "both", "op": "all_gather", "algorithm": "ho-ring", "bytes": 32000000,
#        "seconds": 0.37}]}
#
# and, for planning, where known:
#
#      "device": {"name": "A100", "memory_bytes": 80e9, "reserved_bytes": 4e9, "peak_flops": 312e12,
#       "sustained_flops": 150e12, "memory_bytes_per_second": 1.5e12},
#      "uneven": [{"num_groups": 1, "compute": 0.8, "intra": 1, "inter": 0.5}],
#      "sources": {"device.peak_flops": "NVIDIA A100 data sheet, bf16 dense"}
#
# machine.py documents the fields. Unknown fields are rejected, since a misspelt one would go
# unnoticed.

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from paro.collectives.schedule import COLLECTIVES, Op
from paro.errors import UserError, about, reading
from paro.planning.machine.machine import (
    BandwidthSource,
    Device,
    GroupSpeed,
    LinkSpeed,
    Machine,
    Measured,
    Nic,
    bits_per_second,
    rate_text,
)
from paro.topology import Axes

FORMAT = "paro-machine-1"
SHIPPED = Path(__file__).parent / "shipped"

Choice = TypeVar("Choice", bound=Enum)
Types = dict[str, type | tuple[type, ...]]

_MACHINE: Types = {
    "format": str,
    "name": str,
    "source": str,
    "world_size": int,
    "group_size": int,
    "nic": str,
    "links": dict,
    "measured": list,
}
_OPTIONAL: Types = {"device": dict, "uneven": list, "sources": dict}
_LINKS: Types = {"intra": (dict, type(None)), "inter": (dict, type(None))}
_LINK: Types = {"bandwidth": str, "bandwidth_source": str, "latency_seconds": (int, float)}
_MEASURED: Types = {
    "axes": str,
    "op": str,
    "algorithm": str,
    "bytes": int,
    "seconds": (int, float),
}
_MEASURED_MORE: Types = {"cpu_seconds": (int, float), "busy_seconds": (int, float)}
_NUMBER = (int, float)
_DEVICE: Types = {
    "name": str,
    "memory_bytes": _NUMBER,
    "reserved_bytes": _NUMBER,
    "peak_flops": _NUMBER,
    "sustained_flops": _NUMBER,
    "memory_bytes_per_second": _NUMBER,
}
_DEVICE_MORE: Types = {"step_seconds": _NUMBER, "piece_seconds": _NUMBER, "cores": _NUMBER}
_UNEVEN: Types = {"num_groups": int}
_UNEVEN_MORE: Types = {"compute": _NUMBER, "intra": _NUMBER, "inter": _NUMBER}


def shipped_machines() -> tuple[str, ...]:
    """The names of the machines that ship with the project."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.json")))


def find_machine(text: str) -> Machine:
    """The shipped machine of this name, or the machine in this file; `UserError` if neither."""
    if text in shipped_machines():
        return read_machine(SHIPPED / f"{text}.json")
    path = Path(text)
    if not os.path.exists(path):  # False too where the folder may not be searched
        raise UserError(
            f"machine file {path}: No such file; machines that come with this project are "
            f"{', '.join(shipped_machines())}"
        )
    return read_machine(path)


def read_machine(path: Path) -> Machine:
    """The machine in a file; a `UserError` names the file and the wrong field."""
    where = f"machine file {path}"
    with reading(where):
        text = path.read_text(encoding="utf-8")
    return machine_from_json(text, where)


def machine_from_json(text: str, where: str) -> Machine:
    """The machine in the text of a machine file; a `UserError` begins with `where`."""
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error}") from error
    except RecursionError as error:
        raise UserError(f"{where} is nested too deeply for a machine") from error
    except ValueError as error:  # a repeated field, or a number of thousands of digits
        raise UserError(f"{where}: {error}") from error
    with about(f"{where}: "):
        return _machine(value)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; rejects repeated fields, of which Python would keep the last."""
    fields = dict(pairs)
    names = [name for name, _ in pairs]
    for name in fields:
        if names.count(name) > 1:
            raise UserError(f"{name}: is there {names.count(name)} times")
    return fields


def machine_to_json(machine: Machine) -> str:
    """The text of a machine file, one measurement per line."""
    head = {
        "format": FORMAT,
        "name": machine.name,
        "source": machine.source,
        "world_size": machine.world_size,
        "group_size": machine.group_size,
        "nic": machine.nic.value,
        "links": {"intra": _link_fields(machine.intra), "inter": _link_fields(machine.inter)},
        **_planning_fields(machine),
    }
    rows = [json.dumps(_row_fields(row)) for row in machine.measured]
    measured = "".join(f"\n  {row}{',' * (row is not rows[-1])}" for row in rows)
    return f'{json.dumps(head, indent=1)[:-2]},\n "measured": [{measured}]\n}}\n'


def _planning_fields(machine: Machine) -> dict[str, object]:
    """The fields that only planning reads, if known."""
    found: dict[str, object] = {}
    if machine.device is not None:
        found["device"] = {k: v for k, v in asdict(machine.device).items() if v is not None}
    if machine.uneven:
        found["uneven"] = [asdict(part) for part in machine.uneven]
    if machine.sources:
        found["sources"] = dict(machine.sources)
    return found


def _row_fields(row: Measured) -> dict[str, object]:
    fields: dict[str, object] = {
        "axes": row.axes.value,
        "op": row.op.value,
        "algorithm": row.algorithm,
        "bytes": row.num_bytes,
        "seconds": row.seconds,
    }
    more = {"cpu_seconds": row.cpu_seconds, "busy_seconds": row.busy_seconds}
    return fields | {name: value for name, value in more.items() if value is not None}


def _link_fields(speed: LinkSpeed | None) -> dict[str, object] | None:
    if speed is None:
        return None
    return {
        "bandwidth": rate_text(speed.bits_per_second),
        "bandwidth_source": speed.bandwidth_source.value,
        "latency_seconds": speed.latency_seconds,
    }


def _machine(value: object) -> Machine:
    fields = _fields(value, _MACHINE, _OPTIONAL)
    if fields["format"] != FORMAT:
        raise UserError(f"format: {fields['format']!r} is not {FORMAT!r}")
    with about("links."):
        links = _fields(fields["links"], _LINKS)
        intra, inter = (_link_speed(links[name], name) for name in ("intra", "inter"))
    return Machine(
        name=fields["name"],
        source=fields["source"],
        world_size=fields["world_size"],
        group_size=fields["group_size"],
        nic=_choice(Nic, fields["nic"], "nic"),
        intra=intra,
        inter=inter,
        measured=tuple(_measured(row, index) for index, row in enumerate(fields["measured"])),
        device=_device(fields["device"]) if "device" in fields else None,
        uneven=tuple(_uneven(part, i) for i, part in enumerate(fields.get("uneven", ()))),
        sources=_sources(fields.get("sources", {})),
    )


def _device(value: object) -> Device:
    with about("device."):
        fields = _fields(value, _DEVICE, _DEVICE_MORE)
    for name in ("memory_bytes", "reserved_bytes"):
        fields[name] = round(fields[name])
    return Device(**fields)


def _uneven(value: object, index: int) -> GroupSpeed:
    with about(f"uneven[{index}]."):
        return GroupSpeed(**_fields(value, _UNEVEN, _UNEVEN_MORE))


def _sources(value: dict[str, object]) -> tuple[tuple[str, str], ...]:
    with about("sources."):
        return tuple(_fields(value, dict.fromkeys(value, str)).items())


def _link_speed(value: object, name: str) -> LinkSpeed | None:
    if value is None:
        return None
    with about(f"{name}."):
        fields = _fields(value, _LINK)
        with about("bandwidth: "):
            rate = bits_per_second(fields["bandwidth"])
        return LinkSpeed(
            bits_per_second=rate,
            latency_seconds=fields["latency_seconds"],
            bandwidth_source=_choice(
                BandwidthSource, fields["bandwidth_source"], "bandwidth_source"
            ),
        )


def _measured(value: object, index: int) -> Measured:
    with about(f"measured[{index}]."):
        fields = _fields(value, _MEASURED, _MEASURED_MORE)
        return Measured(
            axes=_choice(Axes, fields["axes"], "axes"),
            op=_choice(Op, fields["op"], "op"),
            algorithm=_algorithm(fields["algorithm"]),
            num_bytes=fields["bytes"],
            seconds=fields["seconds"],
            cpu_seconds=fields.get("cpu_seconds"),
            busy_seconds=fields.get("busy_seconds"),
        )


def _algorithm(name: str) -> str:
    if name not in COLLECTIVES:
        raise UserError(f"algorithm: {name!r} is none of {', '.join(COLLECTIVES)}")
    return name


def _fields(value: object, types: Types, optional: Types | None = None) -> dict[str, Any]:
    """A JSON object with all of these fields, some optional ones, no others, of these types."""
    known = types | (optional or {})
    if not isinstance(value, dict):
        raise UserError(f"{value!r} is no object with the fields {', '.join(types)}")
    for name in (*types, *value):
        if name not in value:
            raise UserError(f"{name}: is missing")
        if name not in known:
            raise UserError(f"{name}: is unknown; the fields are {', '.join(known)}")
        # In Python, true is a number too.
        if not isinstance(value[name], known[name]) or isinstance(value[name], bool):
            raise UserError(f"{name}: {value[name]!r} is of the wrong type")
        if isinstance(value[name], float) and not math.isfinite(value[name]):
            raise UserError(f"{name}: {value[name]} cannot be, it must be a finite number")
    return value


def _choice(choices: type[Choice], value: str, field: str) -> Choice:
    try:
        return choices(value)
    except ValueError as error:
        known = ", ".join(choice.value for choice in choices)
        raise UserError(f"{field}: {value!r} is none of {known}") from error
