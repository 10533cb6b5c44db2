"""Every strategy and collective trains like one process and sends the bytes of the formula."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from random import Random
from unittest import mock

import pytest
import torch

from paro.collectives import schedule
from paro.collectives.choice import AlgorithmChoice
from paro.collectives.hops import ALGORITHMS
from paro.distributed.world import World
from paro.layout import Unit
from paro.machine.files import machine_to_json
from paro.planning.run_memory import RunMemory
from paro.sharding.buffers import BufferCounters
from paro.strategy import legal_letters
from paro.topology import Sent
from paro.training import assembly
from tests.helpers.ranks import run_ranks
from tests.helpers.training import (
    ADAM_EPS,
    BF16,
    BF16_MUON,
    FP32,
    TINY,
    Allowed,
    Trained,
    assert_same,
    configured,
    margin_between,
    train,
)
from tests.paro.machine.test_collective_time import measured_machine

SHAPES = [(8, 4), (8, 2), (6, 3), (6, 2), (4, 2), (2, 1), (2, 2), (1, 1)]  # world, group
FROZEN = ("embedding.weight", "blocks.0.wq", "blocks.1.w_up", "head.weight")
TIED = "--tie-embeddings-and-output-weights"
LAST = "--trainable last-blocks:0.5"  # blocks 1 and 2 of 3
LORA = "--lora-rank 3 --lora-alpha 6"
BASE_BF16 = f"{LORA} --lora-base-dtype bf16"
DROPPING = f"{LORA} --lora-dropout 0.3 --lora-target-modules all-linear"
GROUPS = (
    "--apply-wd-to-qk-layernorm --decoupled-lr 0.004 --param-group names:*.w_up,*.q_norm lr-mult=2 "
    "names:blocks.1.* lr-mult=0.5 wd-mult=3"
)
MUP = "--use-mup --mup-base-hidden-size 8 --mup-embedding-mult 3 --mup-base-head-dim 3"
MODERN = f"--add-qkv-bias --qk-layernorm --z-loss-weight 0.1 {GROUPS} {MUP}"
COMPILED = "--torch-compile aot_eager"
AVERAGED = "--ema-decay 0.7"
MUON = "--optimizer muon --muon-fp32-matmul-prec highest"
TWO = "--num-layers 2"
FIVE = "--num-layers 5"  # blocks, of which 4 groups have one each, and one is left over

# The same global batch on any world size; the first, another and the last micro-batch.
SAMPLES, MICRO_BATCHES = 72, 3
# `make verify` trains longer, under every legal strategy.
FEW_STEPS, MANY_STEPS = 2, 4

# COVERING communicates states in every possible way; then the default and a seeded sample of 2.
COVERING = ("NNN", "NII", "INI", "NIG", "IGG", "GNG")
DRAWN = tuple(Random(14).sample(sorted({*legal_letters()} - {*COVERING, "IIG"}), 2))
CHOSEN = (*COVERING, "IIG", *DRAWN)

Frozen = tuple[str, ...]  # names of parameters
Case = tuple[str, Frozen]  # flags, frozen parameters
Variant = tuple[str, str, Frozen]  # strategy, more flags, frozen parameters


def train_cases(cases: Sequence[Case], group_size: int | None) -> list[Trained]:
    return [train(flags, group_size=group_size, frozen=frozen) for flags, frozen in cases]


def counted(
    flags: str, world_size: int, group_size: int, rank: int | None = None
) -> tuple[Sequence[Unit], Sent]:
    """The units of a run, padding included, and the bytes of a step by the formula."""
    config = configured(f"{flags} --paro-group-size {group_size}", World(size=world_size))
    spec, num_micro_batches = config.spec, config.batches.num_micro_batches_at(0)
    memory = RunMemory(None)
    return memory.units(spec), memory.sent(spec, num_micro_batches, rank)


def assert_formulas(
    trained: Trained, flags: str, world_size: int, group_size: int, rank: int | None = None
) -> None:
    _, expected = counted(flags, world_size, group_size, rank)
    for step in trained.steps[1:]:
        assert step.sent == expected, flags


def assert_few_buffers(
    counters: BufferCounters, *, prefetch: int, tied: bool, frozen: bool = False
) -> None:
    """The number of whole units and gradient buffers alive at once is limited.

    A partly frozen unit has two buffers, one for trained parameters and one for frozen ones.
    """
    buffers_of_a_unit = 2 if frozen else 1
    assert counters.whole_params.peak_count <= (1 + prefetch + tied) * buffers_of_a_unit
    assert counters.whole_grads.peak_count <= (2 if prefetch else 1)
    assert counters.whole_params.count == counters.whole_grads.count == 0


def flags_for(
    strategy: str, *, world_size: int, more: str = "", steps: int = FEW_STEPS, model: str = TINY
) -> str:
    return (
        f"{model} {ADAM_EPS} --train-iters {steps} --global-batch-size {SAMPLES} "
        f"--micro-batch-size {SAMPLES // (world_size * MICRO_BATCHES)} "
        f"--paro-strategy {strategy} {more}"
    )


@cache
def alone(more: str, frozen: Frozen, steps: int, model: str) -> Trained:
    return train(flags_for("GGG", world_size=1, more=more, steps=steps, model=model), frozen=frozen)


def reference_for(
    more: str = "", frozen: Frozen = (), steps: int = FEW_STEPS, model: str = TINY
) -> Trained:
    """One process trained under the flags that change the computation."""
    return alone(computation(more), frozen, steps, model)


def computation(more: str) -> str:
    """The flags that change what is computed, and not where or how."""
    return re.sub(r"--(paro|recompute|torch-compile)\S*( (?!--)\S+)*", "", more).strip()


def compared(
    world_size: int,
    group_size: int,
    variants: Sequence[Variant],
    steps: int = FEW_STEPS,
    model: str = TINY,
    trains: Callable[[Sequence[Case], int], list[Trained]] = train_cases,
) -> Iterator[tuple[Variant, str, int, Trained]]:
    """Trains the variants; gives every rank's run of each with its flags once it is as alone."""
    cases = [
        (flags_for(name, world_size=world_size, more=more, steps=steps, model=model), frozen)
        for name, more, frozen in variants
    ]
    timeout = 900 if steps == FEW_STEPS else 3600
    results = run_ranks(trains, world_size, cases, group_size, timeout=timeout)
    for number, variant in enumerate(variants):
        _, more, frozen = variant
        reference = reference_for(more, frozen, steps, model)
        for rank, by_rank in enumerate(results):
            allowed = FP32
            if "--bf16" in more or "--fp16" in more:
                allowed = BF16_MUON if MUON in more else BF16
            assert_same(by_rank[number], reference, f"{variant} on {world_size}", allowed)
            yield variant, cases[number][0], rank, by_rank[number]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "group_size", "letters"), [(4, 2, CHOSEN), (6, 3, ("IIG",))]
)
def test_strategies_train_as_one_process_does(
    world_size: int, group_size: int, letters: tuple[str, ...]
) -> None:
    """Averaged weights are those of one process, too, and add no byte to what is sent."""
    variants = [(name, f"{AVERAGED} {TWO}", ()) for name in letters]
    for _, flags, _, trained in compared(world_size, group_size, variants):
        assert any(name.startswith("ema.") for name in trained.parameters)
        assert_formulas(trained, flags, world_size, group_size)
        assert_few_buffers(trained.counters, prefetch=1, tied=False)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "group_size", "variants"),
    [
        pytest.param(4, 2, [(n, "") for n in legal_letters()], marks=pytest.mark.verify),
        (
            4,
            2,
            [
                ("1,2,4", "--muon-nesterov --group-query-attention --num-query-groups 1"),
                ("IIG", f"{TIED} {AVERAGED}"),
                ("GGG", f"{MODERN} --paro-collective ho-ring"),
                ("NIG", f"--grad-reduce-in-bf16 --bf16 {AVERAGED} {LAST}"),
            ],
        ),
        pytest.param(
            6, 3, [("IIG", ""), ("GGG", ""), ("III", ""), ("NNG", "")], marks=pytest.mark.verify
        ),
        (6, 2, [("2,2,6", "--paro-prefetch-units 2 --paro-updated-ahead 3")]),
        pytest.param(
            8,
            2,
            [
                ("IIG", f"{FIVE} --paro-collective ho-ring"),
                ("2,2,4", f"{FIVE} --group-query-attention --num-query-groups 1"),
            ],
            marks=pytest.mark.verify,
        ),
    ],
)
def test_muon_trains_as_one_process_does_and_sends_the_bytes_of_the_formula(
    world_size: int, group_size: int, variants: list[tuple[str, str]]
) -> None:
    all_by_muon = [(name, f"{MUON} {more}", ()) for name, more in variants]
    states: dict[str, int] = {}
    for _, flags, rank, trained in compared(world_size, group_size, all_by_muon):
        assert_formulas(trained, flags, world_size, group_size, rank)
        assert trained.model_state_bytes == states.setdefault(flags, trained.model_state_bytes)


