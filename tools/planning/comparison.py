"""Predicted beside measured steps: errors, the order of strategies, what auto would have chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median
from typing import Any

from paro.planning.planner import Estimator, plan
from paro.planning.settings import Case, Freedom, Materialize, Setting
from tools.peers.own import parse_setting

# Of a rank's peak, beside what the planner adds up: gloo's buffers and threads, the allocator's
# rounding, what Python and torch keep.
CONSTANT_BYTES = 20_000_000
MOST_ALIKE = 1.1  # steps that differ by less are taken to be as long
NUM_LIMITS = 6
WAYS = {
    "": Materialize.GATHER,
    "rotate": Materialize.ROTATE,
    "in-place": Materialize.ROTATE_IN_PLACE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting as it was measured and as it is predicted."""

    strategy: str  # and whether its weights rotate
    seconds: float
    predicted: float
    peak_bytes: int | None  # in use
    predicted_bytes: int
    exposed: dict[str, float]  # predicted
    measured_exposed: dict[str, float]

    @property
    def error(self) -> float:
        return self.predicted / self.seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Of what is predicted, the constant added; no error where the truth lies between."""
        if self.peak_bytes is None:
            return None
        if self.peak_bytes < self.predicted_bytes:
            return self.predicted_bytes / self.peak_bytes - 1
        return min(0.0, (self.predicted_bytes + CONSTANT_BYTES) / self.peak_bytes - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What auto takes under a limit, and how long that is beside the best that fits."""

    limit_bytes: int
    chosen: str
    best: str
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All strategies of one cluster, shape, collective and number of micro-batches."""

    rows: tuple[Row, ...]
    choices: tuple[Choice, ...]  # none among those whose weights rotate

    @property
    def median_error(self) -> float:
        return median(abs(row.error) for row in self.rows)

    @property
    def worst_error(self) -> float:
        return max(abs(row.error) for row in self.rows)

    def pairs(self) -> Iterator[tuple[Row, Row]]:
        """The faster and the slower of every two that differ enough."""
        for one, other in combinations(self.rows, 2):
            fast, slow = sorted((one, other), key=lambda row: row.seconds)
            if slow.seconds > MOST_ALIKE * fast.seconds:
                yield fast, slow

    def wrong_pairs(self) -> list[tuple[Row, Row]]:
        return [pair for pair in self.pairs() if pair[0].predicted >= pair[1].predicted]


def setting_of(case: Case, text: str) -> Setting:
    """What STRATEGY@COLLECTIVE[+rotate|+in-place] stands for, all else as the case says."""
    named = parse_setting(text)
    return replace(
        case.setting(case.strategy(named.strategy)),
        collective=named.collective,
        materialize=WAYS[named.rotation],
    )


def compare(case: Case, measured: Sequence[dict[str, Any]]) -> Comparison:
    """The predictions of a case beside rows of tools/planning/steps.py, of one collective."""
    estimator = Estimator(case)
    reserved = case.machine.device.reserved_bytes if case.machine.device else 0
    rows = []
    for row in measured:
        setting = setting_of(case, row["setting"])
        estimate = estimator.estimate(setting)
        rows.append(
            Row(
                strategy=setting.name,
                seconds=row["seconds"],
                predicted=estimate.seconds,
                peak_bytes=row["peak_in_use"],
                predicted_bytes=estimate.memory_bytes - reserved,
                exposed=estimate.timeline.exposed,
                measured_exposed=row["exposed"],
            )
        )
    rotates = any(parse_setting(row["setting"]).rotation for row in measured)
    choices = () if rotates else tuple(_choices(case, rows, reserved))
    return Comparison(rows=tuple(rows), choices=choices)


def _choices(case: Case, rows: Sequence[Row], reserved: int) -> Iterator[Choice]:
    """Under limits that let in one strategy, all of them, and some in between."""
    sizes = sorted({row.predicted_bytes + reserved for row in rows})
    count = min(NUM_LIMITS, len(sizes))
    times = {row.strategy: row.seconds for row in rows}
    freedom = Freedom(
        strategies=tuple(case.strategy(row.strategy) for row in rows),
        micro_batch_sizes=(case.micro_batch_size,),
        collectives=(case.collective,),
        recomputes=(case.model.recompute,),
    )
    for index in range(count):
        limit = sizes[round(index * (len(sizes) - 1) / max(1, count - 1))]
        found = plan(replace(case, memory_bytes=limit), freedom).best
        assert found is not None, f"nothing fits {limit} bytes"
        fitting = [row for row in rows if row.predicted_bytes + reserved <= limit]
        best = min(fitting, key=lambda row: row.seconds)
        chosen = found.setting.strategy.name
        yield Choice(
            limit_bytes=limit,
            chosen=chosen,
            best=best.strategy,
            ratio=times[chosen] / best.seconds,
        )
