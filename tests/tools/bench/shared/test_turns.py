"""Contenders take turns, and neighbours are compared."""

from __future__ import annotations

import pytest

from tools.bench.shared.turns import ROOT, median_ratio, order_of_round


def test_everybody_begins_a_round_in_turn() -> None:
    names = ["a", "b", "c"]
    assert [order_of_round(names, index)[0] for index in range(4)] == ["a", "b", "c", "a"]
    assert all(sorted(order_of_round(names, index)) == names for index in range(4))


def test_neighbours_are_compared() -> None:
    assert median_ratio([2.0, 3.0, 25.0], [1.0, 1.0, 10.0]) == 2.5
    with pytest.raises(ValueError, match="shorter"):
        median_ratio([1.0, 1.0], [1.0])


def test_scripts_are_started_from_the_repository() -> None:
    assert (ROOT / "pretrain_llama.py").is_file()
