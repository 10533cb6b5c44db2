"""Gradients as codes: the bits of the arithmetic on every holder, exact bytes, and what is lost."""

from __future__ import annotations

import math
from functools import partial
from unittest.mock import patch

import pytest
import torch

from paro.precision import PrecisionConfig
from paro.quantization.blocks import decode, encode
from paro.quantization.formats import BlockFormat
from paro.strategy import legal_letters
from paro.training.dry_run import plan_run
from paro.training.step import FORGOTTEN_AFTER, Training
from tests.helpers.ranks import run_ranks
from tests.helpers.refusals import refused
from tests.helpers.training import train
from tests.paro.sharding.coded_runs import Sum, check_sums, coded_flags, coded_run, record_sums
from tests.paro.sharding.test_coded_update import DEGREES
from tests.paro.test_parity import assert_formulas

GRADS = "--paro-inter-grad-bits"
EIGHT = f"{GRADS} 8"
FEEDBACK = "--paro-inter-grad-error-feedback"


@pytest.mark.ranks
def test_sums_have_the_bits_of_the_arithmetic() -> None:
    """Owners alone (IIG), several owners (NNN), and the first steps in 16 bits."""
    warm = "--paro-inter-bits-warmup-iters 2"
    rings = "--paro-collective ho-ring"
    cases = [("IIG", 4, ""), ("NNN", 8, rings), ("IIG", 4, warm), ("IIG", 16, "")]
    flags = coded_flags(GRADS, [*cases, ("NII", 4, FEEDBACK)], 3)
    everyone = run_ranks(record_sums, 4, flags, 2)
    sums = [[rank[index][1] for rank in everyone] for index in range(len(flags))]
    trained = [run[0] for run in everyone[0]]
    assert check_sums(sums[0], 4) == 3 * 4  # of every unit in every step
    assert check_sums(sums[1], 8) == 3 * 4
    assert check_sums(sums[2], 4) == 4
    assert not any(sums[3])
    assert check_sums(sums[4], 4) == 3 * 4
    assert all(one.errors is not None for rank in sums[4] for one in rank)
    for index in (0, 1, 3, 4):
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
        rotate = "--paro-materialize rotate"
        cases += [("IIG", bits, rotate), ("IIG", bits, f"{rotate} {FEEDBACK}")]
    cases += [(name, bits, FEEDBACK) for name in ("IIG", "NII", "NNN")]
    flags = coded_flags(GRADS, cases, 24 // world_size)
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
        back = torch.zeros(300)
        decode(out, form, back)
        assert back[:128].isfinite().all()
        assert not back[128:256].isfinite().any()
        assert not math.isfinite(float(back.norm()))


AUTO, LOCAL = "--paro-inter-bits auto", "--non-persistent-ckpt-type local"


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (f"{EIGHT} --accumulate-allreduce-grads-in-fp32", "contradict each other"),
        (f"{EIGHT} --paro-inter-bits auto", "--paro-inter-grad-bits 8 contradict each other"),
        (f"{AUTO} --accumulate-allreduce-grads-in-fp32", "contradict each other"),
        (f"{EIGHT} --paro-inter-bits-warmup-iters -1", "-1 is negative"),
        (FEEDBACK, "give --paro-inter-grad-bits 8 or 4 too"),
        (f"{EIGHT} {FEEDBACK} --paro-survive 1 --paro-strategy III", "--paro-survive contradict"),
        (f"{EIGHT} {FEEDBACK} {LOCAL}", f"and {LOCAL} contradict each other"),
    ],
)
def test_bad_input_is_one_line(more: str, line: str) -> None:
    refused(lambda: coded_run(more), line)


@pytest.mark.parametrize(
    "more",
    [
        f"{EIGHT} {FEEDBACK}",
        "--paro-inter-param-bits 4",
        f"{AUTO} --paro-machine dgx-h100",
    ],
)
def test_one_group_takes_16_bits_and_says_so(more: str) -> None:
    config = coded_run(more, group_size=8)
    assert not config.precision.has_codes
    assert not config.precision.inter_grad_error_feedback
    (line,) = [line for line in config.notices if "without effect" in line]
    assert line.startswith(f"{' '.join(more.split()[:2])} without effect, 16 bits in use: ")
    assert "one group, of 8 ranks" in line


def test_feedback_needs_one_scale_of_the_loss() -> None:
    fed_back = partial(PrecisionConfig, inter_grad_bits=4, inter_grad_error_feedback=True)
    refused(lambda: fed_back(compute="fp16"), "and --fp16 contradict each other")


@pytest.mark.parametrize("strategy", ["IIG", "NNN", "2,2,4"])
def test_a_dry_run_counts_the_buffers(strategy: str) -> None:
    plans = [
        plan_run(coded_run(f"--paro-strategy {strategy} {more}"))
        for more in ("", EIGHT, f"{EIGHT} {FEEDBACK}")
    ]
    codes = [plan.memory.codes for plan in plans]
    assert codes[0] == 0 < codes[1]
    units = plans[2].training.model.trainable_units
    errors = sum(unit.grad_errors.nbytes for unit in units if unit.grad_errors is not None)
    assert codes[2] - codes[1] == errors > 0


def forget(flags: str, group_size: int, after: int = FORGOTTEN_AFTER) -> list[bool]:
    """After each step whether something is remembered; the second one's gradients are infinite."""
    remembered: list[bool] = []

    def before(training: Training) -> None:
        begin, finish = training.model.begin_step, training.model.finish_gradients

        def begin_step(num_micro_batches: int, *, full_precision: bool = False) -> None:
            remembered.append(_remembers(training))
            begin(num_micro_batches, full_precision=full_precision)

        def finish_gradients() -> None:
            finish()
            if len(remembered) == 2:
                training.model.trainable_units[0].optim_grad[0] = math.inf

        training.model.begin_step = begin_step  # type: ignore[method-assign]
        training.model.finish_gradients = finish_gradients  # type: ignore[method-assign]

    with patch("paro.training.step.FORGOTTEN_AFTER", after):
        train(flags, group_size=group_size, before=before)
    return remembered


def _remembers(training: Training) -> bool:
    return all(
        unit.grad_errors.any() for unit in training.model.units if unit.grad_errors is not None
    )


@pytest.mark.ranks
def test_skipped_steps_and_time_make_ranks_forget() -> None:
    (flags,) = coded_flags(GRADS, [("IIG", 4, f"{FEEDBACK} --train-iters 5")], 12)
    assert run_ranks(forget, 2, flags, 1)[0] == [False, True, False, True, True]
    assert run_ranks(forget, 2, flags, 1, after=4)[0] == [False, True, False, True, False]
