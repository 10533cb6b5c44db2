"""Batch sizes, micro-batch counts, and conversion between iterations and samples."""

import pytest

from paro.schedule.batch_schedule import BatchSchedule, parse_steps
from tests.helpers.refusals import refused

Ramp, Steps = tuple[int, int, int], tuple[tuple[int, int], ...]


def make(rampup: Ramp | None = None, steps: Steps | None = None, **sizes: int) -> BatchSchedule:
    last = 32 if steps is None else steps[-1][1]
    values = {"micro_batch_size": 2, "global_batch_size": last, "data_parallel_size": 4} | sizes
    return BatchSchedule(**values, rampup_batch_size=rampup, step_batch_size_schedule=steps)


# 8 -> 32 in three steps of 8 over 96 samples: each size lasts for 32 samples.
RAMP = (8, 8, 96)
# --step-batch-size-schedule: 8 samples at first, 24 after 40, 16 after 100. An iteration that
# begins below 100 keeps its size until its end: 88 to 112.
STEPS = ((0, 8), (40, 24), (100, 16))
CONSTANT = ({0: 32, 10**9: 32}, [0, 32, 64, 96], {191: 5})


@pytest.mark.parametrize(
    ("schedule", "sizes", "starts", "partial"),
    [
        (make(), *CONSTANT),
        (make((32, 8, 100)), *CONSTANT),  # a ramp without length is none
        (make((8, 8, 0)), *CONSTANT),
        (
            make(RAMP),
            {0: 8, 31: 8, 32: 16, 63: 16, 64: 24, 95: 24, 96: 32},
            [0, 8, 16, 24, 32, 48, 64, 88, 112, 144],
            {7: 0, 47: 4, 111: 7, 143: 8, 144 + 31: 9},
        ),
        (
            make(steps=STEPS),
            {0: 8, 39: 8, 40: 24, 99: 24, 100: 16, 10**9: 16},
            [0, 8, 16, 24, 32, 40, 64, 88, 112, 128, 144],
            {7: 0, 63: 5, 111: 7, 127: 8},
        ),
    ],
)
def test_sizes_iterations_and_samples_agree(
    schedule: BatchSchedule, sizes: dict[int, int], starts: list[int], partial: dict[int, int]
) -> None:
    """At numbers of samples; where iterations start; and with a last batch that is left out."""
    assert {at: schedule.batch_size_at(at) for at in sizes} == sizes
    assert {at: 8 * schedule.num_micro_batches_at(at) for at in sizes} == sizes
    assert [schedule.samples_after(i) for i in range(len(starts))] == starts
    assert [schedule.iterations_within(samples) for samples in starts] == [*range(len(starts))]
    assert {samples: schedule.iterations_within(samples) for samples in partial} == partial


def test_what_is_left_counts_from_what_is_consumed() -> None:
    schedule, steps = make(RAMP), make(steps=STEPS)
    assert [schedule.iterations_within(144, start) for start in (32, 50, 112, 144, 999)] == [
        *(5, 3, 1, 0, 0)
    ]
    assert steps.samples_after(2, consumed=88) == 128
    assert steps.iterations_within(128, consumed=88) == 2
    assert steps.most_micro_batches == 3


def test_the_way_through_a_long_schedule_is_not_walked() -> None:
    schedule = make(steps=parse_steps("0:8 1T:16", seq_length=1))
    assert schedule.samples_after(10**12) == 10**12 + (10**12 - 10**12 // 8) * 16
    assert schedule.iterations_within(10**12 + 16) == 10**12 // 8 + 1


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
        ({}, (8, 12, 96), "INCREMENT 12 is no multiple ... choose 8 or 16"),
        ({}, (12, 4, 96), "START 12 is no multiple ... choose 8 or 16"),
        ({}, (8, 0, 96), "at least 1"),
        ({}, (8, 8, -1), "at least 0"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(
    sizes: dict[str, int], rampup: Ramp | None, told: str
) -> None:
    refused(lambda: make(rampup, **sizes).check_from(0), told)


@pytest.mark.parametrize(
    ("schedule", "consumed", "told"),
    [
        (make((12, 4, 80)), 79, "the size 28 is no multiple"),
        (make((12, 4, 80)), 80, None),  # the ramp-up is past
        (make((8, 12, 96)), 96, None),
        (make((8, 8, 96)), 0, None),
        (make((32, 12, 96)), 0, None),
        (make(steps=((0, 4), (40, 24), (100, 16))), 39, "the size 4 ... --micro-batch-size 2"),
        (make(steps=((0, 4), (40, 24), (100, 16))), 40, None),
        (make(steps=((0, 8), (40, 12), (100, 16))), 0, "the size 12 is no multiple"),
    ],
)
def test_sizes_that_are_past_need_not_divide(
    schedule: BatchSchedule, consumed: int, told: str | None
) -> None:
    """The number of ranks may have changed since."""
    if told is None:
        schedule.check_from(consumed)
    else:
        refused(lambda: schedule.check_from(consumed), told)


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
    assert make(steps=STEPS).eval_batch == 16
