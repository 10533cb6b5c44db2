"""The planner and fewer bits between groups: chosen where allowed and faster, and compared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paro.machine.collective_time import algorithms_of
from paro.planning.description import bits_text, describe
from paro.planning.estimator import Estimator
from paro.planning.planner import plan
from paro.planning.search_space import SearchSpace
from tests.paro.planning.cases import BF16, DEVICE, machine, plan_request
from tools.planning.tables import letter_rows

FEW = SearchSpace(micro_batch_sizes=(2,), collectives=("native",), recomputes=(None,))


def test_bits_are_chosen_only_where_allowed_and_where_they_save() -> None:
    """Slow links gain from codes; on fast ones packing costs more, and 16 bits stay."""
    slow = plan_request(machine=machine(inter=1))
    assert all(not row.precision.quantizes for row in letter_rows(slow))
    found = plan(replace(slow, chooses_bits=True), FEW)
    assert found.best.candidate.inter_bits == 4
    assert found.best.seconds < found.other_bits.seconds
    assert found.best.sent.inter < found.other_bits.sent.inter / 2
    assert "with gradients and updates in 4 bits between groups" in describe(found)[3]
    fast = plan(plan_request(machine=machine(inter=10_000), chooses_bits=True), FEW)
    assert fast.best.candidate.inter_bits == 16
    assert "packing costs more than it saves" in describe(fast)[3] or fast.other_bits is None


def test_bits_that_were_asked_for_are_kept_and_compared() -> None:
    """Also where they cost more than they save; the line has both times."""
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
    assert estimator.with_other_bits(whole) is None  # nothing that codes could shorten


def test_codes_take_their_time_at_the_rate_of_the_machine_file() -> None:
    slow = replace(DEVICE, coding_bytes_per_second=DEVICE.memory_bytes_per_second / 50)
    cases = [
        plan_request(machine=machine(device=device), precision=BF16.with_inter_bits(4))
        for device in (DEVICE, slow)
    ]
    fast, late = (Estimator(c).estimate(c.candidate(c.strategy("IIG"))) for c in cases)
    assert late.coding_seconds == pytest.approx(50 * fast.coding_seconds)
    assert late.seconds > fast.seconds


@pytest.mark.parametrize("group_size", [2, 4, 16])
def test_groups_of_the_run_need_not_be_nodes(group_size: int) -> None:
    """What crosses the run's groups has codes; links are the machine's."""
    case = plan_request(group_size=group_size, precision=BF16.with_inter_bits(4))
    estimator = Estimator(case)
    for text in ("IIG", "III", "NNG", "NNI", "IGG", "GGG"):
        strategy = case.strategy(text)
        for collective in algorithms_of(case.machine, by_nccl=True):
            candidate = replace(case.candidate(strategy), collective=collective)
            assert estimator.estimate(candidate).seconds > 0.0
    assert plan(case, SearchSpace(micro_batch_sizes=(2,), recomputes=(None,))).best is not None
