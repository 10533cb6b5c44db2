"""The order of a blend: its rule sample by sample."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import blended_dataset
from data.blended_dataset import BlendIndices, blend_by_share, blend_exhaustively


def sample_by_sample(
    shares: Sequence[float], limits: Sequence[float], num_samples: int
) -> list[tuple[int, int]]:
    """The rule as a loop: the corpus of every sample, and the sample's number in the corpus."""
    counts = [0] * len(shares)
    order = []
    for sample in range(num_samples):
        lags = [
            share * max(sample, 1) - count if count < limit else -np.inf
            for share, count, limit in zip(shares, counts, limits, strict=True)
        ]
        member = lags.index(max(lags))
        order.append((member, counts[member]))
        counts[member] += 1
    return order


def as_pairs(indices: BlendIndices) -> list[tuple[int, int]]:
    return list(zip(*(index.tolist() for index in indices), strict=True))


@settings(deadline=None)
@given(
    weights=st.lists(
        st.one_of(st.floats(0.001, 100.0), st.integers(1, 4).map(float)), min_size=1, max_size=6
    ),
    num_samples=st.integers(0, 500),
    stretch=st.integers(1, 60),
)
def test_many_lanes_give_what_one_loop_gives(
    weights: list[float], num_samples: int, stretch: int
) -> None:
    shares = [float(share) for share in np.array(weights) / np.sum(weights)]
    with mock.patch.object(blended_dataset, "_LEAST_STRETCH", stretch):
        found = as_pairs(blend_by_share(shares, num_samples))
    assert found == sample_by_sample(shares, [np.inf] * len(shares), num_samples)


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 90), min_size=1, max_size=6).filter(any),
    stretch=st.integers(1, 60),
)
def test_many_lanes_exhaust_what_one_loop_exhausts(sizes: list[int], stretch: int) -> None:
    total = sum(sizes)
    with mock.patch.object(blended_dataset, "_LEAST_STRETCH", stretch):
        found = as_pairs(blend_exhaustively(sizes))
    assert found == sample_by_sample([size / total for size in sizes], sizes, total)


def test_a_wrong_beginning_is_run_again() -> None:
    """From any initial counts of the stretches, the order is that of the loop."""
    shares = [0.5, 0.3, 0.2]

    def unlikely(_shares: object, times: np.ndarray) -> np.ndarray:
        return np.stack([np.zeros_like(times), np.zeros_like(times), times])

    with (
        mock.patch.object(blended_dataset, "_LEAST_STRETCH", 7),
        mock.patch.object(blended_dataset, "_likely_counts", unlikely),
    ):
        found = as_pairs(blend_by_share(shares, 200))
    assert found == sample_by_sample(shares, [np.inf] * 3, 200)


@pytest.mark.filterwarnings("error")
def test_a_share_near_zero_is_no_overflow() -> None:
    order = blend_by_share([1.0, 3e-309], 1000)
    assert np.flatnonzero(order.dataset_index).tolist() == [1]
