"""Reads and writes machine files: JSON, typed by hand or from tools/bench_collectives.py."""

# docs/planning.md shows and explains the fields. Unknown fields are rejected, so that no misspelt
# field goes unnoticed.

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from paro.errors import UserError, about, count_text
from paro.files.regular_file import read_bytes
from paro.files.schema import Positive, parse_json
from paro.machine.machine import (
    Device,
    GroupSpeed,
    LaunchOrder,
    LinkSpeed,
    Machine,
    MeasuredTime,
    Nic,
    ranks_mistakes,
)
from paro.strategy import check_group_size, fitting_group_size
from paro.topology import Link

FORMAT = "paro-machine-1"
MEASURE = "measure"  # the value of --paro-machine that measures the machine as the run starts
SHIPPED = Path(__file__).parent / "shipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Links:
    intra: LinkSpeed | None
    inter: LinkSpeed | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """The fields of a machine file, in order."""

    format: Literal["paro-machine-1"]
    name: str
    source: str
    world_size: int
    group_size: int
    nic: Nic
    links: _Links
    device: Device | None = None
    uneven: tuple[GroupSpeed, ...] = ()
    nics: Positive = 1
    launch_order: LaunchOrder = "free"
    sources: dict[str, str] = field(default_factory=dict)
    conditions: dict[str, str] = field(default_factory=dict)
    measured: tuple[MeasuredTime, ...]

    mistakes = staticmethod(ranks_mistakes)


# The names of fields that a file and a `Machine` have in common.
_COMMON = {field.name for field in fields(_File)} - {"format", "links"}


def why_unmeasurable(world_size: int, group_size: int, *, dry_run: bool) -> str | None:
    """Say why the machine cannot be measured at the start of a run; None if it can."""
    if dry_run:
        return "a dry run starts no ranks"
    if group_size == world_size:
        return f"there is one group, of {count_text(world_size, 'rank')}"
    return None


def shipped_machines() -> tuple[str, ...]:
    """Return the names of the machines that ship with the project."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.json")))


def find_machine(text: str) -> Machine:
    """Return the machine of a shipped name or of a file; `UserError` if there is neither."""
    if text == MEASURE:
        raise UserError(
            f"--paro-machine {MEASURE} times the ranks of a training at its start, and here none "
            "is started: give a shipped name or a file, such as a training wrote"
        )
    if text in shipped_machines():
        return read_machine(SHIPPED / f"{text}.json")
    if not os.path.exists(text):  # `exists` is False also without permission for the folder
        raise UserError(
            f"--paro-machine {text}: no such file; machines that come with this project are "
            f"{', '.join(shipped_machines())}"
        )
    return read_machine(Path(text))


def machine_of_launch(
    machine: Machine,
    *,
    world_size: int,
    ranks_per_node: int | None,
    group_size: int | None,
    any_ranks: bool = False,
    subject: str = "--paro-machine",
) -> tuple[Machine, int]:
    """Return the machine with the ranks of a launch, and the launch's group size: the degree I.

    The group size is that of --paro-group-size, else `ranks_per_node`, else that of the machine.
    `UserError` if the machine contradicts the launch; `any_ranks` cuts the machine to the launch's
    ranks before, with the links but without measurements.
    """
    if any_ranks and world_size != machine.world_size:
        size = fitting_group_size(machine.group_size, world_size)
        machine = replace(machine, world_size=world_size, group_size=size, measured=(), uneven=())
    machine = machine.for_world(world_size, subject=subject)
    of_machine = machine.group_size
    of_launch = ranks_per_node or of_machine if group_size is None else group_size
    check_group_size(world_size, of_launch)
    nest = max(of_launch, of_machine) % min(of_launch, of_machine) == 0
    can_differ = nest and group_size is not None and not machine.measured
    if of_launch == of_machine or can_differ:
        return machine, of_launch
    conflict = f"--paro-group-size is {of_launch}"
    advice = f"take a divisor or a multiple of {of_machine}"
    if group_size is None:
        conflict = f"a node of this launch has {of_launch}"
        advice = f"take a file of such nodes, or give --paro-group-size {of_machine}"
    if machine.measured:
        advice = (
            f"give --paro-group-size {of_machine}, or measure it so with "
            "tools/bench_collectives.py --machine-file"
        )
    groups = f"groups of {count_text(of_machine, 'rank')}"
    raise UserError(f"{subject} {machine.name} has {groups} and {conflict}: {advice}")


def read_machine(path: Path) -> Machine:
    """Return the machine in a file; a `UserError` names the file and the wrong field."""
    what = f"machine file {path}"
    return machine_from_json(read_bytes(path, what), what)


@lru_cache(maxsize=8)  # several parts of a run read one file
def machine_from_json(text: str | bytes, where: str) -> Machine:
    """Return the machine in the text of a machine file; a `UserError` begins with `where`."""
    file: _File = parse_json(text, _File, where, repeats=False)
    with about(f"{where}: "):
        return Machine(
            **{name: getattr(file, name) for name in _COMMON},
            intra=file.links.intra,
            inter=file.links.inter,
        )


def machine_to_json(machine: Machine) -> str:
    """Return the text of a machine file, one measurement per line."""
    links = {link.value: machine.link(link) for link in Link}
    known: dict[str, object] = {"format": FORMAT, "links": links}
    head = {}
    for each in fields(_File):
        value = known.get(each.name, getattr(machine, each.name, None))
        if each.name != "measured" and value not in (each.default, {}):
            head[each.name] = value
    rows = [json.dumps(row, default=_plain) for row in machine.measured]
    measured = "".join(f"\n  {row}{',' * (row is not rows[-1])}" for row in rows)
    text = json.dumps(head, indent=1, default=_plain)
    return f'{text[:-2]},\n "measured": [{measured}]\n}}\n'


def _plain(value: Any) -> object:
    """Return a value of a machine as a machine file has it, without fields that are None."""
    if isinstance(value, Enum):
        return value.value
    return {name: field for name, field in asdict(value).items() if field is not None}
