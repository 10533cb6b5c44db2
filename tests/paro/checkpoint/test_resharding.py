"""Resharding between any strategies, degrees, groups, worlds and collectives changes no value."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.config import is_adapter
from paro.checkpoint.base import stored_parameters
from tests.helpers.margins import assert_near
from tests.helpers.ranks import run_ranks
from tests.helpers.resharding import (
    STEPS_BEFORE,
    Pair,
    Setting,
    draw_pairs,
    load_and_go_on,
    save_and_go_on,
)

PAIRS = draw_pairs(72, seed=5)
# The first that changes nothing, the first between worlds of 6 and 8 or 4, and two more.
FEW = (5, *(i for i, p in enumerate(PAIRS) if p.before.world_size != p.after.world_size))[:4]

pytestmark = pytest.mark.ranks


ROUNDED = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
MUON = "--optimizer muon --muon-fp32-matmul-prec highest"
LAST = "--trainable last-blocks:0.34"
LORA = "--lora-rank 3 --lora-dropout 0.2 --lora-target-modules q_proj,down_proj"


def check(pair: Pair, root: Path, base: Path | None = None, trains: str = LAST) -> None:
    """With a `base`, of a run that begins with it and trains only a part."""
    before, after = pair.before, pair.after
    part = [] if base is None else trains.split()
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
        if trains == LAST:
            assert {name.rpartition(".")[0] for name in names} == {"blocks.2"}
        else:
            assert names
            assert all(map(is_adapter, names))
    saved, loaded = there[0].states, here[0].states
    assert saved.keys() == loaded.keys()
    kinds = {"param", "exp_avg", "exp_avg_sq"}
    kinds |= {"momentum_buffer"} if MUON in before.more else set()
    assert {name.partition(".")[0] for name in saved} == kinds
    assert f"exp_avg.blocks.0.{'mlp_norm' if MUON in before.more else 'wq'}" in saved or base
    for name, values in saved.items():
        assert torch.equal(values, loaded[name]), f"{pair}: {name}"
    for part in (*there, *here):
        assert (part.num_steps, part.iteration) == (STEPS_BEFORE, STEPS_BEFORE)
        if before == after:
            assert part.losses == there[0].losses, pair
        assert_near(part.losses, there[0].losses, 1e-5, str(pair))


# Of 3 blocks, 2 groups update one each and share the third, 3 groups update one each.
BUCKETS = [Setting(world_size=n, group_size=2, strategy="IIG") for n in (4, 6)]


@pytest.mark.parametrize(
    ("pair", "more"),
    [(PAIRS[FEW[1]], ROUNDED), (Pair(*BUCKETS, asynchronous=True), f"{MUON} {ROUNDED}")],
)
def test_states_of_other_kinds_reshard(tmp_path: Path, pair: Pair, more: str) -> None:
    """Random bits of later steps too: with others, losses would differ by more."""
    before, after = (
        replace(setting, more=more, collective="native") for setting in (pair.before, pair.after)
    )
    check(replace(pair, before=before, after=after), tmp_path)


def test_ranks_that_share_samples_may_be_others_after_a_resume(tmp_path: Path) -> None:
    shared = "--cp-comm-type a2a --context-parallel-size 2"
    before = Setting(world_size=4, group_size=2, strategy="IIG", more=shared)
    after = Setting(world_size=2, group_size=1, strategy="GGG", more=shared)
    check(Pair(before, after, asynchronous=False), tmp_path)


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


@pytest.mark.parametrize(
    "trains",
    [
        pytest.param(LAST, id="last block", marks=pytest.mark.verify),
        pytest.param(LORA, id="adapters"),
    ],
)
def test_what_was_trained_and_its_base_reshard(tmp_path: Path, base: Path, trains: str) -> None:
    check(PAIRS[FEW[2]], tmp_path, base, trains)


@pytest.mark.verify
@pytest.mark.parametrize("index", range(len(PAIRS)), ids=lambda index: str(PAIRS[index]))
def test_all_reshard_with_a_base(tmp_path: Path, base: Path, index: int) -> None:
    check(PAIRS[index], tmp_path, base, LAST if index < 36 else LORA)


@pytest.mark.verify
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_all_pairs(tmp_path: Path, pair: Pair) -> None:
    check(pair, tmp_path)
