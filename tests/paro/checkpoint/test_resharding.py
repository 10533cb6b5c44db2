"""Resharding between any strategies, degrees, groups, worlds and collectives changes no value."""

from __future__ import annotations

from collections.abc import Sequence
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
    Part,
    Setting,
    draw_pairs,
    load_and_go_on,
    save_and_go_on,
)

pytestmark = pytest.mark.ranks

AVERAGED = "--ema-decay 0.7"
ROUNDED = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
MUON = f"--optimizer muon --muon-fp32-matmul-prec highest {ROUNDED} {AVERAGED}"
GROUPS = "--decoupled-lr 0.01 --param-group names:*.w_up,blocks.1.* lr-mult=3 wd-mult=2"
NORMS = f"--qk-layernorm --apply-wd-to-qk-layernorm {GROUPS} names:*.k_norm lr-mult=0.5"
SHARED = "--cp-comm-type a2a --context-parallel-size 2"
LAST = "--trainable last-blocks:0.34"
LORA = "--lora-rank 3 --lora-dropout 0.2 --lora-target-modules q_proj,down_proj"
Parts = tuple[Sequence[Part], Sequence[Part]]  # of all ranks: before and after the resumption


def on(
    ranks: int, group: int, strategy: str, collective: str = "native", more: str = ""
) -> Setting:
    words = {"strategy": strategy, "collective": collective, "more": more}
    return Setting(world_size=ranks, group_size=group, **words)


# Saved by 4 ranks and loaded by 2, but for the first, with which the adapters begin.
FEW = {
    "the same": Pair(*2 * (on(2, 1, "GGG", "flat", f"{GROUPS} {AVERAGED}"),), asynchronous=False),
    "degrees, samples": Pair(
        on(4, 4, "1,2,4", "ring", f"{NORMS} {SHARED}"),
        on(2, 1, "GGG", "native", f"{NORMS} {SHARED}"),
        asynchronous=False,
    ),
    # Of 3 blocks, 2 groups update one each and share the third; one group updates all. Random bits
    # of later steps too: with others, losses would differ by more.
    "Muon": Pair(on(4, 2, "IIG", "ho-ring", MUON), on(2, 2, "IIG", "h-ring", MUON), True),
    "adapters": Pair(on(4, 2, "IGG", "flat"), on(2, 1, "NNG"), asynchronous=False),
}


def save_each(root: Path, names: Sequence[str]) -> dict[str, Part]:
    """On this rank, case by case."""
    begin = [*LORA.split(), "--load", str(root / "the same"), "--finetune"]
    return {
        name: save_and_go_on(
            FEW[name].before,
            root / name,
            asynchronous=FEW[name].asynchronous,
            more=begin if name == "adapters" else (),
        )
        for name in names
    }


def load_each(root: Path) -> dict[str, Part]:
    return {
        name: load_and_go_on(
            pair.after, root / name, more=LORA.split() if name == "adapters" else ()
        )
        for name, pair in FEW.items()
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("few")


@pytest.fixture(scope="module")
def parts(root: Path) -> dict[str, Parts]:
    """What all ranks had, by case."""
    first, *others = FEW
    saved = [(run_ranks(save_each, 2, root, [first]), [first])]
    saved.append((run_ranks(save_each, 4, root, others), others))
    here = run_ranks(load_each, 2, root)
    return {
        name: ([rank[name] for rank in there], [rank[name] for rank in here])
        for there, names in saved
        for name in names
    }


@pytest.mark.parametrize("name", FEW)
def test_a_few_pairs(root: Path, parts: dict[str, Parts], name: str) -> None:
    check(FEW[name], parts[name])
    if name == "adapters":
        check_stored(root / name, LORA)


def check(pair: Pair, parts: Parts) -> None:
    """What was loaded was saved, and training goes on as it did there."""
    there, here = parts
    saved, loaded = there[0].states, here[0].states
    assert saved.keys() == loaded.keys()
    more = {"muon": "momentum_buffer", "--ema-decay": "ema"}
    kinds = {kind for word, kind in more.items() if word in pair.before.more}
    kinds |= {"param", "exp_avg", "exp_avg_sq"}
    assert {name.partition(".")[0] for name in saved} == kinds
    for name, values in saved.items():
        assert torch.equal(values, loaded[name]), f"{pair}: {name}"
    for part in (*there, *here):
        assert (part.num_steps, part.iteration) == (STEPS_BEFORE, STEPS_BEFORE)
        if pair.before == pair.after:
            assert part.losses == there[0].losses, pair
            for name, values in there[0].averages.items():
                assert torch.equal(values, part.averages[name]), f"{pair}: {name}"
        assert_near(part.losses, there[0].losses, 1e-5, str(pair))
        for name, values in there[0].averages.items():  # moved by the learning rate, 0.002, a step
            assert torch.allclose(values, part.averages[name], rtol=0, atol=1e-4), f"{pair}: {name}"


def check_stored(root: Path, trains: str) -> None:
    """What was saved is only what trains."""
    names = stored_parameters(root / f"iter_{STEPS_BEFORE:07d}")
    if trains == LAST:
        assert {name.rpartition(".")[0] for name in names} == {"blocks.2"}
    assert trains == LAST or (names and all(map(is_adapter, names)))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks with which others begin."""
    root = tmp_path_factory.mktemp("base")
    run_ranks(save_and_go_on, 2, on(2, 1, "GGG"), root, asynchronous=False)
    return root


PAIRS = draw_pairs(72, seed=5)


@pytest.mark.verify
@pytest.mark.parametrize("index", range(len(PAIRS)), ids=lambda index: str(PAIRS[index]))
@pytest.mark.parametrize("has_base", [False, True])
def test_all_pairs(tmp_path: Path, base: Path, index: int, has_base: bool) -> None:
    """Whole models, and what is trained of one while its base keeps the rest."""
    pair, trains = PAIRS[index], LAST if index < 36 else LORA
    part = trains.split() if has_base else []
    begin = [*part, "--load", str(base), "--finetune"] if has_base else []
    how = {"asynchronous": pair.asynchronous, "more": begin}
    there = run_ranks(save_and_go_on, pair.before.world_size, pair.before, tmp_path, **how)
    here = run_ranks(load_and_go_on, pair.after.world_size, pair.after, tmp_path, more=part)
    check(pair, (there, here))
    if has_base:
        check_stored(tmp_path, trains)
