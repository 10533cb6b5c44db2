"""Sample order of a blend: the next sample is from the corpus furthest below its share."""

# [Note: in lanes]
# The rule is Megatron's, its float64 arithmetic included: at sample t the corpus with the greatest
# share * t - count is next, the first one if several are equal. Every choice depends on the counts
# after all earlier choices, so the definition is a loop over samples; it takes minutes for hundreds
# of millions of samples. Here stretches of samples run in parallel lanes, as columns of numpy
# arrays. A stretch starts from estimated counts: the shares at its first sample, after a warm-up of
# some steps, in which wrong counts converge to the true ones. Then each start is compared with the
# end of the previous stretch, and on a difference the stretch is run again from that end. The first
# stretch starts from exact counts, so after the last difference the result equals the loop's.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.stored_array import StoredArray

DATASET_DTYPE: np.dtype[Any] = np.dtype(np.int16)
SAMPLE_DTYPE: np.dtype[Any] = np.dtype(np.int64)
_LEAST_STRETCH = 256
_MAX_LANES = 4096
_RUN_IN = 4  # length of the warm-up, in mean distances between samples of the rarest corpus
_MAX_RUN_IN = 4096

Counts = NDArray[np.int64]  # of every corpus, in every lane


class BlendIndices(NamedTuple):
    """The corpus of every sample of a blend, and its number among that corpus's samples."""

    dataset_index: NDArray[np.int16] | StoredArray
    dataset_sample_index: NDArray[np.int64] | StoredArray


def blend_by_share(shares: Sequence[float], num_samples: int) -> BlendIndices:
    """Return the first `num_samples` samples of an endless blend; bit for bit Megatron's."""
    return _blend(np.array(shares, dtype=np.float64), None, num_samples)


def blend_exhaustively(sizes: Sequence[int]) -> BlendIndices:
    """Return every sample of every corpus once, in proportion; bit for bit Megatron's."""
    total = sum(sizes)
    shares = np.array([size / total for size in sizes], dtype=np.float64)
    return _blend(shares, np.array(sizes, dtype=np.int64), total)


def _blend(
    shares: NDArray[np.float64], limits: NDArray[np.int64] | None, num_samples: int
) -> BlendIndices:
    """Return the order, computed in parallel lanes; see [Note: in lanes]."""
    stretch = max(_LEAST_STRETCH, -(-num_samples // _MAX_LANES))
    num_lanes = max(1, -(-num_samples // stretch))
    rarest = float(shares[shares > 0].min())  # numpy warns of overflow in a division
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
    """Round `shares` * time to integers that sum to the time, for each time."""
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
    """Choose the next sample of every lane: its corpus, and how often that was chosen before.

    Updates `counts`.
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
