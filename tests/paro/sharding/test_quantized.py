"""Quantized updates and gradients: the bits of the arithmetic on every holder, and exact bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from paro.launch.dry_run import predict_run
from paro.precision import PrecisionConfig
from paro.quantization.formats import BlockFormat, RangeFormat
from paro.sharding.shards import QuantizedUpdate
from paro.strategy import legal_letters
from paro.training.step import FORGOTTEN_AFTER, Training
from tests.helpers.margins import assert_near
from tests.helpers.ranks import run_ranks
from tests.helpers.refusals import refused
from tests.helpers.training import train
from tests.paro.checkpoint.test_resharding import (
    Setting,
    load_and_go_on,
    save_and_go_on,
    save_and_load,
)
from tests.paro.sharding.quantized_runs import (
    SIZES,
    Recorded,
    check_sums,
    check_updates,
    quantized_flags,
    quantized_run,
    record_all,
)
from tests.paro.test_parity import assert_formulas

pytestmark = pytest.mark.bits

FOUR, EIGHT = "--paro-inter-param-bits 4", "--paro-inter-grad-bits 8"
FEEDBACK = "--paro-inter-grad-error-feedback"
REMEMBERED = f"--paro-inter-grad-bits 4 {FEEDBACK}"
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
    none, of_params, of_grads, with_errors = (plan.config.memory.quantized for plan in plans)
    updates = [unit.quantized_update for unit in plans[1].training.model.units]
    assert none == 0 < of_grads
    assert of_params == sum(update.quantized.nbytes for update in updates if update is not None)
    assert (of_params > 0) is (strategy != "NNN")
    assert (plans[1].config.memory.total > plans[0].config.memory.total) is (of_params > 0)
    units = plans[3].training.model.trainable_units
    errors = sum(unit.grad_errors.nbytes for unit in units if unit.grad_errors is not None)
    assert with_errors - of_grads == errors > 0


def remember(flags: str, limits: Sequence[int]) -> list[list[bool]]:
    """After each step whether something is remembered; the second one's gradients are infinite."""
    remembered: list[bool] = []

    def before(training: Training) -> None:
        begin, finish = training.model.begin_step, training.model.finish_grad_sync

        def begin_step(num_micro_batches: int, **how: bool) -> None:
            errors = [unit.grad_errors for unit in training.model.units]
            remembered.append(all(each.any() for each in errors if each is not None))
            begin(num_micro_batches, **how)

        def finish_grad_sync() -> None:
            finish()
            if len(remembered) == 2:
                training.model.trainable_units[0].optim_grad[0] = math.inf

        training.model.begin_step = begin_step  # type: ignore[method-assign]
        training.model.finish_grad_sync = finish_grad_sync  # type: ignore[method-assign]

    found = []
    for after in limits:
        remembered.clear()
        with patch("paro.training.step.FORGOTTEN_AFTER", after):
            train(flags, group_size=1, before=before)
        found.append([*remembered])
    return found


@pytest.mark.ranks
def test_skipped_steps_and_time_make_ranks_forget() -> None:
    (flags,) = quantized_flags([("IIG", 4, f"{FEEDBACK} --train-iters 5")], 12)
    late, soon = run_ranks(remember, 2, flags, (FORGOTTEN_AFTER, 4))[0]
    assert late == [False, True, False, True, True]
    assert soon == [False, True, False, True, False]


def ranges_of(numel: int, matrix_stop: int, *, bits: int = 4, number: int = 1) -> RangeFormat:
    return RangeFormat(
        form=BlockFormat(bits=bits, block=2048),
        numel=numel,
        slice_numel=numel * number,
        matrix_stop=matrix_stop,
        exact_bytes=2,
    )


def test_the_bytes_of_the_longest_range() -> None:
    num_bytes = {
        ranges_of(4096, 4096): 8 + 2048 + 8,  # a multiple of 16
        ranges_of(4096, 4096, bits=8): 8 + 4096 + 8,
        ranges_of(4096, 4000): 8 + 2000 + 2 * 96 + 8,
        ranges_of(4096, 2047): 2 * 4096,  # less than a block of matrices: all exact
        ranges_of(4096, 3 * 4096 + 2048, number=4): 4 + 1024 + 2 * 2048 + 12,  # last one longest
        ranges_of(4096, 3 * 4096, number=4): 2 * 4096,  # the last has no matrices
    }
    assert {ranges: ranges.range_bytes for ranges in num_bytes} == num_bytes


