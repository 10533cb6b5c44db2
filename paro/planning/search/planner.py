"""Searches for the fastest candidate that fits in memory, exactly, by enumeration."""

# AMSP's problem (arXiv 2311.00257v2, section IV): minimize step time under a memory limit over the
# degrees of params, grads and optimizer state; here also over micro-batch sizes, collectives,
# recomputation and, if allowed, the bits between groups. The search space is small enough to
# enumerate. Bounds decide which candidates are simulated (StepCosts.least_seconds never exceeds the
# simulated time): for the best under a limit, those that may be as fast as the fastest; for the
# Pareto front of memory and time, those that may be faster than all candidates that need less
# memory.
#
# Candidates have one order, `best_first`: those that fit, then time, then bytes between groups,
# then memory.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paro.errors import UserError
from paro.planning.search.estimator import Estimate, Estimator, faster_bits
from paro.planning.search.search_space import (
    FEWEST_BITS,
    Candidate,
    Materialize,
    SearchSpace,
    Workload,
    all_candidates,
)
from paro.strategy import legal_letters

RESOLUTION = 0.002  # relative: how close to the fastest step time a search gets

# Steps that differ by no more than this share are equally fast. Measured steps of one candidate
# differ by at least 0.3% between repeats (examples/measured), so a real run cannot distinguish
# them. A TIE of 0.3% would ignore differences that the simulation can explain: on 13B IIG takes
# 0.3% longer than NIG because it waits for gathers, and would win by its memory.
TIE = 0.001
FRONT_STEP = 0.02
_EVERYTHING = SearchSpace()
_FRONT_LIMIT = 4  # times the device's memory, at which the front ends


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The result of a search."""

    best: Estimate | None  # the first of `best_first` if it fits
    runner_up: Estimate | None  # the same among other strategies
    front: tuple[Estimate, ...]  # Pareto front of memory and time, fastest first; fits or not
    least: Estimate  # the candidate that needs the least memory
    num_candidates: int
    num_simulated: int
    searched: str  # what the candidates differ in
    device_bytes: int
    other_bits: Estimate | None = None  # the best with 16 bits instead of codes, or the reverse


def best_first(estimates: Iterable[Estimate]) -> tuple[Estimate, ...]:
    """Sorts by: fits or not, step time, then, in a tie, bytes between groups and memory.

    All that take up to `TIE` longer than the fastest tie with it; then the same for the fastest of
    the rest. So this is an order; comparing any two with a tolerance would not be transitive.
    """
    found: list[Estimate] = []
    left = sorted(estimates, key=lambda e: (not e.fits, e.seconds))
    while left:
        first = left[0]
        enough = first.seconds * (1 + TIE)
        tied = [e for e in left if e.fits is first.fits and e.seconds <= enough]
        found += sorted(tied, key=lambda e: (e.sent.inter, e.memory_bytes, e.seconds))
        left = left[len(tied) :]
    return tuple(found)


def letter_rows(workload: Workload) -> tuple[Estimate, ...]:
    """Every legal letter strategy, gathered, with the other flags as given; best first."""
    return _rows(workload, (Materialize.GATHER,))


def rotated_rows(workload: Workload) -> tuple[Estimate, ...]:
    """Letter strategies under which weights may rotate, out of place and in place; best first."""
    return _rows(workload, (Materialize.ROTATE, Materialize.ROTATE_IN_PLACE))


def _rows(workload: Workload, materializes: Sequence[Materialize]) -> tuple[Estimate, ...]:
    estimator = Estimator(workload)
    return best_first(
        estimator.estimate_bits(replace(workload.candidate(strategy), materialize=materialize))[0]
        for strategy in map(workload.strategy, legal_letters())
        for materialize in materializes
        if workload.infeasible_reason(strategy, materialize) is None
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Bounded:
    """A candidate, its memory, and a lower bound of its step time."""

    candidate: Candidate
    memory_bytes: int
    least_seconds: float


class _Search:
    """A workload's candidates, smallest first, and the estimates of those simulated so far."""

    def __init__(self, workload: Workload, search_space: SearchSpace) -> None:
        self._estimator = Estimator(workload)
        rows = [
            _Bounded(
                candidate,
                self._estimator.memory(candidate).total,
                self._estimator.costs(candidate).least_seconds(),
            )
            for candidate in all_candidates(workload, search_space)
            if candidate.inter_bits != FEWEST_BITS or self._estimator.has_codes(candidate)
        ]
        if not rows:
            reason = workload.infeasible_reason(workload.strategy("III"), workload.materialize)
            assert reason is not None, "a feasible candidate is among them"
            raise UserError(reason)
        self.rows = sorted(rows, key=lambda row: (row.memory_bytes, row.least_seconds))
        self._limit = workload.device_bytes
        self._done: dict[_Bounded, Estimate] = {}

    @property
    def num_simulated(self) -> int:
        return len(self._done)

    def estimate(self, row: _Bounded) -> Estimate:
        if row not in self._done:
            self._done[row] = self._estimator.estimate(row.candidate)
        return self._done[row]

    def fitting(self) -> list[_Bounded]:
        return [row for row in self.rows if row.memory_bytes <= self._limit]

    def best(self, rows: Sequence[_Bounded]) -> Estimate | None:
        """The best with 16 bits, or where codes save enough, the best with codes."""
        coded = [row for row in rows if row.candidate.inter_bits == FEWEST_BITS]
        full = [row for row in rows if row.candidate.inter_bits != FEWEST_BITS]
        return faster_bits(self._best(full), self._best(coded))

    def other_bits(self, best: Estimate | None) -> Estimate | None:
        other = None if best is None else self._estimator.with_other_bits(best.candidate)
        return None if other is None else self._estimator.estimate(other)

    def _best(self, rows: Sequence[_Bounded]) -> Estimate | None:
        """The first of `best_first` among the simulated candidates, all of which must fit.

        One that is not simulated is at most `RESOLUTION` faster, and does not win a tie.
        """
        fastest = self._fastest(rows)
        while fastest is not None:
            found = self._least_as_fast(rows, fastest.seconds * (1 + TIE))
            before, fastest = fastest, self._fastest(rows)
            if fastest is before:
                return found
        return None

    def _fastest(self, rows: Sequence[_Bounded]) -> Estimate | None:
        found: Estimate | None = None
        for row in sorted(rows, key=lambda row: (row.least_seconds, row.memory_bytes)):
            if found and row.least_seconds >= found.seconds * (1 - RESOLUTION):
                break
            own = self.estimate(row)
            if found is None or own.seconds < found.seconds:
                found = own
        known = (self._done[row] for row in rows if row in self._done)
        return min(known, key=lambda e: e.seconds, default=None)

    def _least_as_fast(self, rows: Sequence[_Bounded], enough: float) -> Estimate | None:
        """Within `enough` seconds: the one that sends least between groups, then needs least."""
        tied = [
            (self._estimator.sent(row.candidate).inter, row.memory_bytes, row.least_seconds, row)
            for row in rows
            if row.least_seconds <= enough
        ]
        found: Estimate | None = None
        for *costs, least, row in sorted(tied, key=lambda entry: entry[:3]):
            if found and (costs != [found.sent.inter, found.memory_bytes] or least > found.seconds):
                break
            own = self.estimate(row)
            if own.seconds <= enough and (found is None or own.seconds < found.seconds):
                found = own
        return found

    def front(self) -> tuple[Estimate, ...]:
        """Candidates faster than all others that need as little memory; fastest first.

        One that is not simulated is at most `RESOLUTION` faster than such a step of the front.
        """
        most = max(_FRONT_LIMIT * self._limit, self.rows[0].memory_bytes)
        found: list[Estimate] = []
        fastest = float("inf")
        for row in self.rows:
            enough = fastest * (1 - FRONT_STEP)
            if row.memory_bytes <= most and row.least_seconds < enough * (1 - RESOLUTION):
                own = self.estimate(row)
                if own.seconds < enough:
                    fastest = own.seconds
                    found.append(own)
        return tuple(reversed(found))


def best_that_fits(workload: Workload, search_space: SearchSpace) -> Estimate | None:
    """The best candidate of `plan`, without runner-up and front."""
    search = _Search(workload, search_space)
    return search.best(search.fitting())


def plan(workload: Workload, search_space: SearchSpace = _EVERYTHING) -> SearchResult:
    """Solves the workload exactly over the search space; `UserError` if that is empty."""
    search = _Search(workload, search_space)
    fitting = search.fitting()
    best = search.best(fitting)
    chosen = best.candidate.strategy.degrees if best else None
    others = [row for row in fitting if row.candidate.strategy.degrees != chosen]
    return SearchResult(
        best=best,
        runner_up=search.best(others),
        front=search.front(),
        least=search.estimate(search.rows[0]),
        num_candidates=len(search.rows),
        num_simulated=search.num_simulated,
        searched=search_space.describe(),
        device_bytes=workload.device_bytes,
        other_bits=search.other_bits(best),
    )
