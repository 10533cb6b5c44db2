"""Which groups a round leaves out, and how long an unusual level of movement is unusual."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import mean, variance

import pytest

from paro.schedule.movement import UsualMovement


def after_rounds(rounds: Sequence[Sequence[float]]) -> tuple[UsualMovement, int]:
    """The statistics after rounds, and how many movements were left out in them."""
    usual, left_out = UsualMovement(), 0
    for norms in rounds:
        left_out += usual.taken(norms).count(False)
        usual = usual.after(norms)
    return usual, left_out


def ordinary(num_rounds: int, *, groups: int = 4, level: float = 2.0) -> list[list[float]]:
    noise = random.Random(3)
    return [
        [level * (1.0 + noise.gauss(0, 0.03)) for _ in range(groups)] for _ in range(num_rounds)
    ]


def test_statistics_are_those_of_all_norms_in_the_first_rounds() -> None:
    rounds = ordinary(40)
    usual, _ = after_rounds(rounds)
    norms = [norm for each in rounds for norm in each]
    assert usual.mean == pytest.approx(mean(norms))
    assert usual.variance == pytest.approx(variance(norms), rel=0.01)


def test_ordinary_movements_are_taken_also_while_they_grow_or_shrink() -> None:
    for growth in (1.0, 1.02, 0.95):
        rounds = [[n * growth**i for n in norms] for i, norms in enumerate(ordinary(200))]
        assert after_rounds(rounds)[1] == 0, growth


def test_an_outlier_is_left_out_and_does_not_hide_the_next_one() -> None:
    usual, _ = after_rounds(ordinary(100))
    for outlier in (3.0, 1e30, math.inf, math.nan):
        norms = [2.0, 2.0, outlier, 2.0]
        assert usual.taken(norms) == (True, True, False, True)
        assert usual.after(norms).taken(norms) == (True, True, False, True)


def test_an_outlier_in_the_first_rounds_does_not_hide_later_ones() -> None:
    rounds = ordinary(50)
    rounds[10][1] = 1e6
    usual, _ = after_rounds(rounds)
    assert usual.taken([2.0, 2.0, 20.0, 2.0]) == (True, True, False, True)


def test_nothing_but_infinity_and_nan_is_left_out_before_there_are_statistics() -> None:
    norms = [1.0, 1e6, math.nan, math.inf]
    assert UsualMovement().taken(norms) == (True, True, False, False)
    nothing = [math.nan] * 2
    assert UsualMovement().taken(nothing) == (False, False)
    assert UsualMovement().after(nothing) == UsualMovement()


def test_a_level_that_all_groups_reach_is_taken_and_soon_usual() -> None:
    usual, _ = after_rounds(ordinary(100))
    higher = ordinary(20, level=6.0)
    for norms in higher:
        assert usual.taken(norms) == (True,) * 4
        usual = usual.after(norms)
    assert usual.taken([6.0, 2.0, 6.0, 6.0]) == (True,) * 4
