"""The splits of a corpus."""

from __future__ import annotations

import pytest

from data.sample_order import (
    Share,
    parse_split,
    split_bounds,
    split_matrix,
)
from tests.helpers.refusals import refused


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
