"""What the list of units says of parameters, parts and recomputation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from model.config import RecomputeConfig
from model.units import (
    first_trained_unit,
    recomputed_groups,
    unit_specs,
)
from tests.model.test_llama import CONFIGS, MHA


def test_who_borrows_and_whose_backward_reads_weights() -> None:
    untied, tied = (unit_specs(CONFIGS[name]) for name in ("mha", "tied"))

    assert [unit.borrows for unit in untied] == [()] * 5
    assert [unit.borrows for unit in tied] == [(), (), (), (), ("embedding",)]
    assert [unit.backward_needs_weight for unit in untied] == [False, True, True, True, True]


def test_parts_are_called_by_who_holds_their_matrices() -> None:
    for name, head in (("mha", "head"), ("tied", "embedding")):
        units = unit_specs(replace(CONFIGS[name], num_layers=1))
        labels = [unit.label_of(part) for unit in units for part in unit.parts]
        assert labels == ["embedding", "blocks.0.attention", "blocks.0.mlp", head]


@pytest.mark.parametrize(
    ("trained", "first"),
    [("embedding.weight", 0), ("blocks.1.wo", 2), ("head.norm", 4), ("another", 5)],
)
def test_the_first_unit_that_trains(trained: str, first: int) -> None:
    assert first_trained_unit(unit_specs(MHA), trained.__eq__) == first


PAIRS = RecomputeConfig(granularity="full", num_layers=2)
FIRST_TWO = RecomputeConfig(granularity="full", method="block", num_layers=2)


@pytest.mark.parametrize(
    ("recompute", "first", "groups"),
    [
        (None, 0, []),
        (RecomputeConfig(granularity="selective"), 0, []),
        (RecomputeConfig(granularity="selective", method="block", num_layers=2), 0, []),
        (replace(PAIRS, num_layers=8), 0, [[1, 2, 3, 4, 5]]),
        (replace(FIRST_TWO, num_layers=8), 4, [[4], [5]]),
        (RecomputeConfig(granularity="full"), 2, [[2], [3], [4], [5]]),
        (PAIRS, 0, [[1, 2], [3, 4], [5]]),
        (PAIRS, 2, [[2], [3, 4], [5]]),
        (PAIRS, 3, [[3, 4], [5]]),
        (PAIRS, 6, []),
        (FIRST_TWO, 1, [[1], [2]]),
        (FIRST_TWO, 2, [[2]]),
    ],
)
def test_groups_begin_at_the_first_unit_that_trains(
    recompute: RecomputeConfig | None, first: int, groups: list[list[int]]
) -> None:
    units = unit_specs(replace(MHA, num_layers=5, recompute=recompute))
    assert [[*group] for group in recomputed_groups(units, first)] == groups
