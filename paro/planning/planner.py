"""Searches for the fastest configuration that fits in memory (`Candidate`), by enumeration."""

# `plan` serves paro/config (flags that say auto) and tools/plan.py. In: a request and a search
# space. Out: the best candidate under the memory limit, the runner-up, and the Pareto front of
# memory and time. A candidate has a value of each choice: sharding degrees of parameters, gradients
# and optimizer state (AMSP's problem, arXiv 2311.00257v2, section IV), micro-batch size, algorithm
# of collectives, recomputation, bit width between groups. All are enumerated, each with the least
# number of recomputed blocks that fits. A lower bound of the step time (StepCosts.least_seconds)
# avoids most simulations: for the best, of candidates whose bound exceeds the fastest time so far;
# for the front, of those whose bound exceeds the time of one that needs less memory.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from model.config import RecomputeConfig
from model.units import first_trained_unit, unit_specs
from paro.errors import UserError
from paro.machine.caching import cached_by
from paro.planning.activations import Activations
from paro.planning.estimator import Estimate, Estimator, faster_bits
from paro.planning.search_space import (
    FEWEST_BITS,
    Candidate,
    PlanRequest,
    SearchSpace,
    all_candidates,
    first_blocks,
    least_recomputation,
)
from paro.spec.context_layout import ContextLayout
from paro.topology import divisors

RESOLUTION = 0.002  # error of a search: a candidate faster by less than this share may be missed
# Steps that differ by no more than this share are equally fast. Measured steps of one candidate
# differ by at least 0.3% between repeats (examples/measured).
TIE = 0.001
# A candidate also wins that takes up to 1% longer, if it sends no more bytes between groups and
# needs at most 90% of the memory.
MEMORY_TIE, _LESS_MEMORY = 0.01, 0.9
FRONT_STEP = 0.02  # least share by which step times of neighbours on the Pareto front differ
_NO_LIMIT = float("inf")  # seconds: no limit of the step time
_ALL_CHOICES = SearchSpace()
_LARGEST_GROUP = 8  # the most blocks that are recomputed together from one saved input
_FRONT_LIMIT = 4  # the Pareto front ends at this multiple of the device's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The result of a search: the best candidate, the runner-up, and the Pareto front."""

    best: Estimate | None  # the best candidate by `best_first`; None if none fits
    runner_up: Estimate | None  # the best candidate among strategies other than that of `best`
    front: tuple[Estimate, ...]  # Pareto front of memory and time, fastest first; some may not fit
    least: Estimate  # the candidate that needs the least memory
    num_candidates: int
    num_simulated: int
    searched: str  # a text for the log: the choices in which candidates differ
    limit_text: str  # the memory limit, in words
    other_bits: Estimate | None = None  # `best` with 16 bits for quantized values, or the reverse
    with_memory: Callable[[int], Estimate | None]  # finds the fastest within 1% for a memory limit


def best_first(estimates: Iterable[Estimate]) -> tuple[Estimate, ...]:
    """Sort estimates, best first; estimates that fit come before the others.

    The order is by time; ties go by bytes between groups, then by memory. An estimate that takes
    at most `MEMORY_TIE` longer, sends no more and needs a tenth less memory comes before.
    """
    ordered: list[Estimate] = []
    left = sorted(estimates, key=lambda e: (not e.fits, e.seconds))
    while left:
        fits, fastest = left[0].fits, left[0].seconds
        comparable = [e for e in left if e.fits is fits and e.seconds <= fastest * (1 + MEMORY_TIE)]
        tied = (e for e in comparable if e.seconds <= fastest * (1 + TIE))
        first = min(tied, key=lambda e: (e.sent.inter, e.memory_bytes, e.seconds))
        sent, most = first.sent.inter, first.memory_bytes * _LESS_MEMORY
        smaller = (e for e in comparable if e.sent.inter <= sent and e.memory_bytes <= most)
        ordered.append(min(smaller, key=lambda e: (e.memory_bytes, e.seconds), default=first))
        left.remove(ordered[-1])
    return tuple(ordered)


@dataclass(frozen=True, slots=True, eq=False)
class _Bounded:
    """A candidate, its memory, and a lower bound of its step time."""

    candidate: Candidate
    memory_bytes: int
    least_seconds: float
    limit: int | None = None  # the memory limit for which more blocks are to be recomputed


