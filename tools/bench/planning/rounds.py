"""Combines several rounds of a measurement by medians, since a machine's speed varies in a day."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from paro.machine.machine import LinkSpeed, Machine, MeasuredTime, rate_text
from tools.bench.shared.turns import median_known, rows_in

NAMES = ("nic", "shape", "setting", "micro_batches", "round", "turn")  # identify a row
NODES, RANKS_PER_NODE = 2, 4  # of the clusters of study_plan.py
_OF_DEVICE = (
    *("peak_flops", "sustained_flops", "memory_bytes_per_second", "coding_bytes_per_second"),
    *("step_seconds", "piece_seconds", "job_seconds"),
    *("attention_flops", "parts_flops", "documents_flops"),
)
MOST_ELSEWHERE = 0.12  # the kernel's own threads take 0.03 to 0.08


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return all rows measured so far; of each round the last attempt with no other program busy.

    A truncated line is skipped.
    """
    path = folder / "steps.jsonl"
    rows: dict[tuple[object, ...], dict[str, Any]] = {}
    for row in rows_in(path) if path.exists() else ():
        if _busy_elsewhere(row) <= MOST_ELSEWHERE:
            rows[tuple(row[name] for name in NAMES)] = row
    return list(rows.values())


def _busy_elsewhere(row: dict[str, Any]) -> float:
    """Return the share of processor time used by no rank: the kernel, other programs."""
    return 1.0 - row["cpu_seconds"] * NODES * RANKS_PER_NODE / row["machine_seconds"]


def median_row(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Reduce rows of steps.py for one candidate to medians, and the largest peak."""
    row_of_medians = dict(turns[0])
    row_of_medians["seconds"] = median(row["seconds"] for row in turns)
    row_of_medians["peak_in_use"] = max(
        (row["peak_in_use"] for row in turns if row["peak_in_use"] is not None), default=None
    )
    row_of_medians["exposed"] = {
        kind: median(row["exposed"][kind] for row in turns) for kind in turns[0]["exposed"]
    }
    return row_of_medians


def median_machine(rounds: Sequence[Machine]) -> Machine:
    """Reduce machine files of several rounds to one, of collectives that all of them timed."""
    first = rounds[0]
    timed = [{_key(row): row for row in machine.measured} for machine in rounds]
    rows = [
        _medians([by_key[key] for by_key in timed], "seconds", "cpu_seconds", "busy_seconds")
        for key in timed[0]
        if all(key in by_key for by_key in timed)
    ]
    return replace(
        first,
        intra=_median_link([machine.intra for machine in rounds]),
        inter=_median_link([machine.inter for machine in rounds]),
        measured=tuple(rows),
        device=_medians([machine.device for machine in rounds], *_OF_DEVICE),
    )


def _key(row: MeasuredTime) -> tuple[object, ...]:
    return row.axes, row.op, row.algorithm, row.bytes


def _median_link(speeds: Sequence[LinkSpeed | None]) -> LinkSpeed | None:
    median_speed: LinkSpeed | None = _medians(speeds, "latency_seconds")
    bits = median_known(speed.bits_per_second for speed in speeds if speed is not None)
    if median_speed is None or bits is None:
        return None
    return replace(median_speed, bandwidth=rate_text(round(bits)))


def _medians(records: Sequence[Any], *names: str) -> Any:
    """Return the first record that is there, with the medians of the figures that are known."""
    known = [record for record in records if record is not None]
    figures = {name: median_known(getattr(each, name) for each in known) for name in names}
    return replace(known[0], **figures) if known else None
