"""Quantized updates and gradients: the bits of the arithmetic on every holder, and exact bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest

from paro.strategy import legal_letters
from tests.helpers.margins import assert_near
from tests.helpers.ranks import run_ranks
from tests.paro.sharding.quantized_runs import (
    Recorded,
    check_sums,
    check_updates,
    quantized_flags,
    record_all,
)
from tests.paro.sharding.test_quantized_reduction import FEEDBACK
from tests.paro.test_parity import assert_formulas

pytestmark = pytest.mark.bits


def recorded(flags: Sequence[str], world_size: int, group_size: int) -> list[list[Recorded]]:
    """What the ranks of every run have recorded."""
    by_rank = run_ranks(record_all, world_size, flags, group_size, timeout=1800)
    return [[*run] for run in zip(*by_rank, strict=True)]


@pytest.mark.ranks
def test_every_holder_has_the_bits_of_the_arithmetic() -> None:
    """Owners alone (IIG), several owners (NNN), the first steps in 16 bits, and feedback."""
    rings, warm = "--paro-collective ho-ring", "--paro-inter-bits-warmup-iters 2"
    cases = [("IIG", 4, ""), ("IIG", 4, warm), ("IIG", 16, ""), ("NII", 4, FEEDBACK)]
    flags = quantized_flags([*cases, ("NNG", 8, rings), ("NNN", 8, rings)], 3)
    runs = recorded(flags, 4, 2)
    bits, first = (4, 4, None, 4, 8, 8), (0, 2, 0, 0, 0, 0)
    updates = [check_updates(runs[n], bits[n], first=first[n]) for n in range(6)]
    assert updates == [3 * 4, 4, 0, 0, 3 * 4, 0]  # of every unit in every step
    sums = [check_sums(run, number or 0) for run, number in zip(runs, bits, strict=True)]
    assert sums == [3 * 4, 4, 0, 3 * 4, 3 * 4, 3 * 4]
    assert all(one.errors is not None for rank in runs[3] for one in rank.sums)
    for number in (0, 2, 3, 4, 5):
        assert_formulas(runs[number][0].trained, flags[number], 4, 2)
    coded, warmed, exact, *_ = ([(s.loss, s.grad_norm) for s in r[0].trained.steps] for r in runs)
    assert warmed[:2] == exact[:2]
    assert (warmed[2][0], coded[0][0]) == (exact[2][0], exact[0][0])
    assert (warmed[2][1] != exact[2][1], coded[1][0] != exact[1][0]) == (True, True)
    assert_near(*([norm for _, norm in run] for run in (coded, exact)), 0.05, "norms of codes")


LETTERS = [letters for letters in legal_letters() if letters[0] != "G" and letters[2] == "G"]
DEGREES = ["1,2,8", "2,2,4", "2,4,8", "4,2,8", "1,1,4"]


@pytest.mark.verify
@pytest.mark.timeout(2400)
@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "group_size"), [(2, 1), (4, 2), (6, 2), (8, 2), (8, 4)])
@pytest.mark.parametrize("bits", [4, 8])
def test_all_strategies(world_size: int, group_size: int, bits: int) -> None:
    names = ("native", "flat", "ring", "h-ring", "ho-ring")
    strategies = [*legal_letters(), *(DEGREES if (world_size, group_size) == (8, 2) else ())]
    cases = [(text, bits, f"--paro-collective {name}") for text, name in product(strategies, names)]
    cases += [("IIG", bits, "--paro-prefetch-units 0")]
    cases += [(name, bits, FEEDBACK) for name in ("IIG", "NII", "NNN")]
    if group_size == 2:
        rotate = "--paro-materialize rotate"
        cases += [
            ("IIG", bits, f"{rotate} {more}") for more in ("", "--paro-rotate-in-place", FEEDBACK)
        ]
    flags = quantized_flags(cases, 24 // world_size)
    runs = recorded(flags, world_size, group_size)
    for (text, *_), line, run in zip(cases, flags, runs, strict=True):
        num_updates, num_sums = check_updates(run, bits), check_sums(run, bits)
        if group_size > 1 and "in-place" not in line:  # halves are small
            assert text not in LETTERS or num_updates >= 6, line
            assert "G" in text[1] or num_sums >= 6, line
        if "flat" not in line and "--paro-collective ring" not in line and "rotate" not in line:
            assert_formulas(run[0].trained, line, world_size, group_size)
