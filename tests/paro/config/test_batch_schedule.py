"""Batch sizes, micro-batch counts, and conversion between iterations and samples."""

import pytest

from paro.config.batch_schedule import BatchSchedule, parse_steps
from tests.helpers.refusals import refused


def make(rampup: tuple[int, int, int] | None = None, **sizes: int) -> BatchSchedule:
    values = {"micro_batch_size": 2, "global_batch_size": 32, "data_parallel_size": 4} | sizes
    return BatchSchedule(**values, rampup_batch_size=rampup)


# 8 -> 32 in three steps of 8 over 96 samples: each size lasts for 32 samples.
RAMP = (8, 8, 96)


def test_constant_batch() -> None:
    schedule = make()
    assert schedule.batch_size_at(0) == schedule.batch_size_at(10**9) == 32
    assert schedule.num_micro_batches_at(0) == 4
    assert schedule.samples_after(5) == 160
    assert schedule.iterations_within(191) == 5


@pytest.mark.parametrize(
    ("consumed", "size"), [(0, 8), (31, 8), (32, 16), (63, 16), (64, 24), (95, 24), (96, 32)]
)
def test_batch_grows_in_equal_steps(consumed: int, size: int) -> None:
    assert make(RAMP).batch_size_at(consumed) == size
    assert make(RAMP).num_micro_batches_at(consumed) == size // 8


def test_iterations_and_samples_agree_along_the_ramp() -> None:
    schedule = make(RAMP)
    # Starts: 0 8 16 24 | 32 48 | 64 88 | 112 and then steps of 32.
    starts = [0, 8, 16, 24, 32, 48, 64, 88, 112, 144]
    assert [schedule.samples_after(i) for i in range(10)] == starts
    assert [schedule.iterations_within(samples) for samples in starts] == list(range(10))


@pytest.mark.parametrize(
    ("samples", "iterations"), [(7, 0), (47, 4), (111, 7), (143, 8), (144 + 31, 9)]
)
def test_a_partial_last_batch_is_left_out(samples: int, iterations: int) -> None:
    assert make(RAMP).iterations_within(samples) == iterations


def test_what_is_left_counts_from_what_is_consumed() -> None:
    schedule = make(RAMP)
    assert [schedule.iterations_within(144, start) for start in (32, 50, 112, 144, 999)] == [
        *(5, 3, 1, 0, 0)
    ]


@pytest.mark.parametrize("rampup", [(32, 8, 100), (8, 8, 0)])
def test_a_ramp_without_length_is_none(rampup: tuple[int, int, int]) -> None:
    schedule = make(rampup)
    assert schedule.batch_size_at(0) == 32
    assert schedule.samples_after(3) == 96
    assert schedule.iterations_within(96) == 3


