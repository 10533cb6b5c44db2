"""Resharding between any strategies, degrees, groups, worlds and collectives changes no value."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.resharding import (
    STEPS_BEFORE,
    Pair,
    draw_pairs,
    load_and_go_on,
    save_and_go_on,
    whole_states,
)

TOLERANCE = 1e-5
PAIRS = draw_pairs(72, seed=5)
# The first that changes nothing, the first between worlds of 6 and 8 or 4, and two more.
FEW = (5, *(i for i, p in enumerate(PAIRS) if p.before.world_size != p.after.world_size))[:4]

pytestmark = pytest.mark.ranks


def check(pair: Pair, root: Path) -> None:
    before, after = pair.before, pair.after
    there = run_ranks(
        save_and_go_on, before.world_size, before, root, asynchronous=pair.asynchronous
    )
    here = run_ranks(load_and_go_on, after.world_size, after, root)
    saved, loaded = whole_states(there), whole_states(here)
    assert saved.keys() == loaded.keys()
    assert {name.partition(".")[0] for name in saved} == {"param", "exp_avg", "exp_avg_sq"}
    for name, values in saved.items():
        assert torch.equal(values, loaded[name]), f"{pair}: {name}"
    for part in (*there, *here):
        assert (part.num_steps, part.iteration) == (STEPS_BEFORE, STEPS_BEFORE)
        if before == after:
            assert part.losses == there[0].losses, pair
        assert part.losses == pytest.approx(there[0].losses, rel=TOLERANCE), pair


@pytest.mark.parametrize("index", FEW, ids=lambda index: str(PAIRS[index]))
def test_a_few_pairs(tmp_path: Path, index: int) -> None:
    check(PAIRS[index], tmp_path)


@pytest.mark.verify
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_all_pairs(tmp_path: Path, pair: Pair) -> None:
    check(pair, tmp_path)
