"""Reads runs from their metrics files and the record files next to them."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NotRequired, TypedDict

from paro.arguments.parser import option_of, value_text
from paro.errors import UserError, about, one_line
from paro.files.schema import Count, Figure, conform, parse_json
from paro.report.config import run_record_path
from paro.report.log import print_line
from paro.report.run_files import read_lines, read_record
from paro.topology import WaitKind

_SETTLING = 0.1  # fraction of the lines, at the start, that speed figures leave out


class _Line(TypedDict):
    """The fields that every line of a metrics file has, or that are not a number.

    Null stands for values that are not finite.
    """

    iteration: Count
    lm_loss: Figure | None
    tokens_per_second: Figure | None
    iteration_time_ms: Figure | None
    group_lm_losses: NotRequired[list[Figure | None] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run: its lines in order, and the records of its start, which may be missing."""

    name: str
    lines: list[dict[str, Any]]
    arguments: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    num_starts: int = 0

    def series(self, name: str, *, scale: float = 1.0) -> tuple[list[float], list[float]]:
        """Return iterations and values, without gaps."""
        pairs = [
            (line["iteration"], line[name] * scale)
            for line in self.lines
            if line.get(name) is not None
        ]
        return [x for x, _ in pairs], [y for _, y in pairs]

    def typical(self, name: str, *, scale: float = 1.0) -> float | None:
        """Return the median after the start-up; None if the figure was not measured."""
        _, values = self.series(name, scale=scale)
        settled = values[math.ceil(len(values) * _SETTLING) :] or values
        return median(settled) if settled else None

    def exposed_ms(self) -> float | None:
        """Return how long an iteration waits for communication; None if not measured."""
        kinds = (self.typical(f"exposed_{kind.value}_ms") for kind in WaitKind)
        measured = [value for value in kinds if value is not None]
        return sum(measured) if measured else None

    def last(self, name: str, *, scale: float = 1.0) -> float | None:
        _, values = self.series(name, scale=scale)
        return values[-1] if values else None

    def validations(self, figure: str = "lm_loss") -> dict[str, tuple[list[float], list[float]]]:
        """Return iterations and figures of the evaluations during training, by validation set."""
        by_set: dict[str, dict[float, float]] = {}
        for at in self.evaluations:
            if at.get(figure) is not None and at["data_set"] != "test":
                by_set.setdefault(at["data_set"], {})[at["iteration"]] = at[figure]
        return {
            name: (sorted(values), [values[iteration] for iteration in sorted(values)])
            for name, values in by_set.items()
        }


def read_runs(files: Sequence[Path], names: Sequence[str]) -> list[Run]:
    """Return the runs of metrics files, each with its own name; `UserError` for any other file."""
    if names and len(names) != len(files):
        raise UserError(f"--names gives {len(names)} names for {len(files)} metrics files")
    runs = [_read_run(path) for path in files]
    chosen = [one_line(name) for name in names or _names_of(runs, files)]
    if len(set(chosen)) < len(chosen):
        raise UserError(f"--names must differ: {', '.join(chosen)}")
    return [replace(run, name=name) for name, run in zip(chosen, runs, strict=True)]


def _names_of(runs: Sequence[Run], files: Sequence[Path]) -> list[str]:
    """Name by strategy if every run has a different one, else by file."""
    strategies = [one_line(str(run.arguments.get("paro_strategy") or "")) for run in runs]
    if all(strategies) and len(set(strategies)) == len(strategies):
        return strategies
    stems = [path.stem for path in files]
    if len(set(stems)) == len(stems):
        return stems
    return [f"{path.parent.name}/{path.stem}" for path in files]


def _read_run(path: Path) -> Run:
    lines: list[dict[str, Any]] = []
    say = partial(print_line, stream=sys.stderr)
    for number, line in enumerate(read_lines(path, f"{path}", say), start=1):
        with about(suffix="; give a metrics file"):
            where = f"{path}, line {number}"
            values: dict[str, Any] = parse_json(line, _Line, where)
            rest = {name: values[name] for name in values.keys() - _Line.__annotations__}
            lines.append(values | conform(rest, dict[str, Figure | None], where))
    if not lines:
        raise UserError(f"{path} is empty: the run has logged no iteration yet")
    record = read_record(run_record_path(path))
    starts = record.get("starts", [])
    start: dict[str, Any] = dict(starts[-1]) if starts else {}
    return Run(
        name="",
        lines=lines,
        arguments=start.get("arguments", {}),
        facts=start.get("facts", {}),
        environment=start.get("environment", {}),
        evaluations=[dict(at) for at in record.get("validations", [])],
        num_starts=len(starts),
    )


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return the flags in which runs differ, with each run's value, except files."""
    written = {
        "metrics_file",
        "tensorboard_dir",
        "save",
        "load",
        "wandb_exp_name",
        "data_cache_path",
    }
    names = sorted({name for run in runs for name in run.arguments} - written)
    values_by_flag = {}
    for name in names:
        values = [_shown(name, run.arguments.get(name)) for run in runs]
        if len(set(values)) > 1:
            values_by_flag[option_of(name)] = values
    return values_by_flag


def _shown(name: str, value: Any) -> str:
    if value is None or value == []:
        return "default"
    return " ".join(map(str, value)) if isinstance(value, list) else value_text(name, value)