def test_what_is_not_sent_is_sent_later() -> None:
    """The parameters follow masters that stop changing, to within bf16's own rounding."""
    made, generator = ranges_of(5000, 4900), torch.Generator().manual_seed(3)
    master = torch.randn(5000, generator=generator)
    param = torch.zeros(5000, dtype=torch.bfloat16)
    quantized = torch.zeros(made.range_bytes, dtype=torch.uint8)
    update = QuantizedUpdate(made, quantized, param, start=0)
    left = [float(master.norm())]
    for _ in range(6):
        update.quantize(master, param, 0)
        sent = param.clone()
        update.apply()
        assert torch.equal(param, sent), "the owner has its own range at once"
        left.append(float((master - param.float())[:4900].norm()))
        assert torch.equal(param[4900:], master[4900:].bfloat16())
    assert left[1] < 0.2 * left[0]
    assert left[-1] < 1.5 * float((master - master.bfloat16().float()).norm())


@pytest.mark.ranks
def test_a_resumed_run_has_the_same_bits_and_remembers_quantization_errors(tmp_path: Path) -> None:
    more = f"{SIZES} {FOUR} {REMEMBERED} --paro-inter-bits-warmup-iters 0"
    setting = Setting(world_size=4, group_size=2, strategy="IIG", more=more)
    settings = [setting, setting, replace(setting, strategy="NII")]
    there, here, moved = run_ranks(save_and_load, 4, settings, tmp_path, asynchronous=True)[0]
    saved, loaded = there.states, here.states
    assert saved.keys() == loaded.keys()
    for name, values in saved.items():
        assert values.dtype == loaded[name].dtype
        assert torch.equal(values, loaded[name]), name
    sent = {name: values for name, values in saved.items() if name.startswith("sent.")}
    assert len(sent) == len([name for name in saved if name.startswith("param.")])
    rounded = [saved[name.replace("sent.", "param.")].bfloat16() for name in sent]
    assert not all(map(torch.equal, sent.values(), rounded)), "nothing was left to send"
    errors = [values for name, values in saved.items() if name.startswith("grad_errors.")]
    assert len(errors) == 4, "one for each unit"
    assert all(values.any() for values in errors)
    assert here.losses == there.losses
    forgotten = [v for name, v in moved.states.items() if name.startswith("grad_errors.")]
    assert len(forgotten) == 4
    assert not any(values.any() for values in forgotten)
    assert_near(moved.losses, there.losses, 5e-3, "without the errors of another strategy")


PAIRS = [
    ((6, 3, "IGG", FOUR), (4, 2, "IIG", "--paro-inter-param-bits 8")),
    ((4, 2, "NIG", FOUR), (4, 2, "IIG", "")),
    ((4, 2, "IIG", ""), (6, 2, "NNG", FOUR)),
    ((4, 2, "IIG", FOUR), (8, 2, "2,2,4", FOUR)),
]


@pytest.mark.verify
@pytest.mark.ranks
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_resumed_on_other_ranks_and_with_other_bits(
    tmp_path: Path, before: tuple[int, int, str, str], after: tuple[int, int, str, str]
) -> None:
    settings = [
        Setting(world_size=world, group_size=group, strategy=name, more=f"{SIZES} {more}")
        for world, group, name, more in (before, after)
    ]
    there = run_ranks(save_and_go_on, before[0], settings[0], tmp_path, asynchronous=False)
    here = run_ranks(load_and_go_on, after[0], settings[1], tmp_path)
    saved, loaded = there[0].states, here[0].states
    for name, values in loaded.items():
        source = saved.get(name)
        if source is None:  # saved by a run that sent exactly
            source = saved[name.replace("sent.", "param.")].bfloat16()
        assert torch.equal(values, source), name
    assert_near(here[0].losses, there[0].losses, 5e-3, f"{before} to {after}")


