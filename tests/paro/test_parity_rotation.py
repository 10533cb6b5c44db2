"""Rotation trains like one process, sends the bytes of the formula and holds few slices."""

from __future__ import annotations

import pytest

from paro.layout import chunk_numel
from tests.helpers.training import Trained
from tests.paro.test_parity import (
    FEW_STEPS,
    FROZEN,
    LAST,
    MANY_STEPS,
    MICRO_BATCHES,
    MODERN,
    TIED,
    Variant,
    compared,
    counted,
)

# Feed-forward and vocabulary sizes that no number of ranks divides; heads for rings of every size.
MODEL = (
    "--distributed-backend gloo --mock-data --tokenizer-type NullTokenizer --vocab-size 59 "
    "--make-vocab-size-divisible-by 1 --num-layers 3 --hidden-size 20 --kv-channels 4 "
    "--ffn-hidden-size 37 --seq-length 12 --num-workers 0 --lr 0.002 "
    "--lr-decay-style constant --weight-decay 0.1 --init-method-std 0.1"
)
ROTATE = "--paro-materialize rotate"
GROUPED = "--group-query-attention --num-query-groups"
IN_PLACE = "--paro-rotate-in-place"
FULL, SELECTIVE = "--recompute-granularity full", "--recompute-granularity selective"
BELOW = ("embedding.weight", *(f"blocks.0.{n}" for n in ("attention_norm", "wq", "wk", "wv", "wo")))
LORA = "--lora-rank 3 --lora-alpha 6 --lora-dropout 0.3 --lora-target-modules"
BASE_BF16 = "--lora-base-dtype bf16"


def assert_formulas(trained: Trained, flags: str, world_size: int, group_size: int) -> None:
    units, expected = counted(flags, world_size, group_size)
    for step in trained.steps[1:]:
        assert step.sent == expected, flags
    if LAST in flags or LORA in flags:
        return
    # Three passes of every matrix, two of the embedding; four of a recomputed block.
    passes = {"embedding": 5 if TIED in flags else 2, "head": 3}
    blocks = 4 if FULL in flags else 3
    degree = group_size  # of every ring here
    each = (degree - 1) * MICRO_BATCHES * 4
    rotated = sum(
        passes.get(unit.name.partition(" ")[0], blocks) * unit.numel // degree * each
        for unit in units
        if not unit.replicated
    )
    norms = next(unit.numel for unit in units if unit.replicated)
    assert 0 <= expected.intra - rotated <= 2 * norms * 4, flags


def assert_few_slices(trained: Trained, flags: str) -> None:
    slices, one = trained.counters.slices, trained.slice_bytes
    in_place = IN_PLACE in flags
    # A slice of a single key/value head has no halves.
    room = 4 * 2 * chunk_numel(one // 4, 4, device_type="cpu") if GROUPED in flags else 0
    limit = one + room if in_place else 3 * one
    assert 0 < slices.peak_bytes <= limit, flags
    assert slices.count == slices.num_bytes == 0, flags
    counters = trained.counters
    assert counters.whole_params.peak_count == counters.whole_grads.peak_count == 0, flags


def check(
    world_size: int, group_size: int, heads: int, variants: list[Variant], steps: int = FEW_STEPS
) -> None:
    model = f"{MODEL} --num-attention-heads {heads}"
    rotating = [(name, f"{ROTATE} {more}", frozen) for name, more, frozen in variants]
    for (_, _, frozen), flags, _, trained in compared(
        world_size, group_size, rotating, steps, model
    ):
        assert_few_slices(trained, flags)
        if not frozen:
            assert_formulas(trained, flags, world_size, group_size)


@pytest.mark.ranks
def test_rings_in_groups_train_as_one_process_does() -> None:
    cases: list[Variant] = [
        ("III", f"{IN_PLACE} {TIED} --num-layers 2 --ema-decay 0.7", ()),
        ("IIG", f"{MODERN} {FULL} --num-layers 2", ()),
        ("IIG", f"{LORA} all-linear {FULL} --num-layers 2", ()),
    ]
    check(4, 2, 4, cases)


@pytest.mark.ranks
def test_a_ring_of_all_ranks_trains_as_one_process_does() -> None:
    cases: list[Variant] = [
        ("GGG", f"{GROUPED} 3 {SELECTIVE} --num-layers 2 --paro-prefetch-units 0", BELOW),
        ("GGG", f"{MODERN} {FULL} --recompute-num-layers 2 {IN_PLACE}", ()),
    ]
    check(3, 3, 6, cases)


# Variants; they alternate between in place and out of place.
VARIANTS: list[tuple[str, tuple[str, ...]]] = [
    ("", ()),
    (f"{GROUPED} {{groups}}", ()),
    (TIED, ()),
    (FULL, ()),
    (f"{FULL} --recompute-num-layers 2", ()),
    (MODERN, ("blocks.0.bq", "blocks.1.wk", "blocks.2.k_norm")),
    (f"{GROUPED} {{groups}} {MODERN}", ()),
    ("", FROZEN),
    ("", BELOW),
    (LAST, ()),
    (f"{LORA} all-linear {FULL}", ()),
    (f"{LORA} q_proj,o_proj,up_proj {BASE_BF16}", ()),
    (f"{LORA} q_proj,down_proj {BASE_BF16}", ()),
    (f"{LORA} down_proj {GROUPED} {{groups}}", ()),
]


@pytest.mark.verify
@pytest.mark.timeout(3600)
@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["III", "IIG"])
@pytest.mark.parametrize(("world_size", "group_size"), [(8, 4), (8, 2), (6, 3)])
def test_all_rings_in_groups_train_as_one_process_does(
    world_size: int, group_size: int, strategy: str
) -> None:
    """Every variant under both strategies: in place under one and out of place under the other."""
    turn = strategy == "IIG"
    cases = [
        (strategy, place(more.format(groups=group_size), in_place=(number + turn) % 2 == 1), frozen)
        for number, (more, frozen) in enumerate(VARIANTS)
    ]
    check(world_size, group_size, 2 * group_size, cases, MANY_STEPS)


@pytest.mark.verify
@pytest.mark.timeout(3600)
@pytest.mark.ranks
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("size", [2, 4, 6, 8])
def test_all_rings_of_all_ranks_train_as_one_process_does(size: int, in_place: bool) -> None:
    several = f"{GROUPED} {size} {TIED} {FULL}"
    cases: list[Variant] = [
        ("GGG", place(more, in_place=in_place), frozen)
        for more, frozen in [("", ()), (several, ()), ("", FROZEN)]
    ]
    check(size, size, 2 * size, cases, MANY_STEPS)


def place(more: str, *, in_place: bool) -> str:
    return f"{more} {IN_PLACE if in_place else ''}".strip()