class _Search:
    """A search among the candidates of a request that simulates as few candidates as possible."""

    def __init__(self, request: PlanRequest, space: SearchSpace, enough: float = _NO_LIMIT) -> None:
        self.estimator, self._model = Estimator(request), request.model
        bounds = (
            (candidate, self._least_seconds(candidate))
            for candidate in all_candidates(request, space)
            if candidate.inter_bits != FEWEST_BITS or self.estimator.quantizes(candidate)
        )
        rows = [
            _Bounded(candidate, self.estimator.memory(candidate).total, least)
            for candidate, least in bounds
            if least <= enough
        ]
        if not rows and enough == _NO_LIMIT:
            reason = request.infeasible_reason(request.strategy("III"), request.materialize)
            assert reason is not None, "a feasible candidate is among them"
            raise UserError(reason)
        self.rows = sorted(rows, key=lambda row: (row.memory_bytes, row.least_seconds))
        self._device_bytes = request.device_bytes
        self.done: dict[_Bounded, Estimate | None] = {}  # estimates of rows simulated so far
        self._counts_blocks = space.recomputes is None
        first_trained = first_trained_unit(unit_specs(request.model), request.trained.__contains__)
        self._unsaved = max(0, first_trained - 1)  # number of blocks that save nothing

    def estimate(self, row: _Bounded) -> Estimate | None:
        """Simulate a candidate once; None if nothing fits its limit."""
        if row not in self.done:
            candidate: Candidate | None = row.candidate
            if row.limit is not None:
                candidate = self._with_more_blocks(row.candidate, row.limit)
            self.done[row] = None if candidate is None else self.estimator.estimate(candidate)
        return self.done[row]

    def within(self, limit: int) -> list[_Bounded]:
        """Return the candidates that fit, as given or with more recomputed blocks."""
        fitting = [row for row in self.rows if row.memory_bytes <= limit]
        for row in self.rows if self._counts_blocks else ():
            over, base = row.memory_bytes - limit, row.candidate
            if base.recompute is None and over > 0:
                share = (over - 1) / self._saved_bytes(base)  # rounded by a byte
                count = self._unsaved + math.ceil(share)
                recompute = first_blocks(min(count, self._model.num_layers), self._model)
                candidate = replace(base, recompute=recompute)
                fitting.append(_Bounded(candidate, limit, self._least_seconds(candidate), limit))
        return fitting

    @cached_by(lambda candidate: candidate)
    def _least_seconds(self, candidate: Candidate) -> float:
        return self.estimator.costs(candidate).least_seconds()

    @cached_by(lambda candidate: (candidate.micro_batch_size, candidate.context))
    def _saved_bytes(self, candidate: Candidate) -> float:
        """Compute the most bytes that recomputing one more block may save."""
        memory, run = self.estimator.memory(candidate), self.estimator.run_spec(candidate)
        activations = Activations(run)
        saved = activations.of_block - activations.residual
        return saved * memory.reserved / memory.allocated

    def _with_more_blocks(self, candidate: Candidate, limit: int) -> Candidate | None:
        """Recompute as few more blocks as fit, or all in the smallest groups that fit; or None."""
        model, fewest_blocks = self._model, candidate.recompute
        assert fewest_blocks is not None, "some blocks are recomputed"

        def fits(recompute: RecomputeConfig) -> bool:
            return self.estimator.memory(replace(candidate, recompute=recompute)).total <= limit

        sizes = (n for n in divisors(model.num_layers)[1:] if n <= _LARGEST_GROUP)
        groups = (replace(first_blocks(model.num_layers, model), num_layers=size) for size in sizes)
        chosen = fewest_blocks if fits(fewest_blocks) else None
        chosen = chosen or least_recomputation(replace(model, recompute=fewest_blocks), fits)
        chosen = chosen or next(filter(fits, groups), None)
        return None if chosen is None else replace(candidate, recompute=chosen)

    def best(self, rows: Sequence[_Bounded]) -> Estimate | None:
        """Return the best candidate with 16 bits, or the best quantized one if it saves enough."""
        return faster_bits(*map(self._best, _by_bits(rows)))

    def about_fastest(self, rows: Sequence[_Bounded]) -> Estimate | None:
        """Find a candidate at most `MEMORY_TIE` slower than the fastest."""
        return faster_bits(*(self._fastest(part, MEMORY_TIE) for part in _by_bits(rows)))

    def _best(self, rows: Sequence[_Bounded]) -> Estimate | None:
        """Return the best of `rows` in the order of `best_first`, within `RESOLUTION` in time.

        Candidates that were not simulated cannot win a tie.
        """
        fastest = self._fastest(rows)
        while fastest is not None:
            best = self._least_as_fast(rows, fastest.seconds * (1 + TIE))
            if best is not None:
                best = self._smallest(rows, best, fastest.seconds * (1 + MEMORY_TIE))
            before, fastest = fastest, self._fastest(rows)
            if fastest is before:
                return best
        return None

    def _fastest(self, rows: Sequence[_Bounded], resolution: float = RESOLUTION) -> Estimate | None:
        fastest: Estimate | None = None
        for row in sorted(rows, key=lambda row: (row.least_seconds, row.memory_bytes)):
            if fastest and row.least_seconds >= fastest.seconds * (1 - resolution):
                break
            estimate = self.estimate(row)
            if estimate and (fastest is None or estimate.seconds < fastest.seconds):
                fastest = estimate
        known = (estimate for row in rows if (estimate := self.done.get(row)))
        return min(known, key=lambda e: e.seconds, default=None)

    def _least_as_fast(self, rows: Sequence[_Bounded], enough: float) -> Estimate | None:
        """Find the candidate of at most `enough` seconds that sends the least between groups."""
        tied = [
            (self.estimator.sent(row.candidate).inter, row.memory_bytes, row.least_seconds, row)
            for row in rows
            if row.least_seconds <= enough
        ]
        chosen: Estimate | None = None
        for *costs, least, row in sorted(tied, key=lambda entry: entry[:3]):
            if chosen and (
                costs != [chosen.sent.inter, chosen.memory_bytes] or least > chosen.seconds
            ):
                break
            estimate = self.estimate(row)
            if estimate and estimate.seconds <= enough:
                chosen = min(chosen or estimate, estimate, key=lambda e: e.seconds)
        return chosen

    def _smallest(self, rows: Sequence[_Bounded], first: Estimate, enough: float) -> Estimate:
        """Find a candidate of at most `enough` seconds, with less memory and no more sent bytes."""
        most = first.memory_bytes * _LESS_MEMORY
        smaller = (row for row in rows if row.memory_bytes <= most and row.least_seconds <= enough)
        for row in sorted(smaller, key=lambda row: (row.memory_bytes, row.least_seconds)):
            estimate = self.estimate(row)
            if estimate and estimate.seconds <= enough and estimate.sent.inter <= first.sent.inter:
                return estimate
        return first

    def front(self, best: Estimate | None) -> tuple[Estimate, ...]:
        """Find the Pareto front of memory and time in steps of `FRONT_STEP`, fastest first.

        The front includes `best`. Candidates not simulated are at most `RESOLUTION` faster.
        """
        rows = [(row.memory_bytes, row.least_seconds, row) for row in self.rows]
        rows += [(e.memory_bytes, e.seconds, row) for row, e in self.done.items() if e]
        most = max(_FRONT_LIMIT * self._device_bytes, self.rows[0].memory_bytes)
        front: list[Estimate] = []
        fastest = float("inf")
        for memory_bytes, least, row in sorted(rows, key=lambda entry: entry[:2]):
            enough = fastest * (1 - FRONT_STEP)
            if memory_bytes <= most and least < enough * (1 - RESOLUTION):
                estimate = self.estimate(row)
                if estimate and estimate.seconds < enough:
                    fastest = estimate.seconds
                    front.append(estimate)
        if best is not None and all(estimate.candidate != best.candidate for estimate in front):
            front.append(best)
        return tuple(sorted(front, key=lambda estimate: (estimate.seconds, estimate.memory_bytes)))


