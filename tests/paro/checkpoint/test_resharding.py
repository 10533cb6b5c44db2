"""Resharding between any strategies, degrees, groups, worlds and collectives changes no value."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paro.checkpoint.base import stored_parameters
from tests.helpers.ranks import run_ranks
from tests.helpers.resharding import (
    STEPS_BEFORE,
    Pair,
    Setting,
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


def check(pair: Pair, root: Path, base: Path | None = None) -> None:
    """With a `base`, of a run that trains the last block alone and begins with it."""
    before, after = pair.before, pair.after
    part = [] if base is None else ["--trainable", "last-blocks:0.34"]
    begin = [] if base is None else ["--load", str(base), "--finetune"]
    there = run_ranks(
        save_and_go_on,
        before.world_size,
        before,
        root,
        asynchronous=pair.asynchronous,
        more=[*part, *begin],
    )
    here = run_ranks(load_and_go_on, after.world_size, after, root, more=part)
    if base is not None:
        names = stored_parameters(root / "iter_0000003")
        assert {name.rpartition(".")[0] for name in names} == {"blocks.2"}
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


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks with which others begin."""
    root = tmp_path_factory.mktemp("base")
    setting = Setting(world_size=2, group_size=1, strategy="GGG")
    run_ranks(save_and_go_on, 2, setting, root, asynchronous=False)
    return root


def test_what_was_trained_and_its_base_reshard(tmp_path: Path, base: Path) -> None:
    check(PAIRS[FEW[2]], tmp_path, base)


@pytest.mark.verify
@pytest.mark.parametrize("pair", PAIRS[:36], ids=str)
def test_all_reshard_with_a_base(tmp_path: Path, base: Path, pair: Pair) -> None:
    check(pair, tmp_path, base)


@pytest.mark.verify
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_all_pairs(tmp_path: Path, pair: Pair) -> None:
    check(pair, tmp_path)
