"""Reads FILE.run.json, which a run writes next to its metrics file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NotRequired, TypedDict

from paro.errors import UserError
from paro.untrusted.schema import Count, Figure, Positive, read_json


class _Peak(TypedDict):
    source: str


class Facts(TypedDict):
    """Of a run's `RunFacts`, what reports read."""

    world_size: NotRequired[Positive]
    peak: NotRequired[_Peak]
    predicted: NotRequired[dict[str, Figure]]


class _Start(TypedDict):
    iteration: Count
    time: NotRequired[str]
    arguments: NotRequired[dict[str, Any]]
    facts: NotRequired[Facts]
    environment: NotRequired[dict[str, str]]
    measured: NotRequired[dict[str, Any]]  # of steps, beside the planner's: facts["planned"]


class _Validation(TypedDict):
    iteration: Count
    data_set: str
    lm_loss: Figure | None
    bits_per_byte: NotRequired[Figure | None]


class Record(TypedDict):
    """The fields of the file."""

    starts: NotRequired[list[_Start]]
    validations: NotRequired[list[_Validation]]


def read_record(path: Path) -> Record:
    """What a file holds; nothing if there is no file."""
    if not path.exists():
        return {}
    try:
        found: Record = read_json(path, Record)
    except UserError as error:
        raise UserError(f"{error}; remove it to go on without what it says") from error
    return found
