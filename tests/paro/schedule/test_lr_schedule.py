"""Every learning rate curve is Megatron's; batch sizes, micro-batch counts, and samples."""

from __future__ import annotations

import math
import warnings
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from paro.schedule.batch_schedule import BatchSchedule, parse_steps
from paro.schedule.lr_schedule import DECAY_STYLES, WSD_DECAY_STYLES, ScheduleConfig
from tests.helpers.refusals import refused

# 100 samples of warm-up, decay from there to sample 1100 (1000 samples), lr 1.0 down to 0.1.
BASE: dict[str, Any] = {
    "lr": 1.0,
    "min_lr": 0.1,
    "lr_decay_samples": 1100,
    "lr_warmup_samples": 100,
}


def make(**changes: Any) -> ScheduleConfig:
    return ScheduleConfig(**(BASE | changes))


def megatrons(config: ScheduleConfig) -> Any:
    """The scheduler of megatron-core, whose importing warns about missing packages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    return OptimizerParamScheduler(
        SimpleNamespace(param_groups=[]),
        init_lr=config.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.lr_warmup_samples,
        lr_decay_steps=config.lr_decay_samples,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.start_weight_decay,
        end_wd=config.end_weight_decay,
        wd_incr_steps=config.weight_decay_incr_samples,
        wd_incr_style=config.weight_decay_incr_style,
        wsd_decay_steps=config.lr_wsd_decay_samples,
        lr_wsd_decay_style=config.lr_wsd_decay_style,
    )


GROWS = {"start_weight_decay": 0.0, "end_weight_decay": 0.1, "weight_decay_incr_samples": 1000}
CURVES: list[dict[str, Any]] = [
    *({"lr_decay_style": style} for style in DECAY_STYLES if style != "WSD"),
    {"lr_decay_style": "inverse-square-root", "min_lr": 0.4},
    *(
        {"lr_decay_style": "WSD", "lr_wsd_decay_style": tail, "lr_wsd_decay_samples": 400}
        for tail in WSD_DECAY_STYLES
    ),
    *({"weight_decay_incr_style": style, **GROWS} for style in ("linear", "cosine")),
]


@pytest.mark.slow("imports megatron-core")
def test_rates_and_weight_decays_are_megatrons() -> None:
    for curve, warmup in product(CURVES, ({"lr_warmup_samples": 0}, {"lr_warmup_init": 0.2}, {})):
        schedule = make(**curve, **warmup)
        reference = megatrons(schedule)
        decoupled = make(**curve, **warmup, decoupled_lr=0.5, decoupled_min_lr=0.3)
        for reference.num_steps in (*range(0, 1200, 10), 101, 701, 1001, 1101, 10**6):
            at = reference.num_steps
            wanted = pytest.approx([reference.get_lr({}), reference.get_wd()], rel=1e-12, abs=1e-17)
            assert [schedule.lr_at(at), schedule.weight_decay_at(at)] == wanted, schedule
            of_group = reference.get_lr({"max_lr": 0.5, "min_lr": 0.3})
            assert decoupled.decoupled_lr_at(at) == pytest.approx(of_group, rel=1e-12), schedule
            assert (decoupled.lr_at(at), schedule.decoupled_lr_at(at)) == (schedule.lr_at(at), None)


def test_contradictions_name_their_flag() -> None:
    for changes, part in (
        ({"lr": math.nan}, "--lr nan"),
        ({"min_lr": -0.1}, "--min-lr -0.1"),
        ({"decoupled_lr": 0.05}, "--min-lr ... --decoupled-lr 0.05"),
        ({"decoupled_lr": 1.0, "decoupled_min_lr": 2.0}, "--decoupled-min-lr 2.0 ... 1.0"),
        ({"decoupled_min_lr": 0.0}, "--decoupled-min-lr 0.0 needs --decoupled-lr"),
        ({"lr_warmup_init": 1.5}, "--lr-warmup-init 1.5"),
        ({"lr_warmup_samples": 1100}, "--lr-warmup-iters"),
        ({"lr_decay_samples": 0}, "--lr-decay-iters"),
        ({"lr_decay_style": "WSD"}, "--lr-wsd-decay-iters"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_samples": 1200}, "1200 ... --lr-wsd-decay-iters"),
        ({"start_weight_decay": 0.2, "end_weight_decay": 0.1}, "--start-weight-decay"),
    ):
        refused(lambda changes=changes: make(**changes), part)


Ramp, Steps = tuple[int, int, int], tuple[tuple[int, int], ...]


def batches(rampup: Ramp | None = None, steps: Steps | None = None, **sizes: int) -> BatchSchedule:
    last = 32 if steps is None else steps[-1][1]
    values = {"micro_batch_size": 2, "global_batch_size": last, "data_parallel_size": 4} | sizes
    return BatchSchedule(**values, rampup_batch_size=rampup, step_batch_size_schedule=steps)


# 8 -> 32 in three steps of 8 over 96 samples: each size lasts for 32 samples.
RAMP = (8, 8, 96)
# --step-batch-size-schedule: 8 samples at first, 24 after 40, 16 after 100. An iteration that
# begins below 100 keeps its size until its end: 88 to 112.
STEPS = ((0, 8), (40, 24), (100, 16))
CONSTANT = ({0: 32, 10**9: 32}, [0, 32, 64, 96], {191: 5})


def test_sizes_iterations_and_samples_agree() -> None:
    """At numbers of samples; where iterations start; and with a last batch that is left out."""
    for schedule, sizes, starts, partial in (
        (batches(), *CONSTANT),
        (batches((32, 8, 100)), *CONSTANT),  # a ramp without length is none
        (batches((8, 8, 0)), *CONSTANT),
        (
            batches(RAMP),
            {0: 8, 31: 8, 32: 16, 63: 16, 64: 24, 95: 24, 96: 32},
            [0, 8, 16, 24, 32, 48, 64, 88, 112, 144],
            {7: 0, 47: 4, 111: 7, 143: 8, 144 + 31: 9},
        ),
        (
            batches(steps=STEPS),
            {0: 8, 39: 8, 40: 24, 99: 24, 100: 16, 10**9: 16},
            [0, 8, 16, 24, 32, 40, 64, 88, 112, 128, 144],
            {7: 0, 63: 5, 111: 7, 127: 8},
        ),
    ):
        assert {at: schedule.batch_size_at(at) for at in sizes} == sizes
        assert {at: 8 * schedule.num_micro_batches_at(at) for at in sizes} == sizes
        assert [schedule.samples_after(i) for i in range(len(starts))] == starts
        assert [schedule.iterations_within(samples) for samples in starts] == [*range(len(starts))]
        last = len(starts) - 1
        assert [schedule.samples_before(starts[-1], last - i) for i in range(len(starts))] == starts
        assert {samples: schedule.iterations_within(samples) for samples in partial} == partial


def test_what_is_left_counts_from_what_is_consumed() -> None:
    schedule, steps = batches(RAMP), batches(steps=STEPS)
    assert [schedule.iterations_within(144, start) for start in (32, 50, 112, 144, 999)] == [
        *(5, 3, 1, 0, 0)
    ]
    assert steps.samples_after(2, consumed=88) == 128
    assert steps.iterations_within(128, consumed=88) == 2
    assert steps.most_micro_batches == 3


def test_the_way_through_a_long_schedule_is_not_walked() -> None:
    schedule = batches(steps=parse_steps("0:8 1T:16", seq_length=1))
    assert schedule.samples_after(10**12) == 10**12 + (10**12 - 10**12 // 8) * 16
    assert schedule.iterations_within(10**12 + 16) == 10**12 // 8 + 1


def test_sizes_that_do_not_divide_are_refused() -> None:
    for sizes, rampup, message in (
        ({"global_batch_size": 36}, None, "36 ... 4 data-parallel ranks (= 8): choose 32 or 40"),
        ({"global_batch_size": 7}, None, "--global-batch-size 7 ... (= 8): choose 8"),
        ({"global_batch_size": 0}, None, "--global-batch-size 0"),
        ({"eval_micro_batch_size": 3}, None, "--eval-global-batch-size 32 is not divisible"),
        ({}, (40, 8, 96), "starts above ... 32"),
        ({}, (8, 16, 96), "cannot reach ... steps of 16"),
        ({}, (8, 12, 96), "INCREMENT 12 is no multiple ... choose 8 or 16"),
        ({}, (8, 0, 96), "at least 1"),
        ({}, (8, 8, -1), "at least 0"),
    ):
        refused(lambda sizes=sizes, rampup=rampup: batches(rampup, **sizes).check_from(0), message)


@pytest.mark.parametrize(
    ("schedule", "consumed", "message"),
    [
        (batches((12, 4, 80)), 79, "the size 28 is no multiple"),
        (batches((12, 4, 80)), 80, None),  # the ramp-up is past
        (batches((8, 12, 96)), 96, None),
        (batches(steps=((0, 4), (40, 24), (100, 16))), 39, "the size 4 ... --micro-batch-size 2"),
        (batches(steps=((0, 4), (40, 24), (100, 16))), 40, None),
        (batches(steps=((0, 8), (40, 12), (100, 16))), 0, "the size 12 is no multiple"),
    ],
)
def test_past_sizes_may_differ(schedule: BatchSchedule, consumed: int, message: str | None) -> None:
    """The number of ranks may have changed since."""
    if message is None:
        schedule.check_from(consumed)
    else:
        refused(lambda: schedule.check_from(consumed), message)


def test_tokens_become_samples_as_in_megatron() -> None:
    assert parse_steps("0:768 250B:1536,500B:3072", 4096) == (
        (0, 768),
        (250 * 10**9 // 4096, 1536),
        (500 * 10**9 // 4096, 3072),
    )
    assert parse_steps(" 1.5k:2K, 0:1 ", 100) == ((0, 1), (15, 2000))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no size to begin with: add 0:SIZE"),
        ("0:8 16", "'16' is not TOKENS:SIZE"),
        ("0:8 1X:16", "'1X' in '1X:16' is no number such as 768"),
        ("0:8 -1:16", "'-1' in '-1:16' is no number"),
        ("0:nan", "is no number"),
        ("0:0", "every size must be at least 1"),
        ("0:8 100:16 150:24", "16 and 24 begin at the same sample, 1, of 100 tokens"),
    ],
)
def test_a_schedule_that_cannot_be_read_is_refused(text: str, message: str) -> None:
    refused(lambda: parse_steps(text, 100), f"--step-batch-size-schedule ... {message}")


def test_batches_of_evaluations() -> None:
    for sizes, expected in (
        ({}, (32, 2, 4)),
        ({"eval_global_batch_size": 64}, (64, 2, 8)),
        ({"eval_micro_batch_size": 4}, (32, 4, 2)),
        ({"eval_global_batch_size": 8, "eval_micro_batch_size": 1}, (8, 1, 2)),
    ):
        for rampup in (None, RAMP):
            made = batches(rampup, **sizes)
            found = (made.eval_batch, made.eval_micro_batch, made.num_eval_micro_batches)
            assert found == expected
        assert batches(steps=STEPS).eval_batch == 16
