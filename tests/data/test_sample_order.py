"""Megatron's sample order: recorded vectors; and the splits of a corpus."""

from __future__ import annotations

import numpy as np
import pytest

from data.sample_order import (
    Bounds,
    OrderPlan,
    SampleOrder,
    Share,
    build_order,
    parse_split,
    split_bounds,
    split_matrix,
)
from tests.helpers.refusals import refused

SIZES = [5, 3, 7, 4, 6, 2]


def order_of(num_samples: int) -> tuple[OrderPlan, SampleOrder]:
    plan = OrderPlan(
        bounds=Bounds(0, len(SIZES)),
        tokens_per_epoch=sum(SIZES),
        num_samples=num_samples,
        seq_length=4,
        seed=1234,
    )
    return plan, build_order(np.array(SIZES, dtype=np.int32), plan)


def test_recorded_one_epoch() -> None:
    plan, order = order_of(6)
    assert plan.num_epochs == 1
    assert order.document_index.tolist() == [2, 1, 5, 0, 4, 3]
    assert order.sample_index.tolist() == [[0, 0], [0, 4], [1, 1], [3, 0], [3, 4], [4, 3], [5, 1]]
    assert order.shuffle_index.tolist() == [0, 4, 3, 2, 5, 1]


def test_recorded_final_epoch_apart() -> None:
    plan, order = order_of(9)
    assert plan.num_epochs == 2
    assert plan.samples_before_separate_epoch == 6
    assert order.document_index.tolist() == [2, 1, 5, 0, 4, 3, 0, 4, 3, 2, 5, 1]
    assert order.sample_index.tolist() == [
        [0, 0], [0, 4], [1, 1], [3, 0], [3, 4], [4, 3], [5, 1],
        [6, 1], [7, 0], [7, 4], [8, 2], [9, 2], [9, 6], [11, 1],
    ]  # fmt: skip
    assert order.shuffle_index.tolist() == [1, 0, 3, 2, 5, 4, 8, 9, 11, 7, 10, 12, 6]


def test_recorded_final_epoch_together() -> None:
    plan, order = order_of(12)
    assert plan.num_epochs == 2
    assert plan.samples_before_separate_epoch is None
    assert order.document_index.tolist() == [1, 2, 5, 2, 3, 4, 1, 0, 4, 5, 0, 3]
    assert order.shuffle_index.tolist() == [7, 11, 2, 3, 1, 9, 5, 4, 0, 8, 6, 10, 12]


def test_types_are_megatrons() -> None:
    _, order = order_of(6)
    assert [array.dtype.name for array in order] == ["int32", "int32", "uint32"]


def test_split_is_contiguous_and_rounded_half_to_even() -> None:
    shares = split_matrix("969, 30, 1")
    assert [split_bounds(share, 1000) for share in shares if share] == [
        (0, 969), (969, 999), (999, 1000),
    ]  # fmt: skip
    assert split_bounds(Share(0.0, 0.5), 5) == (0, 2)
    assert split_bounds(Share(0.0, 0.5), 7) == (0, 4)


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("969, 30, 1", (0.969, 0.03, 0.001)),
        ("99,1,0", (0.99, 0.01, 0.0)),
        ("1", (1.0, 0.0, 0.0)),
        ("0.5 0.5", (0.5, 0.5, 0.0)),
    ],
)
def test_split_weights(text: str, weights: tuple[float, float, float]) -> None:
    assert parse_split(text) == pytest.approx(weights)


def test_a_weight_of_zero_is_no_split() -> None:
    assert split_matrix("1,0,1") == (Share(0.0, 0.5), None, Share(0.5, 1.0))


@pytest.mark.parametrize("text", ["", "a,b", "1,2,3,4", "0,0,0", "-1,2", "nan", "inf,1"])
def test_a_senseless_split_is_refused(text: str) -> None:
    refused(lambda: parse_split(text), "--split")
