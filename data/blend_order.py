"""Whose sample comes when in a blend: that of the corpus that lags most behind its share."""

# [Note: in lanes]
# The rule is Megatron's, its float64 arithmetic included: at sample t the corpus with the greatest
# share * t - count is next, the first of equals. Every choice needs the counts that all choices
# before it made, so a loop over samples is the definition; it takes minutes where samples come in
# hundreds of millions. Here stretches of samples run side by side, as columns of numpy arrays. A
# stretch begins from counts that are only likely: the shares of its first sample, run in for a
# while, which makes other counts join the true course. Then each beginning is held against the end
# of the stretch before it, and where they differ the stretch is run again from there. The first
# stretch begins right, so what is left after the last difference is the loop's result, exactly.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

DATASET_DTYPE: np.dtype[Any] = np.dtype(np.int16)
SAMPLE_DTYPE: np.dtype[Any] = np.dtype(np.int64)
_LEAST_STRETCH = 256
_MAX_LANES = 4096
_RUN_IN = 4  # of the time in which the rarest corpus comes once
_MAX_RUN_IN = 4096

Counts = NDArray[np.int64]  # of every corpus, in every lane


class BlendIndices(NamedTuple):
    """For every sample of a blend: from which corpus, and which of that corpus's samples."""

    dataset_index: NDArray[np.int16]
    dataset_sample_index: NDArray[np.int64]


def blend_by_share(shares: Sequence[float], num_samples: int) -> BlendIndices:
    """The first `num_samples` of a blend that goes on for ever; bit for bit Megatron's."""
    return _blend(np.array(shares, dtype=np.float64), None, num_samples)


def blend_exhaustively(sizes: Sequence[int]) -> BlendIndices:
    """Every sample of every corpus once, in proportion; bit for bit Megatron's."""
    total = sum(sizes)
    shares = np.array([size / total for size in sizes], dtype=np.float64)
    return _blend(shares, np.array(sizes, dtype=np.int64), total)


def _blend(
    shares: NDArray[np.float64], limits: NDArray[np.int64] | None, num_samples: int
) -> BlendIndices:
    """See the note: in lanes."""
    stretch = max(_LEAST_STRETCH, -(-num_samples // _MAX_LANES))
    num_lanes = max(1, -(-num_samples // stretch))
    rarest = shares[shares > 0].min()
    run_in = int(min(_RUN_IN / rarest, _MAX_RUN_IN, stretch))
    chosen = np.empty((num_lanes, stretch), dtype=DATASET_DTYPE)
    samples = np.empty((num_lanes, stretch), dtype=SAMPLE_DTYPE)

    starts = np.arange(num_lanes, dtype=np.int64) * stretch
    begun = np.zeros((len(shares), num_lanes), dtype=np.int64)
    if num_lanes > 1:
        begun[:, 1:] = _likely_counts(shares, starts[1:] - run_in)
        for step in range(-run_in, 0):
            _choose(shares, limits, starts[1:] + step, begun[:, 1:])
    ended = np.empty_like(begun)
    lanes = np.arange(num_lanes)
    while lanes.size:
        counts = begun[:, lanes]
        for step in range(stretch):
            picks, before = _choose(shares, limits, starts[lanes] + step, counts)
            chosen[lanes, step] = picks
            samples[lanes, step] = before
        ended[:, lanes] = counts
        lanes = 1 + np.flatnonzero((begun[:, 1:] != ended[:, :-1]).any(axis=0))
        begun[:, lanes] = ended[:, lanes - 1]
    return BlendIndices(chosen.reshape(-1)[:num_samples], samples.reshape(-1)[:num_samples])


def _likely_counts(shares: NDArray[np.float64], times: NDArray[np.int64]) -> Counts:
    """Whole numbers near `shares` of each time that sum to it."""
    ideal = np.multiply.outer(shares, times.astype(np.float64))
    counts = np.floor(ideal).astype(np.int64)
    missing = times - counts.sum(axis=0)
    ranks = np.argsort(np.argsort(counts - ideal, axis=0, kind="stable"), axis=0, kind="stable")
    return counts + (ranks < missing)


def _choose(
    shares: NDArray[np.float64],
    limits: NDArray[np.int64] | None,
    times: NDArray[np.int64],
    counts: Counts,
) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """One sample of every lane: its corpus, and how often that one was chosen before.

    Counts it in `counts`.
    """
    lags = np.multiply.outer(shares, np.maximum(times, 1).astype(np.float64))
    lags -= counts
    if limits is not None:
        lags[counts >= limits[:, None]] = -np.inf
    picks = lags.argmax(axis=0)
    lanes = np.arange(len(times))
    before = counts[picks, lanes]
    counts[picks, lanes] = before + 1
    return picks, before
