"""Megatron's sample order: document, sample and shuffle index as pure functions of sizes and seed.

The sequences of a split, repeated for as many epochs as the samples need and shuffled, form one
long row of tokens (document index). Sample k reads its tokens k * S to k * S + S inclusive, so
neighbouring samples share one token (sample index). Samples are visited in shuffled order (shuffle
index). One random state, seeded once, does all the shuffling, in this order. With --sft a sequence
counts S tokens, cut or filled up, and no token is shared: a sample is one sequence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.index_cache import StoredArray
from paro.errors import UserError

SPLIT_NAMES = ("train", "valid", "test")
Share = tuple[float, float]  # a split as an interval of the corpus, between 0 and 1
MOST_SAMPLES = 2**33  # most samples or documents in an order: 70 trillion tokens at 8192 each
BLOCK = 2**16  # entries of the document index that are processed at a time
# If less than this fraction of the final epoch is needed, it is shuffled separately, so that the
# samples of the whole epochs come first.
SEPARATE_BELOW = 0.80


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderPlan:
    """The epochs and samples of an order; all sizes are known before anything is built."""

    bounds: range  # of the split's sequences
    tokens_per_epoch: int
    num_samples: int | None  # requested samples, which the order has at least; None: one epoch
    seq_length: int
    seed: int
    shared_tokens: int = 1  # tokens that neighbouring samples share; 0: a sample is a sequence

    def __post_init__(self) -> None:
        if max(self.num_samples or 0, self.num_epochs * len(self.bounds)) > MOST_SAMPLES:
            raise UserError(
                f"{self.num_samples} samples are {self.num_epochs} epochs of this data, and an "
                f"order must have at most {MOST_SAMPLES} samples and documents: ask for fewer "
                "with --train-iters, --train-samples or --eval-iters"
            )

    def _samples_in(self, epochs: int) -> int:
        return (epochs * self.tokens_per_epoch - self.shared_tokens) // self.seq_length

    @property
    def num_epochs(self) -> int:
        """The fewest epochs that contain the samples and the label after the last one."""
        if self.num_samples is None:
            return 1
        needed = self.num_samples * self.seq_length + self.shared_tokens
        return max(1, -(-needed // self.tokens_per_epoch))

    @property
    def total_samples(self) -> int:
        return self._samples_in(self.num_epochs)

    @property
    def samples_before_separate_epoch(self) -> int | None:
        """Samples of all epochs but the last if the last is shuffled separately, else None."""
        if self.num_samples is None or self.num_epochs == 1:
            return None
        before = self._samples_in(self.num_epochs - 1)
        from_last = self.num_samples - before
        return before if from_last < int(SEPARATE_BELOW * self._samples_in(1)) else None


class SampleOrder(NamedTuple):
    """The three indices; rows k and k + 1 of `sample_index` bound sample k."""

    document_index: NDArray[np.int32] | StoredArray  # sequence ids in reading order
    # (position in document_index, token offset) of the samples' first tokens, one row more
    sample_index: NDArray[Any] | StoredArray
    shuffle_index: NDArray[Any] | StoredArray  # entry i: the sample that is read as the i-th


def parse_split(text: str) -> tuple[float, ...]:
    """Parse the weights of train, valid and test, summing to 1; missing ones are 0."""
    words = [word for word in re.split(r"[,/\s]+", text.strip()) if word]
    try:
        weights = [float(word) for word in words]
    except ValueError:
        weights = []
    weights += [0.0] * (3 - len(weights))
    total = float(np.sum(np.array(weights, dtype=np.float64)))
    if not words or len(weights) > 3 or min(weights) < 0 or not 0 < total < float("inf"):
        raise UserError(
            f"--split {text!r} is not understood: give up to three weights of train, validation "
            "and test data, such as 969,30,1"
        )
    return tuple(weight / total for weight in weights)


def split_matrix(text: str) -> tuple[Share | None, ...]:
    """Return each split as an interval of the corpus; None for a weight of 0."""
    # Added one by one: the rounding in `split_bounds` depends on it.
    ends = accumulate(parse_split(text), initial=0.0)
    return tuple((begin, end) if end > begin else None for begin, end in pairwise(ends))


def share_of(split: str | None, split_name: str) -> Share | None:
    """Return the part of a corpus that a split uses; all of it without --split."""
    if split is None:
        return 0.0, 1.0
    return split_matrix(split)[SPLIT_NAMES.index(split_name)]


def split_bounds(split: str | None, split_name: str, num_sequences: int) -> range:
    """Return the sequences of a split: contiguous, in file order, not shuffled."""
    share = share_of(split, split_name) or (0, 0)
    return range(*(round(end * num_sequences) for end in share))


def build_order(sequence_lengths: NDArray[np.int32], plan: OrderPlan) -> SampleOrder:
    """Return the order of a plan; bit for bit Megatron's."""
    random = np.random.RandomState(plan.seed)
    before = plan.samples_before_separate_epoch
    sequences = np.arange(plan.bounds.start, plan.bounds.stop, dtype=np.int32)
    document_index = np.tile(sequences, plan.num_epochs)
    whole = plan.num_epochs - (before is not None)  # epochs that are shuffled together
    _shuffle(document_index, whole * len(sequences), random)
    sample_index = _sample_index(sequence_lengths, document_index, plan)
    fits = plan.total_samples < np.iinfo(np.uint32).max - 1
    shuffle_index = np.arange(plan.total_samples, dtype=np.uint32 if fits else np.int64)
    _shuffle(shuffle_index, len(shuffle_index) if before is None else before, random)
    return SampleOrder(document_index, sample_index, shuffle_index)


def _shuffle(row: NDArray[Any], border: int, random: np.random.RandomState) -> None:
    """Shuffle what is before the border, then what is behind it."""
    random.shuffle(row[:border])
    random.shuffle(row[border:])


def _sample_index(
    lengths: NDArray[np.int32], document_index: NDArray[np.int32], plan: OrderPlan
) -> NDArray[Any]:
    """Return the sample index, built block by block so that temporaries stay in the CPU cache."""
    num_rows = plan.total_samples + 1
    largest = max(len(document_index), int(lengths.max(initial=0)))  # of positions and offsets
    fits = largest <= np.iinfo(np.int32).max
    rows = np.empty((num_rows, 2), dtype=np.int32 if fits else np.int64)
    begin, row = 0, 0  # the block's first token, and the first row not yet filled
    for first in range(0, len(document_index), BLOCK):
        block = lengths.take(document_index[first : first + BLOCK], mode="clip")
        ends = np.cumsum(block, dtype=np.int64) + begin
        begin = int(ends[-1])
        row_behind = min((begin - 1) // plan.seq_length + 1, num_rows)
        if row_behind > row:
            starts = np.arange(row, row_behind, dtype=np.int64) * plan.seq_length
            entries = np.searchsorted(ends, starts, side="right")
            rows[row:row_behind, 0] = entries + first
            rows[row:row_behind, 1] = starts - (ends[entries] - block[entries])
            row = row_behind
    if plan.shared_tokens == 0:  # where the last sample ends
        rows[row], row = (len(document_index), 0), row + 1
    assert row == num_rows, f"{row} of {num_rows} rows"
    rows[0] = 0  # also if the first sequences are empty
    return rows
