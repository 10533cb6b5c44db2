"""The planner's choice is the best candidate; memory, machines and bits between groups."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from random import Random
from typing import Any

import pytest

from model.config import RecomputeConfig
from model.trainable import Trainable
from paro.planning.description import bits_text, describe
from paro.planning.estimator import Estimate, Estimator
from paro.planning.planner import MEMORY_TIE, RESOLUTION, TIE, best_first, plan
from paro.planning.remedies import fewest_ranks, rank_changes, why_nothing_fits
from paro.planning.search_space import SearchSpace, all_candidates, legal_strategies
from paro.spec.outer_steps import OuterConfig
from paro.spec.run_spec import Materialize
from tests.helpers.refusals import refused
from tests.paro.planning.cases import BF16, FEW, SMALL, machine, plan_request
from tests.paro.planning.fixed_workloads import drawn
from tools.planning.tables import letter_rows

OUTER = OuterConfig(outer_steps=9)
NATIVE = SearchSpace(micro_batch_sizes=(2,), collectives=("native",), recomputes=(None,))


@pytest.mark.slow("estimates all candidates")
@pytest.mark.parametrize(
    ("gigabytes", "inter"),
    [
        (0.6, 100),
        (1.0, 2),
        pytest.param(3.0, 100, marks=pytest.mark.verify),
        pytest.param(80.0, 2, marks=pytest.mark.verify),
    ],
)
def test_nothing_that_fits_is_faster(gigabytes: float, inter: float) -> None:
    given = plan_request(
        machine=machine(world_size=8, group_size=4, inter=inter),
        group_size=4,
        global_batch_size=32,
        memory_bytes=round(gigabytes * 1e9),
    )
    found = plan(given, FEW)
    estimator = Estimator(given)
    everything = [estimator.estimate(candidate) for candidate in all_candidates(given, FEW)]
    fitting = [estimate for estimate in everything if estimate.fits]
    if not fitting:
        assert found.best is None
        least = min(estimate.memory_bytes for estimate in everything)
        assert found.least.memory_bytes == least
        assert f"the least is {least / 1e9:.1f} GB" in why_nothing_fits(given, found)
        return
    fastest = min(estimate.seconds for estimate in fitting)
    assert found.best.fits
    assert found.best.seconds <= fastest * (1 + MEMORY_TIE) / (1 - RESOLUTION)
    as_fast = [e for e in fitting if e.seconds <= fastest * (1 + TIE)]
    assert found.best.sent.inter <= min(e.sent.inter for e in as_fast)
    assert found.num_candidates == len(everything)
    limit = round(1.5 * gigabytes * 1e9)
    bought = found.with_memory(limit)
    assert bought.memory_bytes <= limit
    with_more = min(e.seconds for e in everything if e.memory_bytes <= limit)
    assert bought.seconds <= with_more / (1 - MEMORY_TIE)
    assert found.best in found.front
    assert [*found.front] == sorted(found.front, key=lambda e: e.seconds)
    for better, worse in pairwise(e for e in found.front if e is not found.best):
        assert better.seconds < worse.seconds
        assert better.memory_bytes > worse.memory_bytes
    text = "\n".join(describe(found))
    assert f"chose {found.best.candidate.describe()}" in text
    assert "because it computes" in text
    assert "runner-up" in text or "no other strategy fits" in text


def test_groups_that_train_alone_keep_all_states_inside() -> None:
    given = plan_request(machine=machine(world_size=8, group_size=2), group_size=2, outer=OUTER)
    degrees = {candidate.strategy.optim for candidate in all_candidates(given, SearchSpace())}
    assert degrees == {1, 2}
    assert plan(given, NATIVE).best is not None


@pytest.mark.slow("searches all candidates of a model")
def test_ranks_that_would_hold_no_copies_of_states_are_no_advice() -> None:
    free = plan_request(machine=machine(world_size=8, group_size=2), group_size=2)
    for limit, is_advice in (({}, True), ({"survive": 1}, False), ({"outer": OUTER}, False)):
        given = replace(free, **limit)
        least = plan(given, NATIVE).least
        short = replace(given, memory_bytes=least.memory_bytes * 9 // 10)
        assert bool([*rank_changes(short, least.candidate)]) is is_advice, limit


@pytest.mark.slow("searches all candidates of a model")
@pytest.mark.parametrize("number", [0, 4, 10])
def test_as_few_blocks_are_recomputed_as_fit(number: int) -> None:
    """Against every number of blocks, and every size of groups."""
    random = Random(number)
    given, drawn_candidate = drawn(number)
    model = replace(given.model, num_layers=6, recompute=None)
    given = replace(given, model=model, seq_length=2048)
    strategies = [
        strategy
        for strategy in (drawn_candidate.strategy, *map(given.strategy, ("GGG", "IIG", "III")))
        if given.infeasible_reason(strategy, given.materialize) is None
    ]
    space = SearchSpace(
        strategies=tuple(strategies),
        micro_batch_sizes=(given.micro_batch_size,),
        collectives=(drawn_candidate.collective,),
    )
    full = RecomputeConfig(granularity="full")
    every = (
        *(None, RecomputeConfig(granularity="selective")),
        *(replace(full, method="block", num_layers=count) for count in range(1, 6)),
        *(replace(full, num_layers=size) for size in (1, 2, 3, 6)),
    )
    estimator = Estimator(given)
    exhaustive = all_candidates(given, replace(space, recomputes=every))
    everything = [estimator.estimate(candidate) for candidate in exhaustive]
    needs = sorted(estimate.memory_bytes for estimate in everything)
    limit = round(needs[0] + random.choice((0.0, 0.1, 0.3, 0.6)) * (needs[-1] - needs[0]))
    best = plan(replace(given, memory_bytes=limit), space).best
    first, *_ = best_first(e for e in everything if e.memory_bytes <= limit)
    assert best.memory_bytes <= limit
    assert best.seconds <= first.seconds * (1 + RESOLUTION)
    larger = replace(given, memory_bytes=2 * limit, memory_margin=0.5)
    with_margin = plan(larger, space).best
    assert with_margin.candidate == best.candidate


def weighed(
    name: str, seconds: float, inter: int, *, states: int = 0, fits: bool = True
) -> Estimate:
    """An estimate that differs from others in the values that order them."""
    given = plan_request()
    found = Estimator(given).estimate(given.candidate(given.strategy(name)))
    return replace(
        found,
        fits=fits,
        seconds=seconds,
        sent=replace(found.sent, inter=inter),
        memory=replace(found.memory, allocations=found.memory.allocations._replace(states=states)),
    )


def test_ties_in_time_go_by_bytes_between_groups_then_by_memory() -> None:
    """Within 1% to the one that needs a tenth less memory, and sends no more."""
    gigabyte = 10**9
    order = [
        weighed("GIG", 1.0099, 5, states=40 * gigabyte),
        weighed("NIG", 1.0, 5, states=51 * gigabyte),
        weighed("IIG", 1.0009, 5, states=52 * gigabyte),
        weighed("NGG", 1.0, 40),
        weighed("GGG", 1.0111, 0),
        weighed("III", 0.5, 0, fits=False),
        weighed("NNN", 0.6, 0, fits=False),
    ]
    for turned in range(len(order)):
        assert best_first((*order[turned:], *order[:turned])) == tuple(order)


@pytest.mark.parametrize("recompute", [None, RecomputeConfig(granularity="full")])
def test_memory_of_many_is_that_of_one(recompute: RecomputeConfig | None) -> None:
    for ahead, trainable in product((0, 1), (Trainable(), Trainable(share=0.5))):
        model = replace(SMALL, recompute=recompute)
        given = plan_request(model, prefetch_units=ahead, trainable=trainable)
        estimator = Estimator(given)
        for strategy in ("8,8,8", "NNG", "2,4,16", "1,2,32"):  # of which each leaves a cache
            candidate = given.candidate(given.strategy(strategy))
            assert estimator.memory(candidate) == Estimator(given).memory(candidate)


def test_batches_that_cannot_be_are_refused() -> None:
    refused(lambda: plan_request(global_batch_size=100), "--global-batch-size 100 is no multiple")
    refused(lambda: plan_request(SMALL).micro_batches(0), "--micro-batch-size 0 must be at least 1")


@pytest.mark.parametrize("enough", [9, 12, 13, 47, 16384, 16385])
def test_the_fewest_whole_groups_are_found(enough: int) -> None:
    found = fewest_ranks(8, 4, lambda ranks: ranks >= enough)
    assert found == (None if enough > 16384 else -(-enough // 4) * 4)
    assert fewest_ranks(16384, 4, lambda ranks: True) is None


FULL = RecomputeConfig(granularity="full")
# On one group GGG can rotate.
WIDE_BLOCKS = {
    "machine": machine(world_size=8),
    "model": replace(SMALL, hidden_size=4096, ffn_hidden_size=32768),
}


@pytest.mark.slow("searches all candidates of a model")
@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({"prefetch_units": 2}, {"prefetch_units": 0}, "--paro-prefetch-units 0"),
        (
            {"precision": BF16},
            {"precision": replace(BF16, optimizer_cpu_offload=True)},
            "--optimizer-cpu-offload",
        ),
        (
            {},
            {"recompute": replace(FULL, method="block", num_layers=3)},
            "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
        ),
        (
            {**WIDE_BLOCKS, "materialize": Materialize.ROTATE},
            {"materialize": Materialize.ROTATE_IN_PLACE},
            "--paro-rotate-in-place",
        ),
    ],
)
def test_what_would_do_does(changes: dict[str, Any], given: dict[str, Any], message: str) -> None:
    """A limit between the memory of the flags as given and of those with one changed."""
    before = plan_request(**changes)
    model = replace(before.model, recompute=given.get("recompute"))
    others = {k: v for k, v in given.items() if k != "recompute"}
    after = plan_request(**(changes | others | {"model": model}))
    as_given = [
        plan(own, SearchSpace(micro_batch_sizes=(own.micro_batch_size,), collectives=("native",),
                          recomputes=(own.model.recompute,)))
        for own in (before, after)
    ]  # fmt: skip
    limit = (as_given[0].least.memory_bytes + as_given[1].least.memory_bytes) // 2
    short = replace(before, memory_bytes=limit)
    assert message in why_nothing_fits(short, as_given[0]).split("; or ")


@pytest.mark.slow("searches all candidates of a model")
def test_groups_of_a_run_and_of_its_machine_both_nest() -> None:
    degrees = {d for s in legal_strategies(48, 24, 8) for d in s.degrees}
    assert degrees == {1, 2, 4, 8, 24, 48}
    given = plan_request(machine=machine(world_size=48), group_size=24)
    assert plan(given, NATIVE).best is not None


@pytest.mark.slow("searches all candidates of a model")
def test_bits_are_chosen_only_where_allowed_and_where_they_save() -> None:
    """Slow links gain from codes; on fast ones packing costs more, and 16 bits stay."""
    slow = plan_request(machine=machine(inter=1))
    assert all(not row.precision.quantizes for row in letter_rows(slow))
    found = plan(replace(slow, chooses_bits=True), NATIVE)
    assert found.best.candidate.inter_bits == 4
    assert found.best.seconds < found.other_bits.seconds
    assert found.best.sent.inter < found.other_bits.sent.inter / 2
    assert "with gradients and updates in 4 bits between groups" in [*describe(found)][3]
    fast = plan(plan_request(machine=machine(inter=10_000), chooses_bits=True), NATIVE)
    assert fast.best.candidate.inter_bits == 16
    assert "packing costs more than it saves" in [*describe(fast)][3] or fast.other_bits is None


def test_bits_that_were_asked_for_are_kept_and_compared() -> None:
    precision = BF16.with_inter_bits(4)
    case = plan_request(machine=machine(inter=10_000), precision=precision)
    estimator = Estimator(case)
    own, other = estimator.estimate_bits(case.candidate(case.strategy("IIG")))
    assert (own.precision, other.precision) == (precision, BF16)
    assert own.coding_seconds > 0
    assert own.seconds > other.seconds
    assert bits_text(own, other).endswith(": packing costs more than it saves")
    assert bits_text(own, other) == bits_text(other, own)
    whole = case.candidate(case.strategy("GGG"))
    assert estimator.other_bits(whole) is None  # nothing that codes could shorten
