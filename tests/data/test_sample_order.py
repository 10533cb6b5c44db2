"""Megatron's sample order: recorded vectors, and a slow reference implementation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data.sample_order
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
from paro.errors import UserError

SIZES = [5, 3, 7, 4, 6, 2]


def order_of(
    sizes: list[int], *, num_samples: int, seq_length: int, seed: int = 1234, first: int = 0
) -> tuple[OrderPlan, SampleOrder]:
    plan = OrderPlan(
        bounds=Bounds(first, len(sizes)),
        tokens_per_epoch=sum(sizes[first:]),
        num_samples=num_samples,
        seq_length=seq_length,
        seed=seed,
    )
    return plan, build_order(np.array(sizes, dtype=np.int32), plan)


def test_recorded_one_epoch() -> None:
    plan, order = order_of(SIZES, num_samples=6, seq_length=4)
    assert plan.num_epochs == 1
    assert order.document_index.tolist() == [2, 1, 5, 0, 4, 3]
    assert order.sample_index.tolist() == [[0, 0], [0, 4], [1, 1], [3, 0], [3, 4], [4, 3], [5, 1]]
    assert order.shuffle_index.tolist() == [0, 4, 3, 2, 5, 1]


def test_recorded_final_epoch_apart() -> None:
    plan, order = order_of(SIZES, num_samples=9, seq_length=4)
    assert plan.num_epochs == 2
    assert plan.samples_before_separate_epoch == 6
    assert order.document_index.tolist() == [2, 1, 5, 0, 4, 3, 0, 4, 3, 2, 5, 1]
    assert order.sample_index.tolist() == [
        [0, 0], [0, 4], [1, 1], [3, 0], [3, 4], [4, 3], [5, 1],
        [6, 1], [7, 0], [7, 4], [8, 2], [9, 2], [9, 6], [11, 1],
    ]  # fmt: skip
    assert order.shuffle_index.tolist() == [1, 0, 3, 2, 5, 4, 8, 9, 11, 7, 10, 12, 6]


def test_recorded_final_epoch_together() -> None:
    plan, order = order_of(SIZES, num_samples=12, seq_length=4)
    assert plan.num_epochs == 2
    assert plan.samples_before_separate_epoch is None
    assert order.document_index.tolist() == [1, 2, 5, 2, 3, 4, 1, 0, 4, 5, 0, 3]
    assert order.shuffle_index.tolist() == [7, 11, 2, 3, 1, 9, 5, 4, 0, 8, 6, 10, 12]


def test_types_are_megatrons() -> None:
    _, order = order_of(SIZES, num_samples=6, seq_length=4)
    assert [array.dtype.name for array in order] == ["int32", "int32", "uint32"]


def walk(lengths: list[int], num_samples: int, seq_length: int) -> list[list[int]]:
    """Rows of the sample index, computed one token at a time."""
    tokens = [(entry, offset) for entry, size in enumerate(lengths) for offset in range(size)]
    rows = [list(tokens[k * seq_length]) for k in range(num_samples + 1)]
    rows[0] = [0, 0]
    return rows


def reference(
    sizes: list[int], first: int, num_samples: int, seq_length: int, seed: int
) -> tuple[list[int], list[list[int]], list[int]]:
    """The three indices by plain lists and loops; only the shuffles use numpy."""
    per_epoch = sum(sizes[first:])
    epochs = 1
    while epochs * per_epoch < num_samples * seq_length + 1:
        epochs += 1
    before = ((epochs - 1) * per_epoch - 1) // seq_length
    apart = epochs > 1 and num_samples - before < int(0.8 * ((per_epoch - 1) // seq_length))
    random = np.random.RandomState(seed)

    def shuffled(numbers: list[int], dtype: type) -> list[int]:
        array = np.array(numbers, dtype=dtype)
        random.shuffle(array)
        return [int(number) for number in array]

    sequences = list(range(first, len(sizes)))
    documents = shuffled(sequences * (epochs - apart), np.int32)
    if apart:
        documents += shuffled(sequences, np.int32)
    total = (epochs * per_epoch - 1) // seq_length
    rows = walk([sizes[document] for document in documents], total, seq_length)
    border = before if apart else total
    order = shuffled(list(range(border)), np.uint32)
    if apart:
        order += shuffled(list(range(border, total)), np.uint32)
    return documents, rows, order


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    first=st.integers(0, 3),
    num_samples=st.integers(0, 60),
    seq_length=st.integers(1, 7),
    seed=st.integers(0, 2**32 - 1),
)
@pytest.mark.parametrize("block", [1, 3, 1000])
def test_any_order_equals_the_slow_reference(
    block: int, sizes: list[int], first: int, num_samples: int, seq_length: int, seed: int
) -> None:
    first = min(first, len(sizes) - 1)
    if sum(sizes[first:]) <= seq_length:
        return  # refused before an order is planned
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.sample_order, "BLOCK", block)
        plan, order = order_of(
            sizes, num_samples=num_samples, seq_length=seq_length, seed=seed, first=first
        )
    documents, rows, shuffle = reference(sizes, first, num_samples, seq_length, seed)
    assert order.document_index.tolist() == documents
    assert order.sample_index.tolist() == rows
    assert order.shuffle_index.tolist() == shuffle
    assert len(documents) == plan.num_entries
    assert num_samples <= plan.total_samples == len(shuffle)


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
    with pytest.raises(UserError, match="--split"):
        parse_split(text)
