"""Predicted against measured steps: errors, the order of strategies, and what auto would choose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import log
from statistics import median
from typing import Any

from paro.planning.computing import device_of
from paro.planning.estimator import Estimator
from paro.planning.planner import plan
from paro.planning.search_space import FEWEST_BITS, Candidate, PlanRequest
from paro.spec.run_spec import Materialize
from tools.bench.peers.own import parse_setting
from tools.bench.planning.rounds import median_row

# Part of a rank's peak in addition to what the planner adds up: gloo's buffers and threads, the
# allocator's rounding, and what Python and torch keep.
CONSTANT_BYTES = 20_000_000
MOST_ALIKE = 1.1  # step times that differ by less count as equal
NUM_LIMITS = 6
ROTATIONS = {
    "rotate": Materialize.ROTATE,
    "in-place": Materialize.ROTATE_IN_PLACE,
}
PREDICTED_WAYS = ("", *ROTATIONS, "4-bit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One candidate as it was measured and as it is predicted."""

    strategy: str  # includes whether its weights rotate
    by_turn: dict[tuple[int, int], float]  # seconds of a step by (round, turn)
    predicted: float
    peak_bytes: int | None  # in use
    predicted_bytes: int
    exposed: dict[str, float]  # predicted
    measured_exposed: dict[str, float]

    @property
    def seconds(self) -> float:
        """Seconds of a step, the median over the turns."""
        return median(self.by_turn.values())

    @property
    def error(self) -> float:
        return self.predicted / self.seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Relative error of the prediction; 0 if the peak is at most `CONSTANT_BYTES` above it."""
        if self.peak_bytes is None:
            return None
        if self.peak_bytes < self.predicted_bytes:
            return self.predicted_bytes / self.peak_bytes - 1
        return min(0.0, (self.predicted_bytes + CONSTANT_BYTES) / self.peak_bytes - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two candidates that differ enough, by the median over the turns that both took."""

    fast: Row
    slow: Row
    ratios: tuple[float, ...]  # slow over fast, turn by turn

    @property
    def is_wrong(self) -> bool:
        """True if the prediction has the two in the other order."""
        return self.fast.predicted >= self.slow.predicted

    @property
    def is_clear(self) -> bool:
        """True if the two differ enough in three of four turns, not just in the median."""
        return sum(ratio > MOST_ALIKE for ratio in self.ratios) >= 0.75 * len(self.ratios)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All strategies of one cluster, shape, collective and number of micro-batches."""

    rows: tuple[Row, ...]
    choices: tuple[float, ...]  # of auto, times by those of the best; empty where weights rotate

    def pairs(self) -> Iterator[Pair]:
        """Yield all pairs that differ by more than `MOST_ALIKE`.

        Compared turn by turn: a turn in which the machine is slow favours neither candidate.
        """
        for fast, slow in permutations(self.rows, 2):
            both = sorted(fast.by_turn.keys() & slow.by_turn.keys())
            ratios = tuple(slow.by_turn[turn] / fast.by_turn[turn] for turn in both)
            if median(map(log, ratios)) > log(MOST_ALIKE):
                yield Pair(fast=fast, slow=slow, ratios=ratios)


def setting_of(request: PlanRequest, text: str) -> Candidate:
    """Return the candidate of STRATEGY@COLLECTIVE[+rotate], the rest being the request's."""
    named = parse_setting(text)
    return replace(
        request.candidate(request.strategy(named.strategy)),
        collective=named.collective,
        materialize=ROTATIONS.get(named.way, Materialize.GATHER),
        inter_bits=FEWEST_BITS if named.way == "4-bit" else None,
    )


def compare(request: PlanRequest, measured: Sequence[Sequence[dict[str, Any]]]) -> Comparison:
    """Compare predictions for a request with rows of steps.py, of one collective.

    The rows of all turns of a candidate become one.
    """
    estimator = Estimator(request)
    rows = []
    for turns in measured:
        row = median_row(turns)
        candidate = setting_of(request, row["setting"])
        estimate = estimator.estimate(candidate)
        rows.append(
            Row(
                strategy=candidate.name,
                by_turn={(one["round"], one["turn"]): one["seconds"] for one in turns},
                predicted=estimate.seconds,
                peak_bytes=row["peak_in_use"],
                predicted_bytes=estimate.memory.allocated,
                exposed=estimate.timeline.exposed,
                measured_exposed=row["exposed"],
            )
        )
    rotates = any(parse_setting(turns[0]["setting"]).rotates for turns in measured)
    choices = () if rotates else tuple(_choices(request, rows))
    return Comparison(rows=tuple(rows), choices=choices)


def _choices(request: PlanRequest, rows: Sequence[Row]) -> Iterator[float]:
    """Yield the time of auto's choice by that of the best, under several memory limits.

    They admit one strategy, all of them, and some in between.
    """
    sizes = sorted({row.predicted_bytes for row in rows})
    count = min(NUM_LIMITS, len(sizes))
    times = {row.strategy: row.seconds for row in rows}
    search_space = request.as_given(tuple(request.strategy(row.strategy) for row in rows))
    for index in range(count):
        limit = sizes[round(index * (len(sizes) - 1) / max(1, count - 1))]
        found = plan(_with_room_for(request, limit), search_space).best
        assert found is not None, f"nothing fits {limit} bytes"
        fitting = [row for row in rows if row.predicted_bytes <= limit]
        yield times[found.candidate.strategy.name] / min(row.seconds for row in fitting)


def _with_room_for(request: PlanRequest, num_bytes: int) -> PlanRequest:
    """Return the request on devices with this many bytes for what is allocated."""
    device = replace(
        device_of(request.machine),
        memory_bytes=num_bytes,
        reserved_bytes=0,
        communicator_bytes=0,
        fragmentation=0.0,
    )
    return replace(request, machine=replace(request.machine, device=device), memory_bytes=None)
