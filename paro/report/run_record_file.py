"""Reads FILE.run.json, which a run writes next to its metrics file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NotRequired, TypedDict

from paro.errors import UserError
from paro.untrusted.schema import Count, read_json


class _Start(TypedDict):
    iteration: Count
    time: NotRequired[str]
    arguments: NotRequired[dict[str, Any]]
    facts: NotRequired[dict[str, Any]]
    environment: NotRequired[dict[str, str]]


class _Validation(TypedDict):
    iteration: Count
    data_set: str
    lm_loss: float | None


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
