"""Quantized gradients: the bits of the arithmetic on every replica, exact bytes, errors."""

from __future__ import annotations

import math
from functools import partial
from unittest.mock import patch

import pytest

from paro.launch.dry_run import predict_run
from paro.precision import PrecisionConfig
from paro.training.step import FORGOTTEN_AFTER, Training
from tests.helpers.ranks import run_ranks
from tests.helpers.refusals import refused
from tests.helpers.training import train
from tests.paro.sharding.quantized_runs import quantized_flags, quantized_run

GRADS = "--paro-inter-grad-bits"
EIGHT = f"{GRADS} 8"
FEEDBACK = "--paro-inter-grad-error-feedback"


AUTO, LOCAL = "--paro-inter-bits auto", "--non-persistent-ckpt-type local"


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (f"{EIGHT} --accumulate-allreduce-grads-in-fp32", "contradict each other"),
        (f"{EIGHT} --paro-inter-bits auto", "--paro-inter-grad-bits 8 contradict each other"),
        (f"{AUTO} --accumulate-allreduce-grads-in-fp32", "contradict each other"),
        (f"{EIGHT} --paro-inter-bits-warmup-iters -1", "--paro-inter-bits-warmup-iters -1"),
        (FEEDBACK, "give --paro-inter-grad-bits 8 or 4 too"),
        (f"{EIGHT} {FEEDBACK} --paro-survive 1 --paro-strategy III", "--paro-survive contradict"),
        (f"{EIGHT} {FEEDBACK} {LOCAL}", f"and {LOCAL} contradict each other"),
    ],
)
def test_bad_input_is_one_line(more: str, line: str) -> None:
    refused(lambda: quantized_run(more), line)
    fed_back = partial(PrecisionConfig, inter_grad_bits=4, inter_grad_error_feedback=True)
    refused(lambda: fed_back(compute="fp16"), "and --fp16 contradict each other")


@pytest.mark.parametrize("more", [f"{EIGHT} {FEEDBACK}", f"{AUTO} --paro-machine dgx-h100"])
def test_one_group_takes_16_bits_and_says_so(more: str) -> None:
    config = quantized_run(more, group_size=8)
    assert not config.precision.quantizes
    assert not config.precision.inter_grad_error_feedback
    (line,) = [line for line in config.notices if "without effect" in line]
    assert line.startswith(f"{' '.join(more.split()[:2])} without effect, 16 bits in use: ")
    assert "one group, of 8 ranks" in line


@pytest.mark.parametrize("strategy", ["IIG", "NNG", "NNN", "2,2,4"])
def test_a_dry_run_counts_the_buffers(strategy: str) -> None:
    bits = ("", "--paro-inter-param-bits 4", EIGHT, f"{EIGHT} {FEEDBACK}")
    plans = [predict_run(quantized_run(f"--paro-strategy {strategy} {more}")) for more in bits]
    none, of_params, of_grads, with_errors = (plan.memory.codes for plan in plans)
    updates = [unit.quantized_update for unit in plans[1].training.model.units]
    assert none == 0 < of_grads
    assert of_params == sum(update.quantized.nbytes for update in updates if update is not None)
    assert (of_params > 0) is (strategy != "NNN")
    assert (plans[1].memory.total > plans[0].memory.total) is (of_params > 0)
    units = plans[3].training.model.trainable_units
    errors = sum(unit.grad_errors.nbytes for unit in units if unit.grad_errors is not None)
    assert with_errors - of_grads == errors > 0


def forget(flags: str, group_size: int, after: int = FORGOTTEN_AFTER) -> list[bool]:
    """After each step whether something is remembered; the second one's gradients are infinite."""
    remembered: list[bool] = []

    def before(training: Training) -> None:
        begin, finish = training.model.begin_step, training.model.finish_grad_sync

        def begin_step(num_micro_batches: int, **how: bool) -> None:
            remembered.append(_remembers(training))
            begin(num_micro_batches, **how)

        def finish_grad_sync() -> None:
            finish()
            if len(remembered) == 2:
                training.model.trainable_units[0].optim_grad[0] = math.inf

        training.model.begin_step = begin_step  # type: ignore[method-assign]
        training.model.finish_grad_sync = finish_grad_sync  # type: ignore[method-assign]

    with patch("paro.training.step.FORGOTTEN_AFTER", after):
        train(flags, group_size=group_size, before=before)
    return remembered


def _remembers(training: Training) -> bool:
    return all(
        unit.grad_errors.any() for unit in training.model.units if unit.grad_errors is not None
    )


@pytest.mark.ranks
def test_skipped_steps_and_time_make_ranks_forget() -> None:
    (flags,) = quantized_flags([("IIG", 4, f"{FEEDBACK} --train-iters 5")], 12)
    assert run_ranks(forget, 2, flags, 1)[0] == [False, True, False, True, True]
    assert run_ranks(forget, 2, flags, 1, after=4)[0] == [False, True, False, True, False]