def recorded(flags: Sequence[str], world_size: int, group_size: int) -> list[list[Recorded]]:
    by_rank = run_ranks(record_all, world_size, flags, group_size, timeout=1800)
    return [[*run] for run in zip(*by_rank, strict=True)]


@pytest.mark.ranks
def test_every_holder_has_the_bits_of_the_arithmetic() -> None:
    """Owners alone (IIG), several owners (NNN), the first steps in 16 bits, and feedback."""
    warm, rings = "--paro-inter-bits-warmup-iters 1", "--paro-collective ho-ring"
    cases = [("IIG", 4, ""), ("IIG", 4, warm), ("IIG", 16, ""), ("NII", 4, FEEDBACK)]
    cases = [(name, bits, f"{more} --train-iters 2") for name, bits, more in cases]
    flags = quantized_flags([*cases, ("NNN", 8, f"{rings} --train-iters 2")], 3)
    runs = recorded(flags, 4, 2)
    bits, first = (4, 4, None, 4, 8), (0, 1, 0, 0, 0)
    updates = [check_updates(runs[n], bits[n], first=first[n]) for n in range(5)]
    assert updates == [2 * 4, 4, 0, 0, 0]  # of every unit in every step
    sums = [check_sums(run, number or 0) for run, number in zip(runs, bits, strict=True)]
    assert sums == [2 * 4, 4, 0, 2 * 4, 2 * 4]
    assert all(one.errors is not None for rank in runs[3] for one in rank.sums)
    for number in (0, 2, 3, 4):
        assert_formulas(runs[number][0].trained, flags[number], 4, 2)
    coded, warmed, exact, *_ = ([(s.loss, s.grad_norm) for s in r[0].trained.steps] for r in runs)
    assert warmed[0] == exact[0]
    assert (warmed[1][0], coded[0][0]) == (exact[1][0], exact[0][0])
    assert (warmed[1][1] != exact[1][1], coded[1][0] != exact[1][0]) == (True, True)
    assert_near(*([norm for _, norm in run] for run in (coded, exact)), 0.05, "norms of codes")


LETTERS = [letters for letters in legal_letters() if letters[0] != "G" and letters[2] == "G"]
SHAPES = [(2, 1), (4, 2), (6, 2), (8, 2), (8, 4)]  # world, group
DEGREES = ["1,2,8", "2,2,4", "2,4,8", "4,2,8", "1,1,4"]


@pytest.mark.verify
@pytest.mark.timeout(2400)
@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "group_size"), SHAPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_all_strategies(world_size: int, group_size: int, bits: int) -> None:
    """Each with two collectives, with all over all worlds."""
    names = ("native", "flat", "ring", "h-ring", "ho-ring")
    turn = SHAPES.index((world_size, group_size))
    strategies = [*legal_letters(), *(DEGREES if (world_size, group_size) == (8, 2) else ())]
    cases = [
        (text, bits, f"--paro-collective {names[(number + turn + more) % 5]}")
        for number, text in enumerate(strategies)
        for more in (0, 2)
    ]
    cases += [("IIG", bits, "--paro-prefetch-units 0")]
    cases += [(name, bits, FEEDBACK) for name in ("IIG", "NII", "NNN")]
    if group_size == 2:
        rotate = "--paro-materialize rotate"
        cases += [
            ("IIG", bits, f"{rotate} {more}") for more in ("", "--paro-rotate-in-place", FEEDBACK)
        ]
    flags = quantized_flags(cases, 24 // world_size)
    runs = recorded(flags, world_size, group_size)
    for (text, *_), line, run in zip(cases, flags, runs, strict=True):
        num_updates, num_sums = check_updates(run, bits), check_sums(run, bits)
        if group_size > 1 and "in-place" not in line:  # halves are small
            assert text not in LETTERS or num_updates >= 6, line
            assert "G" in text[1] or num_sums >= 6, line
        if "flat" not in line and "--paro-collective ring" not in line and "rotate" not in line:
            assert_formulas(run[0].trained, line, world_size, group_size)
