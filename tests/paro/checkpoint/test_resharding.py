"""Resharding between any strategies, degrees, groups, worlds and collectives changes no value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from model.config import is_adapter
from paro.checkpoint.agreement import LockedFolders, ranks_by_folder
from paro.checkpoint.base import stored_parameters
from paro.distributed.world import World
from paro.report.log import Log
from paro.strategy import legal_letters
from paro.training.assembly import build_data, build_sources
from paro.training.resume import FROM_NOTHING, load_run
from paro.training.saving import Saver
from paro.training.step import train_step
from tests.helpers.margins import assert_near
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TINY, begun, built, configured, whole_states

WORLDS = (1, 2, 4, 6, 8)
COLLECTIVES = ("native", "flat", "ring", "h-ring", "ho-ring")
STEPS_BEFORE, STEPS_AFTER = 2, 2
# 48 samples are two micro-batches of each rank, on every world size.
SAMPLES, MICRO_BATCHES = 48, 2
FLAGS = f"{TINY} --train-iters {STEPS_BEFORE + STEPS_AFTER} --global-batch-size {SAMPLES}"


@dataclass(frozen=True, slots=True)
class Setting:
    world_size: int
    group_size: int
    strategy: str
    collective: str = "native"
    more: str = ""  # flags

    def __str__(self) -> str:
        groups = f"{self.world_size // self.group_size}x{self.group_size}"
        return f"{self.strategy} on {groups} by {self.collective}{self.more and ' '}{self.more}"

    def flags(self) -> list[str]:
        return [
            *FLAGS.split(),
            *("--micro-batch-size", str(SAMPLES // (self.world_size * MICRO_BATCHES))),
            *("--paro-strategy", self.strategy, "--paro-group-size", str(self.group_size)),
            *("--paro-collective", self.collective),
            *self.more.split(),
        ]


@dataclass(frozen=True, slots=True)
class Pair:
    before: Setting
    after: Setting
    asynchronous: bool = False

    def __str__(self) -> str:
        return f"{self.before} -> {self.after}{', async' if self.asynchronous else ''}"


@dataclass(frozen=True, slots=True)
class Part:
    """The states of all ranks at the checkpoint, and the losses after it."""

    states: dict[str, Tensor]
    num_steps: int
    iteration: int
    losses: list[float]
    averages: dict[str, Tensor]  # averaged weights after these steps


def draw_pairs(number: int, seed: int) -> list[Pair]:
    """Random pairs in which every strategy is equally often on either side.

    Every third setting gives degrees for a strategy; every eighth pair changes nothing.
    """
    drawn = Random(seed)
    decks = [_deck(number, drawn) for _ in range(2)]
    pairs = []
    for index, (first, second) in enumerate(zip(*decks, strict=True)):
        before = _draw_setting(drawn, first, degrees=index % 3 == 1)
        after = _draw_setting(drawn, second, degrees=index % 3 == 2)
        if index % 8 == 5:
            after = before
        pairs.append(Pair(before, after, asynchronous=drawn.random() < 0.3))
    return pairs


def _deck(number: int, drawn: Random) -> list[str]:
    letters = [*legal_letters()]
    deck: list[str] = []
    while len(deck) < number:
        drawn.shuffle(letters)
        deck += letters
    return deck[:number]


def _draw_setting(drawn: Random, letters: str, *, degrees: bool) -> Setting:
    world_size = drawn.choice(WORLDS)
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    group_size = drawn.choice(divisors)
    strategy = letters
    while degrees:
        strategy = ",".join(str(drawn.choice(divisors)) for _ in range(3))
        setting = Setting(world_size, group_size, strategy)
        try:
            configured(setting.flags(), World(size=world_size))
        except ValueError:
            continue
        break
    return Setting(world_size, group_size, strategy, drawn.choice(COLLECTIVES))


def save_and_go_on(
    setting: Setting, root: Path, *, asynchronous: bool, more: Sequence[str] = ()
) -> Part:
    """Trains, saves, and continues without interruption; begins with the --load of `more`."""
    flags = ["--save", str(root), *(["--async-save"] if asynchronous else []), *more]
    config, training = built([*setting.flags(), *flags])
    log = Log(rank=training.control.world.rank)
    resumed = load_run(config, training, log) if config.checkpoint.load else FROM_NOTHING
    state, source = begun(config, training)
    for _ in range(STEPS_BEFORE):
        train_step(training, state, source)
    states = whole_states(training, replicas=True)
    locked = LockedFolders(ranks_by_folder(root, training.control, "--save"), None)
    saver = Saver(config, training, log, locked, resumed=resumed)
    saver.save(state)
    num_steps, iteration = training.optimizer.num_steps, state.iteration
    losses = [train_step(training, state, source).loss for _ in range(STEPS_AFTER)]
    saver.settle()
    averages = whole_states(training, replicas=True, only="ema")
    training.close()
    return Part(states, num_steps, iteration, losses, averages)


def save_and_load(
    settings: Sequence[Setting], root: Path, *, asynchronous: bool = False
) -> list[Part]:
    """A run that saves under the first setting, and runs on the same ranks that load it."""
    saved = save_and_go_on(settings[0], root, asynchronous=asynchronous)
    return [saved, *(load_and_go_on(setting, root) for setting in settings[1:])]


def load_and_go_on(setting: Setting, root: Path, *, more: Sequence[str] = ()) -> Part:
    config, training = built([*setting.flags(), "--load", str(root), *more])
    state = load_run(config, training, Log(rank=training.control.world.rank)).state
    assert state is not None, "nothing was loaded"
    states = whole_states(training, replicas=True)
    num_steps, iteration = training.optimizer.num_steps, state.iteration
    source = build_sources(config, build_data(config, state), training, state).train
    losses = [train_step(training, state, source).loss for _ in range(STEPS_AFTER)]
    averages = whole_states(training, replicas=True, only="ema")
    training.close()
    return Part(states, num_steps, iteration, losses, averages)


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


# Saved by 4 ranks and loaded by 2, but for the first, with which the adapters begin.
SAME = Setting(2, 1, "GGG", "flat", f"{GROUPS} {AVERAGED}")
FEW = {
    "the same": Pair(SAME, SAME),
    "degrees, samples": Pair(
        Setting(4, 4, "1,2,4", "ring", f"{NORMS} {SHARED}"),
        Setting(2, 1, "GGG", "native", f"{NORMS} {SHARED}"),
    ),
    # Of 3 blocks, 2 groups update one each and share the third; one group updates all. Random bits
    # of later steps too: with others, losses would differ by more.
    "Muon": Pair(Setting(4, 2, "IIG", "ho-ring", MUON), Setting(2, 2, "IIG", "h-ring", MUON), True),
    "adapters": Pair(Setting(4, 2, "IGG", "flat", LORA), Setting(2, 1, "NNG", more=LORA)),
}


def save_each(root: Path, names: Sequence[str]) -> dict[str, Part]:
    begin = {"adapters": ["--load", str(root / "the same"), "--finetune"]}
    return {
        name: save_and_go_on(
            pair.before, root / name, asynchronous=pair.asynchronous, more=begin.get(name, ())
        )
        for name, pair in FEW.items()
        if name in names
    }


def load_each(root: Path) -> dict[str, Part]:
    return {name: load_and_go_on(pair.after, root / name) for name, pair in FEW.items()}


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
    names = stored_parameters(root / f"iter_{STEPS_BEFORE:07d}")
    if trains == LAST:
        assert {name.rpartition(".")[0] for name in names} == {"blocks.2"}
    assert trains == LAST or (names and all(map(is_adapter, names)))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks with which others begin."""
    root = tmp_path_factory.mktemp("base")
    run_ranks(save_and_go_on, 2, Setting(2, 1, "GGG"), root, asynchronous=False)
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