@pytest.mark.parametrize(
    ("sizes", "rampup", "told"),
    [
        ({"global_batch_size": 36}, None, "36 ... 4 data-parallel ranks (= 8): choose 32 or 40"),
        ({"global_batch_size": 7}, None, "--global-batch-size 7 ... (= 8): choose 8"),
        ({"micro_batch_size": 0}, None, "--micro-batch-size 0"),
        ({"global_batch_size": 0}, None, "--global-batch-size 0"),
        ({"eval_micro_batch_size": 3}, None, "--eval-global-batch-size 32 is not divisible"),
        ({}, (40, 8, 96), "starts above ... 32"),
        ({}, (8, 16, 96), "cannot reach ... steps of 16"),
        ({}, (8, 12, 96), "INCREMENT 12 ... choose 8 or 16"),
        ({}, (12, 4, 96), "START 12 ... choose 8 or 16"),
        ({}, (8, 0, 96), "at least 1"),
        ({}, (8, 8, -1), "at least 0"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(
    sizes: dict[str, int], rampup: tuple[int, int, int] | None, told: str
) -> None:
    refused(lambda: make(rampup, **sizes).check_from(0), told)


@pytest.mark.parametrize(
    ("rampup", "consumed", "told"),
    [
        ((12, 4, 80), 0, "START 12"),
        ((12, 4, 80), 79, "the size 28"),
        ((12, 4, 80), 80, None),  # the ramp-up is past
        ((8, 12, 96), 0, "INCREMENT 12"),
        ((8, 12, 96), 96, None),
        ((8, 8, 96), 0, None),
        ((32, 12, 96), 0, None),
    ],
)
def test_sizes_of_a_ramp_that_are_past_need_not_divide(
    rampup: tuple[int, int, int], consumed: int, told: str | None
) -> None:
    """The number of ranks may have changed since."""
    if told is None:
        make(rampup).check_from(consumed)
    else:
        refused(lambda: make(rampup).check_from(consumed), f"{told} is no multiple")


# --step-batch-size-schedule: 8 samples at first, 24 after 40, 16 after 100.
STEPS = ((0, 8), (40, 24), (100, 16))


def make_steps(steps: tuple[tuple[int, int], ...] = STEPS, **sizes: int) -> BatchSchedule:
    values = {"micro_batch_size": 2, "global_batch_size": steps[-1][1], "data_parallel_size": 4}
    return BatchSchedule(**(values | sizes), step_batch_size_schedule=steps)


@pytest.mark.parametrize(
    ("consumed", "size"), [(0, 8), (39, 8), (40, 24), (99, 24), (100, 16), (10**9, 16)]
)
def test_each_size_begins_where_the_schedule_says(consumed: int, size: int) -> None:
    assert make_steps().batch_size_at(consumed) == size
    assert make_steps().num_micro_batches_at(consumed) == size // 8
    assert make_steps().most_micro_batches == 3


def test_iterations_and_samples_agree_along_the_steps() -> None:
    schedule = make_steps()
    # An iteration that begins below 100 keeps its size until its end: 88 to 112.
    starts = [0, 8, 16, 24, 32, 40, 64, 88, 112, 128, 144]
    assert [schedule.samples_after(i) for i in range(11)] == starts
    assert [schedule.iterations_within(samples) for samples in starts] == list(range(11))
    assert [schedule.iterations_within(samples) for samples in (7, 63, 111, 127)] == [0, 5, 7, 8]
    assert schedule.samples_after(2, consumed=88) == 128
    assert schedule.iterations_within(128, consumed=88) == 2


def test_the_way_through_a_long_schedule_is_not_walked() -> None:
    steps = parse_steps("0:8 1T:16", seq_length=1)
    schedule = make_steps(steps)
    assert schedule.samples_after(10**12) == 10**12 + (10**12 - 10**12 // 8) * 16
    assert schedule.iterations_within(10**12 + 16) == 10**12 // 8 + 1


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
        ("1M:8", "has no size to begin with"),
        ("0:8 16", "'16' is not TOKENS:SIZE"),
        ("0:8 1X:16", "'1X' in '1X:16' is no number such as 768"),
        ("0:8 -1:16", "'-1' in '-1:16' is no number"),
        ("0:nan", "is no number"),
        ("0:8 1T:inf", "is no number"),
        ("0:0", "every size must be at least 1"),
        ("0:8 100:16 150:24", "16 and 24 begin at the same sample, 1, of 100 tokens"),
    ],
)
def test_a_schedule_that_cannot_be_read_is_refused(text: str, message: str) -> None:
    refused(lambda: parse_steps(text, 100), f"--step-batch-size-schedule ... {message}")


def test_sizes_before_a_resume_need_not_divide() -> None:
    schedule = make_steps(((0, 4), (40, 24), (100, 16)))
    schedule.check_from(40)
    refused(lambda: schedule.check_from(39), "the size 4 ... --micro-batch-size 2")
    uneven = make_steps(((0, 8), (40, 12), (100, 16)))
    refused(lambda: uneven.check_from(0), "the size 12 is no multiple")


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, (32, 2, 4)),
        ({"eval_global_batch_size": 64}, (64, 2, 8)),
        ({"eval_micro_batch_size": 4}, (32, 4, 2)),
        ({"eval_global_batch_size": 8, "eval_micro_batch_size": 1}, (8, 1, 2)),
    ],
)
def test_evaluations_have_batches_of_their_own(
    sizes: dict[str, int], expected: tuple[int, int, int]
) -> None:
    for rampup in (None, RAMP):
        made = make(rampup, **sizes)
        found = (made.eval_batch, made.eval_micro_batch, made.num_eval_micro_batches)
        assert found == expected
    assert make_steps().eval_batch == 16
