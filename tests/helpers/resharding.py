"""Saves a run under one strategy, resumes it under another, and checks what must be equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from torch import Tensor

from paro.checkpoint.agreement import LockedFolders, ranks_by_folder
from paro.distributed.world import World
from paro.report.log import Log
from paro.strategy import legal_letters
from paro.training.assembly import build_data, build_sources
from paro.training.resume import FROM_NOTHING, load_run
from paro.training.saving import Saver
from paro.training.step import Training, train_step
from tests.helpers.flags import configured
from tests.helpers.training import TINY, begun, built, whole_states

WORLDS = (1, 2, 4, 6, 8)
COLLECTIVES = ("native", "flat", "ring", "h-ring", "ho-ring")
STEPS_BEFORE, STEPS_AFTER = 2, 2
# 48 samples are two micro-batches of each rank, on every world size.
SAMPLES, MICRO_BATCHES = 48, 2
FLAGS = f"{TINY} --train-iters {STEPS_BEFORE + STEPS_AFTER} --global-batch-size {SAMPLES}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The sharding of a run."""

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
    """One setting to save under and one to load under."""

    before: Setting
    after: Setting
    asynchronous: bool

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
        setting = Setting(world_size=world_size, group_size=group_size, strategy=strategy)
        try:
            configured(setting.flags(), World(size=world_size))
        except ValueError:
            continue
        break
    return Setting(
        world_size=world_size,
        group_size=group_size,
        strategy=strategy,
        collective=drawn.choice(COLLECTIVES),
    )


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
    saver.write(state)
    num_steps, iteration = training.optimizer.num_steps, state.iteration
    losses = [train_step(training, state, source).loss for _ in range(STEPS_AFTER)]
    saver.settle()
    averages = averages_of(training)
    training.close()
    return Part(states, num_steps, iteration, losses, averages)


def averages_of(training: Training) -> dict[str, Tensor]:
    """The averaged weights of a run, as whole tensors."""
    return whole_states(training, replicas=True, only="ema")


def save_and_load(
    settings: Sequence[Setting], root: Path, *, asynchronous: bool = False
) -> list[Part]:
    """A run that saves under the first setting, and runs on the same ranks that load it."""
    saved = save_and_go_on(settings[0], root, asynchronous=asynchronous)
    return [saved, *(load_and_go_on(setting, root) for setting in settings[1:])]


def load_and_go_on(setting: Setting, root: Path, *, more: Sequence[str] = ()) -> Part:
    """Loads and trains to the end."""
    config, training = built([*setting.flags(), "--load", str(root), *more])
    state = load_run(config, training, Log(rank=training.control.world.rank)).state
    assert state is not None, "nothing was loaded"
    states = whole_states(training, replicas=True)
    num_steps, iteration = training.optimizer.num_steps, state.iteration
    source = build_sources(config, build_data(config, state), training, state).train
    losses = [train_step(training, state, source).loss for _ in range(STEPS_AFTER)]
    averages = averages_of(training)
    training.close()
    return Part(states, num_steps, iteration, losses, averages)
