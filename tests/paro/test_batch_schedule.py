"""Batch sizes, micro-batch counts and the way between iterations and samples."""

import pytest

from paro.batch_schedule import BatchSchedule


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
    # Starts: 0 8 16 24 | 32 48 | 64 88 | 112 and from there on by 32.
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
    ("sizes", "rampup", "parts"),
    [
        (
            {"global_batch_size": 36},
            None,
            ["size 36", "4 ranks (= 8): choose 32 or 40"],
        ),
        ({"global_batch_size": 7}, None, ["--global-batch-size 7", "(= 8): choose 8"]),
        ({"micro_batch_size": 0}, None, ["--micro-batch-size 0"]),
        ({"global_batch_size": 0}, None, ["--global-batch-size 0"]),
        ({}, (40, 8, 96), ["starts above", "32"]),
        ({}, (8, 16, 96), ["cannot reach", "steps of 16"]),
        ({}, (8, 12, 96), ["INCREMENT 12", "choose 8 or 16"]),
        ({}, (12, 4, 96), ["START 12", "choose 8 or 16"]),
        ({}, (8, 0, 96), ["at least 1"]),
        ({}, (8, 8, -1), ["at least 0"]),
    ],
)
def test_sizes_that_do_not_divide_are_refused(
    sizes: dict[str, int], rampup: tuple[int, int, int] | None, parts: list[str]
) -> None:
    with pytest.raises(ValueError, match="--") as error:
        make(rampup, **sizes)
    for part in parts:
        assert part in str(error.value)