@pytest.mark.ranks
def test_moments_in_bf16_are_rounded_as_one_process_does() -> None:
    """A moment apart by rounding in fp32 is now and then rounded to the other side."""
    rounded = Allowed(movement=5e-4, scalar=2e-6)
    more = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
    cases = [(flags_for(name, world_size=4, more=more, steps=3), ()) for name in ("IIG", "GNG")]
    results = run_ranks(train_cases, 4, cases, 2)
    exact, reference = reference_for(steps=3), reference_for(more, steps=3)
    for trained in results[0]:
        assert_same(trained, reference, more, rounded)
        assert trained.model_state_bytes < exact.model_state_bytes
    assert margin_between(exact, reference, rounded, "not rounded").ratio > 2


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "group_size", "variants"),
    [
        (
            4,
            2,
            [
                ("IIG", f"{TWO} --paro-prefetch-units 0", FROZEN),
                ("GGG", f"{TIED} {TWO} --paro-collective flat", ()),
                ("IGG", "--recompute-granularity full --recompute-num-layers 2", ()),
                ("NIG", f"{TWO} --calculate-per-token-loss", ()),
                ("ING", LAST, ()),
                ("GIG", f"{BASE_BF16} {TWO}", ()),
                ("GGG", f"{DROPPING} {TWO} --recompute-granularity full", ()),
                ("IGG", MODERN, ("blocks.0.bq", "blocks.1.wk", "blocks.2.k_norm")),
            ],
        ),
        # Two ranks, for each traces a model of its own; recomputed, ranks that share samples do.
        pytest.param(
            2,
            1,
            [
                ("GGG", COMPILED, FROZEN),
                ("NIG", f"{COMPILED} {MODERN} --recompute-granularity full", ()),
            ],
            marks=pytest.mark.verify,
        ),
        (8, 4, [("1,2,8", "--paro-prefetch-units 2 --paro-updated-ahead 3", ())]),
    ],
)
def test_variants_train_as_one_process_does(
    world_size: int, group_size: int, variants: list[Variant]
) -> None:
    for (_, more, _), flags, _, trained in compared(world_size, group_size, variants):
        if more.startswith((LAST, LORA)):
            assert_formulas(trained, flags, world_size, group_size)


