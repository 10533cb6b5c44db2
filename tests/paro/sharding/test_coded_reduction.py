"""Gradients as codes: the bits of the arithmetic on every holder, exact bytes, and what is lost."""

from __future__ import annotations

import math

import pytest
import torch

from paro.arguments.parser import parse_args
from paro.config.run import RunConfig
from paro.distributed.world import World
from paro.errors import UserError
from paro.quantization.blocks import decode, encode
from paro.quantization.formats import BlockFormat
from paro.strategy import legal_letters
from paro.training.dry_run import plan_run
from tests.helpers.ranks import run_ranks
from tests.paro.sharding.coded_runs import FLAGS, Sum, check_sums, record_sums
from tests.paro.sharding.test_coded_update import DEGREES
from tests.paro.test_parity import assert_formulas

EIGHT = "--paro-inter-grad-bits 8"


def runs(cases: list[tuple[str, int, str]], micro_batch: int) -> list[str]:
    """The flags of runs, each a strategy, bits and more flags."""
    return [
        f"{FLAGS} --micro-batch-size {micro_batch} --paro-strategy {strategy} "
        f"--paro-inter-grad-bits {bits} {more}"
        for strategy, bits, more in cases
    ]


@pytest.mark.ranks
def test_sums_have_the_bits_of_the_arithmetic() -> None:
    """Owners alone (IIG), several owners (NNN), and the first steps in 16 bits."""
    warm = "--paro-inter-bits-warmup-iters 2"
    rings = "--paro-collective ho-ring"
    flags = runs([("IIG", 4, ""), ("NNN", 8, rings), ("IIG", 4, warm), ("IIG", 16, "")], 3)
    everyone = run_ranks(record_sums, 4, flags, 2)
    sums = [[rank[index][1] for rank in everyone] for index in range(len(flags))]
    trained = [run[0] for run in everyone[0]]
    assert check_sums(sums[0], 4) == 3 * 4  # of every unit in every step
    assert check_sums(sums[1], 8) == 3 * 4
    assert check_sums(sums[2], 4) == 4
    assert not any(sums[3])
    for index in (0, 1, 3):
        assert_formulas(trained[index], flags[index], 4, 2)
    norms = [[step.grad_norm for step in one.steps] for one in trained]
    assert norms[2][:2] == norms[3][:2]
    assert norms[2][2] != norms[3][2]
    assert norms[0] == pytest.approx(norms[3], rel=0.02)


@pytest.mark.verify
@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "group_size"), [(2, 1), (4, 2), (6, 2), (8, 2), (8, 4)])
@pytest.mark.parametrize("bits", [4, 8])
def test_all_strategies(world_size: int, group_size: int, bits: int) -> None:
    strategies = [*legal_letters(), *(DEGREES if (world_size, group_size) == (8, 2) else ())]
    names = ("native", "flat", "ring", "h-ring", "ho-ring")
    cases = [
        (
            text,
            bits,
            f"--paro-collective {names[index % len(names)]} --paro-inter-param-bits {bits}",
        )
        for index, text in enumerate(strategies)
    ]
    if group_size == 2:
        cases.append(("IIG", bits, "--paro-materialize rotate"))
    flags = runs(cases, 24 // world_size)
    everyone = run_ranks(record_sums, world_size, flags, group_size, timeout=900)
    for index, line in enumerate(flags):
        sums: list[list[Sum]] = [rank[index][1] for rank in everyone]
        num_sums = check_sums(sums, bits)
        if "G" not in cases[index][0][1] and group_size > 1:
            assert num_sums >= 6, line
        if "flat" not in line and "--paro-collective ring" not in line and "rotate" not in line:
            assert_formulas(everyone[0][index][0], line, world_size, group_size)


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so(wrong: float) -> None:
    """The scale carries it, so the norm of the sum is not finite and the step is skipped."""
    for bits in (4, 8):
        form, values = BlockFormat(bits=bits, block=128), torch.zeros(300)
        values[150] = wrong
        out = torch.zeros(form.num_bytes(300), dtype=torch.uint8)
        encode(values, form, out, transforms=True)
        ((_, back),) = decode(out, form, 300)
        assert back[:128].isfinite().all()
        assert not back[128:256].isfinite().any()
        assert not math.isfinite(float(back.norm()))


AUTO = "--paro-inter-bits auto"


def configured(more: str, *, group_size: int = 2) -> RunConfig:
    words = f"{FLAGS} --micro-batch-size 1 --paro-group-size {group_size} {more}"
    return RunConfig.from_args(parse_args(words.split()), World(size=8, ranks_per_node=2))


@pytest.mark.parametrize(
    ("more", "group_size", "line"),
    [
        (EIGHT, 8, "--paro-inter-grad-bits 8: all 8 ranks are one group"),
        (f"{EIGHT} --accumulate-allreduce-grads-in-fp32", 2, "contradict each other"),
        (f"{EIGHT} --paro-inter-bits auto", 2, "--paro-inter-grad-bits 8 contradict each other"),
        (AUTO, 2, "--paro-inter-bits auto plans for a machine: give --paro-machine"),
        (AUTO, 8, "--paro-inter-bits auto: all 8 ranks are one group"),
        (f"{AUTO} --accumulate-allreduce-grads-in-fp32", 2, "contradict each other"),
    ],
)
def test_bad_input_is_one_line(more: str, group_size: int, line: str) -> None:
    with pytest.raises(UserError, match=line):
        configured(more, group_size=group_size)


@pytest.mark.parametrize(
    ("strategy", "line"),
    [
        ("IGG", "under IGG gradients cross groups in every micro-batch, in 16 bits; IIG sends"),
        ("III", None),
        ("NNN", None),
    ],
)
def test_what_stays_in_16_bits_is_said(strategy: str, line: str | None) -> None:
    notices = configured(f"{EIGHT} --paro-strategy {strategy}").notices
    said = [notice for notice in notices if EIGHT in notice]
    assert len(said) == (line is not None)
    assert line is None or line in said[0]


def test_a_dry_run_counts_the_buffers() -> None:
    world = World(size=8, ranks_per_node=2)
    codes = [
        plan_run(configured(f"--paro-strategy IIG {more}"), world).memory.codes
        for more in ("", EIGHT)
    ]
    assert codes[0] == 0 < codes[1]
