"""Ranks that share samples train like one process, and count as one data-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from paro.arguments.parser import parse_args
from paro.config.elastic import nodes_line
from paro.config.mistakes import better_values
from paro.config.run import RunConfig
from paro.distributed.control import PlannedControl
from paro.distributed.world import World
from paro.launch.dry_run import run_dry
from paro.planning.run_memory import RunMemory
from paro.report.record import RunFacts, summarize
from paro.strategy import legal_letters
from paro.training.assembly import build_data, build_sources, build_training, run_facts
from paro.training.evaluation import Evaluation, evaluate
from paro.training.step import Training, TrainState
from tests.helpers.margins import assert_near
from tests.helpers.ranks import run_ranks
from tests.helpers.refusals import refused
from tests.helpers.training import ADAM_EPS, FP32, TINY, Trained, assert_same, configured, train
from tests.paro.report.test_report import record
from tests.paro.test_parity import (
    COMPILED,
    FEW_STEPS,
    FROZEN,
    MANY_STEPS,
    TIED,
    computation,
)

# 8 heads and 16 tokens can be cut for up to 8 ranks; a tenth of the tokens end a document.
MODEL = (
    "--distributed-backend gloo --mock-data --tokenizer-type NullTokenizer --vocab-size 10 "
    "--make-vocab-size-divisible-by 1 --num-layers 2 --hidden-size 20 --kv-channels 4 "
    "--num-attention-heads 8 --ffn-hidden-size 37 --seq-length 16 --num-workers 0 --lr 0.002 "
    f"--lr-decay-style constant --weight-decay 0.1 {ADAM_EPS} --init-method-std 0.1 "
    "--micro-batch-size 4 --global-batch-size 16"
)
APART = "--reset-position-ids --reset-attention-mask"
MASKED = "--eod-mask-loss"
PER_TOKEN = f"{MASKED} --calculate-per-token-loss"
GROUPED = "--group-query-attention --num-query-groups"
FULL = "--recompute-granularity full"
KEPT = f"{FULL} --paro-recompute-keep core_attn"
CORE = "--recompute-activations"
LORA = "--lora-rank 3 --lora-alpha 6 --lora-dropout 0.3 --lora-target-modules all-linear"
HO_RING = "--paro-collective ho-ring"
SIZES = "--hierarchical-context-parallel-sizes"
PAIRS = f"a2a+p2p {SIZES} 2 2"
FLAT = "p2p --paro-context-ring flat"
TWO = "--micro-batch-size 8"  # micro-batches of a step where all ranks share: the first and last


class Case(NamedTuple):
    """A run on ranks of which `size` share a sample."""

    size: int
    strategy: str
    more: str = ""
    frozen: tuple[str, ...] = ()
    kind: str = "a2a"

    def flags(self, steps: int = FEW_STEPS) -> str:
        return (
            f"{MODEL} --train-iters {steps} --paro-strategy {self.strategy} {self.more} "
            f"--context-parallel-size {self.size} --cp-comm-type {self.kind}"
        )


# By ranks and group size: inside a group, equal to one, and across. `make verify` has the others.
CASES = {
    (2, 2): (Case(2, "NIG", f"{LORA} {KEPT} {GROUPED} 2 {TWO}"),),
    (4, 2): (
        Case(2, "2,2,4", f"{MASKED} {FULL}", FROZEN),
        Case(4, "NNG", f"{APART} {PER_TOKEN} {GROUPED} 2 {TIED} {TWO}"),
        Case(4, "IGG", f"{APART} {MASKED} {FULL} {GROUPED} 2 {TWO}", kind="p2p"),
        Case(4, "INI", f"{LORA} {CORE} {TWO}", kind=FLAT),
        Case(4, "GGG", f"{APART} {GROUPED} 1 {HO_RING} {KEPT} {TWO}", kind="allgather"),
        Case(4, "IIG", f"{APART} {CORE} {GROUPED} 4 {TWO}", kind=PAIRS),
    ),
}
COMPILED_CASE = Case(2, "IIG", f"{APART} {PER_TOKEN} {COMPILED} {KEPT}", kind="p2p")
KINDS = ("a2a", "p2p", FLAT, "allgather", "a2a+p2p")
SHAPES = [(4, 2), (4, 4), (8, 2), (8, 4), (8, 8), (6, 3)]


class Run(NamedTuple):
    """What held-out samples say before training, and the training."""

    held_out: Evaluation
    trained: Trained


def run(flags: str, group_size: int | None, frozen: tuple[str, ...]) -> Run:
    found: list[Evaluation] = []

    def before(training: Training) -> None:
        config = configured(flags, training.control.world)
        (valid,) = build_sources(
            config, build_data(config), training, TrainState.at_start(config.loss_scale)
        ).valid
        batches: Any = valid.batches
        batches.fetch.token_bytes = np.arange(config.vocab_size)
        found.append(evaluate(training, batches, config.batches.num_eval_micro_batches))

    trained = train(flags, group_size=group_size, frozen=frozen, before=before)
    return Run(found[0], trained)


def run_cases(cases: list[Case], group_size: int, steps: int) -> list[Run]:
    return [run(one.flags(steps), group_size, one.frozen) for one in cases]


@cache
def alone(more: str, frozen: tuple[str, ...], steps: int) -> Run:
    return run(f"{MODEL} --train-iters {steps} {more}", None, frozen)


def check(world_size: int, group_size: int, cases: list[Case], steps: int) -> None:
    timeout = 600 if steps == FEW_STEPS else 3600
    by_rank = run_ranks(run_cases, world_size, cases, group_size, steps, timeout=timeout)
    for number, case in enumerate(cases):
        wanted = alone(computation(case.more), case.frozen, steps)
        for rank, runs in enumerate(by_rank):
            held_out, trained = runs[number]
            figures = (held_out[:2], wanted.held_out[:2])  # without that of averaged weights
            assert_near(*figures, FP32.scalar, f"{case}, held out")
            assert_same(trained, wanted.trained, f"{case} on {world_size}")
            if not case.frozen:
                flags = f"{case.flags()} --paro-group-size {group_size}"
                config = configured(flags, World(rank=rank, size=world_size))
                num_micro_batches = config.batches.num_micro_batches_at(0)
                sent = RunMemory(None).sent(config.spec, num_micro_batches, rank)
                assert {step.sent for step in trained.steps[1:]} == {sent}, case


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "group_size", "cases"),
    [
        *((*shape, cases) for shape, cases in CASES.items()),
        pytest.param(2, 2, [COMPILED_CASE], marks=pytest.mark.verify),
    ],
)
def test_ranks_that_share_samples_train_as_one_process_does(
    world_size: int, group_size: int, cases: Sequence[Case]
) -> None:
    check(world_size, group_size, [*cases], FEW_STEPS)


def grid(world_size: int, group_size: int) -> list[Case]:
    """Every strategy with a kind, over all shapes with all; flags are drawn."""
    shape, random = SHAPES.index((world_size, group_size)), Random(world_size * 8 + group_size)
    flags = (
        "",
        f"{APART} {MASKED}",
        f"{PER_TOKEN} {FULL}",
        f"{APART} {LORA} {CORE}",
        KEPT,
        TIED,
    )
    threes = world_size % 3 == 0
    own = "--seq-length 24 --num-attention-heads 6" if threes else ""
    sizes = (3, 6) if threes else (2, 4, 8)
    heads = ("", *(f"{GROUPED} {number}" for number in ((1, 3) if threes else (1, 2, 4))))
    cases = []
    for number, strategy in enumerate(legal_letters()):
        kind = KINDS[(number + shape) % len(KINDS)]
        size = random.choice([n for n in sizes if n <= world_size])
        if kind == "a2a+p2p":
            size = max(size, sizes[1])
            first = random.choice([n for n in sizes[:2] if n < size])
            kind += f" {SIZES} {first} {size // first}"
        more = f"{own} {random.choice(flags)} {random.choice(heads)}"
        cases.append(Case(size, strategy, more, kind=kind))
    return cases


@pytest.mark.verify
@pytest.mark.timeout(3600)
@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "group_size"), SHAPES)
def test_all_ways_to_share_samples_train_as_one_process_does(
    world_size: int, group_size: int
) -> None:
    check(world_size, group_size, grid(world_size, group_size), MANY_STEPS)


# What follows the ranks that read different samples

EIGHT = World(size=8, rank=5, ranks_per_node=4)
PAIRS_OF_RANKS = TINY.replace("--micro-batch-size 1", "--micro-batch-size 2") + " --train-iters 10"


def run_of(words: str = "", world: World = EIGHT) -> RunConfig:
    share = "--context-parallel-size 2 --cp-comm-type a2a"
    return configured(f"{PAIRS_OF_RANKS} {share} {words}", world)


def test_batches_count_data_parallel_ranks() -> None:
    assert run_of().batches.global_batch_size == 2 * 4
    batches = run_of("--global-batch-size 24").batches
    assert batches.num_micro_batches_at(0) == batches.num_eval_micro_batches == 3
    assert batches.samples_after(10) == 240
    refused(lambda: run_of("--global-batch-size 12"), "times 4 data-parallel ranks")
    dry = "--context-parallel-size 2 --global-batch-size 20 --dry-run --world-size 8"
    args = parse_args(f"{PAIRS_OF_RANKS} --micro-batch-size 3 {dry}".split())
    assert better_values(args) == {"micro_batch_size": 1}
    (line,) = nodes_line(run_of("--global-batch-size 40").batches, replace(EIGHT, size=12), 2)
    assert "restart on 1 and 2 of 3 nodes" in line


def test_speed_counts_samples_once_and_devices_all(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--global-batch-size 24 --peak-tflops 1 --dry-run --world-size 8"
    config = run_of(flags, replace(EIGHT, rank=0))
    training = build_training(config, PlannedControl(config.world, torch.device("meta")))
    facts: RunFacts = run_facts(config, training)
    size = config.batches.batch_size_at(0)
    step = replace(record(1), global_batch_size=size, iteration_time_ms=500.0)
    metrics = summarize([step], facts, peak_memory_bytes=0)
    assert metrics.tokens_per_second == 24 * 12 / 0.5
    assert metrics.mfu == pytest.approx(24 * 12 / 0.5 * facts.flops_per_token / 8 / 1e12)
    run_dry(config)
    assert ": 4 data-parallel ranks x 3 micro-batches x 2 samples\n" in capsys.readouterr().out