def _by_bits(rows: Sequence[_Bounded]) -> tuple[list[_Bounded], list[_Bounded]]:
    """Separate candidates with 16 bits from candidates with quantized values."""
    quantized = [row for row in rows if row.candidate.inter_bits == FEWEST_BITS]
    return [row for row in rows if row.candidate.inter_bits != FEWEST_BITS], quantized


def best_that_fits(
    request: PlanRequest, space: SearchSpace, enough: float = _NO_LIMIT
) -> Estimate | None:
    """Find the best candidate that fits; candidates slower than `enough` seconds are ignored."""
    search = _Search(request, space, enough)
    return search.best(search.within(request.choice_bytes))


def best_by_context(
    request: PlanRequest, space: SearchSpace
) -> dict[ContextLayout, Estimate | None]:
    """Find the best candidate that fits for each context-parallel layout in the space."""
    search = _Search(request, space)
    by_context: dict[ContextLayout, list[_Bounded]] = {key: [] for key, _ in space.contexts or ()}
    for row in search.within(request.choice_bytes):
        by_context[row.candidate.context].append(row)
    return {context: search.best(rows) for context, rows in by_context.items()}


def plan(request: PlanRequest, search_space: SearchSpace = _ALL_CHOICES) -> SearchResult:
    """Search the space for the best candidate of a request; `UserError` if it is empty."""
    search = _Search(request, search_space)
    within = search.within(request.choice_bytes)
    best = search.best(within)
    chosen = best.candidate.strategy.degrees if best else None
    others = [row for row in within if row.candidate.strategy.degrees != chosen]
    least = search.estimate(search.rows[0])
    assert least is not None, "of a row without a limit"
    return SearchResult(
        best=best,
        runner_up=search.best(others),
        front=search.front(best),
        least=least,
        num_candidates=len({*search.rows, *within}),
        num_simulated=len([*filter(None, search.done.values())]),
        searched=search_space.describe(),
        limit_text=request.choice_text,
        other_bits=search.estimator.other_bits(best.candidate) if best else None,
        with_memory=lambda limit: search.about_fastest(search.within(limit)),
    )