def test_reference_is_a_real_descent() -> None:
    losses = [step.loss for step in reference_for(steps=6).steps]
    assert losses[0] == pytest.approx(math.log(60), rel=0.1)
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.verify
@pytest.mark.timeout(3600)
@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "group_size"), SHAPES)
def test_all_strategies_on_all_worlds(world_size: int, group_size: int) -> None:
    degrees = {8: ("2,4,8", "1,2,8", "2,2,4"), 6: ("1,3,6",), 4: ("2,4,4",)}.get(world_size, ())
    if group_size == 2 and world_size == 6:
        degrees = ("2,2,6",)
    strategies = (*legal_letters(), *degrees)
    drawn = Random(8 * world_size + group_size).sample(strategies, 6)
    many = strategies if world_size == 4 else drawn
    compiled = "--torch-compile inductor" if (world_size, group_size) == (2, 1) else COMPILED
    by_variant: list[tuple[str, Frozen, Sequence[str]]] = [
        ("", (), strategies),
        ("", FROZEN, many),
        (TIED, (), many),
        (LAST, (), many),
        (DROPPING, (), many),
        (compiled, FROZEN, drawn),  # each rank compiles for seconds
    ]
    for more, frozen, names in by_variant:
        variants = [(name, more, frozen) for name in names]
        tied, parts = more == TIED, bool(frozen) or more == DROPPING
        for _, flags, _, trained in compared(world_size, group_size, variants, MANY_STEPS):
            assert_few_buffers(trained.counters, prefetch=1, tied=tied, frozen=parts)
            if not frozen:
                assert_formulas(trained, flags, world_size, group_size)


