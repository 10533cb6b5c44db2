"""A machine as a JSON file, typed by hand or written by tools/bench_collectives.py."""

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
# What each field means is said in machine.py. Unknown fields are refused, since a misspelt one
# would go unnoticed.

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from paro.collectives.schedule import Op
from paro.planning.machine import (
    Axes,
    BandwidthSource,
    LinkSpeed,
    Machine,
    Measured,
    Nic,
    bits_per_second,
    rate_text,
)

FORMAT = "paro-machine-1"

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
_LINKS: Types = {"intra": (dict, type(None)), "inter": (dict, type(None))}
_LINK: Types = {"bandwidth": str, "bandwidth_source": str, "latency_seconds": (int, float)}
_MEASURED: Types = {
    "axes": str,
    "op": str,
    "algorithm": str,
    "bytes": int,
    "seconds": (int, float),
}


def read_machine(path: Path) -> Machine:
    """The machine in a file; `ValueError` that names file and field where something is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"machine file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"machine file {path} is no text") from error
    return machine_from_json(text, f"machine file {path}")


def machine_from_json(text: str, where: str) -> Machine:
    """The machine that `machine_to_json` wrote; what a mistake says begins with `where`."""
    try:
        return _machine(json.loads(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def machine_to_json(machine: Machine) -> str:
    """The text of a machine file, a measurement in a line."""
    head = {
        "format": FORMAT,
        "name": machine.name,
        "source": machine.source,
        "world_size": machine.world_size,
        "group_size": machine.group_size,
        "nic": machine.nic.value,
        "links": {"intra": _link_fields(machine.intra), "inter": _link_fields(machine.inter)},
    }
    rows = [
        json.dumps(
            {
                "axes": row.axes.value,
                "op": row.op.value,
                "algorithm": row.algorithm,
                "bytes": row.num_bytes,
                "seconds": row.seconds,
            }
        )
        for row in machine.measured
    ]
    measured = "".join(f"\n  {row}{',' * (row is not rows[-1])}" for row in rows)
    return f'{json.dumps(head, indent=1)[:-2]},\n "measured": [{measured}]\n}}\n'


def _link_fields(speed: LinkSpeed | None) -> dict[str, object] | None:
    if speed is None:
        return None
    return {
        "bandwidth": rate_text(speed.bits_per_second),
        "bandwidth_source": speed.bandwidth_source.value,
        "latency_seconds": speed.latency_seconds,
    }


def _machine(value: object) -> Machine:
    fields = _fields(value, _MACHINE)
    if fields["format"] != FORMAT:
        raise ValueError(f"format: {fields['format']!r} is not {FORMAT!r}")
    with _inside("links"):
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
    )


def _link_speed(value: object, name: str) -> LinkSpeed | None:
    if value is None:
        return None
    with _inside(name):
        fields = _fields(value, _LINK)
        return LinkSpeed(
            bits_per_second=_rate(fields["bandwidth"]),
            latency_seconds=fields["latency_seconds"],
            bandwidth_source=_choice(
                BandwidthSource, fields["bandwidth_source"], "bandwidth_source"
            ),
        )


def _measured(value: object, index: int) -> Measured:
    with _inside(f"measured[{index}]"):
        fields = _fields(value, _MEASURED)
        return Measured(
            axes=_choice(Axes, fields["axes"], "axes"),
            op=_choice(Op, fields["op"], "op"),
            algorithm=fields["algorithm"],
            num_bytes=fields["bytes"],
            seconds=fields["seconds"],
        )


@contextmanager
def _inside(place: str) -> Iterator[None]:
    """Puts the place in front of what is wrong there."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}.{error}") from error


def _fields(value: object, types: Types) -> dict[str, Any]:
    """A JSON object that has these fields and no others, of these types."""
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is no object with the fields {', '.join(types)}")
    for name in (*types, *value):
        if name not in value:
            raise ValueError(f"{name}: is missing")
        if name not in types:
            raise ValueError(f"{name}: is unknown; the fields are {', '.join(types)}")
        # In Python, true is a number too.
        if not isinstance(value[name], types[name]) or isinstance(value[name], bool):
            raise ValueError(f"{name}: {value[name]!r} is of the wrong type")
    return value


def _rate(text: str) -> int:
    try:
        return bits_per_second(text)
    except ValueError as error:
        raise ValueError(f"bandwidth: {error}") from error


def _choice(choices: type[Choice], value: str, field: str) -> Choice:
    try:
        return choices(value)
    except ValueError as error:
        known = ", ".join(choice.value for choice in choices)
        raise ValueError(f"{field}: {value!r} is none of {known}") from error