PIPELINE = "pipeline"  # ho-ring as it runs under nccl


def train_in_chunks(cases: Sequence[Case], group_size: int) -> list[Trained]:
    """Trains each with shards cut into chunks, as the shards of a real model are."""
    choice = AlgorithmChoice(names=("ho-ring",), num_chunks=lambda *_: 3)
    trained = []
    for flags, _ in cases:
        with (
            mock.patch.object(schedule, "_CHUNK_BYTES", 1024),
            mock.patch.object(schedule, "_LEAST_CHUNK_BYTES", 128),
            mock.patch.object(assembly, "choice_of", return_value=choice)
            if PIPELINE in flags
            else nullcontext(),
        ):
            trained.append(train(flags.replace(PIPELINE, "ho-ring"), group_size=group_size))
    return trained


def check(pairs: Sequence[tuple[str, str]], world_size: int, *, steps: int, times: int = 1) -> None:
    """In two groups; trained several times, all have the same bits."""
    variants = [(strategy, f"--paro-collective {name}", ()) for strategy, name in pairs]
    group_size = world_size // 2
    runs = (
        compared(world_size, group_size, variants, steps, trains=train_in_chunks)
        for _ in range(times)
    )
    for ((_, more, _), flags, _, trained), *others in zip(*runs, strict=True):
        for *_, again in others:
            assert [one.loss for one in trained.steps] == [one.loss for one in again.steps]
            for name, parameter in trained.parameters.items():
                assert torch.equal(parameter, again.parameters[name]), f"{flags}: {name}"
        if not more.endswith(" ring"):  # whose last rank of a group sends all bytes between groups
            flags = flags.replace(PIPELINE, "ho-ring")
            assert_formulas(trained, flags, world_size, group_size)


@pytest.mark.ranks
def test_one_of_each_collective() -> None:
    crossing_both = [("NIG", "ho-ring"), ("IGG", "h-ring"), ("NNG", "ring"), ("IIG", PIPELINE)]
    check(crossing_both, 4, steps=2)


@pytest.mark.ranks
def test_collectives_chosen_by_size(tmp_path: Path) -> None:
    machine = measured_machine(h_ring=(1e-3, 1e-1), ho_ring=(2e-3, 5e-2), native=(3e-3, 1e-3))
    (tmp_path / "machine.json").write_text(machine_to_json(machine))
    auto = f"--paro-collective auto --paro-machine {tmp_path / 'machine.json'}"
    assert len([*compared(4, 2, [("GGG", auto, ())], 3)]) == 4


@pytest.mark.verify
@pytest.mark.ranks
@pytest.mark.parametrize("collective", [*ALGORITHMS, PIPELINE])
def test_all_strategies_by_one_collective(collective: str) -> None:
    pairs = [(strategy, collective) for strategy in legal_letters()]
    check(pairs, 8, steps=MANY_STEPS, times=2)
