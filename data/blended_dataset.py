"""Data set that blends samples of several corpora, in Megatron's order."""

# [Note: in lanes]
# The rule is Megatron's, its float64 arithmetic included: at sample t the corpus with the greatest
# share * t - count is next, the first one if several are equal. Every choice depends on the counts
# after all earlier choices, so the definition is a loop over samples; it takes minutes for hundreds
# of millions of samples. Here stretches of samples run in parallel lanes, as columns of numpy
# arrays. A chunk starts from estimated counts: the shares at its first sample, after a warm-up of
# some steps, in which wrong counts converge to the true ones. Then each start is compared with the
# end of the previous chunk, and on a difference the chunk is run again from that end. The first
# chunk starts from exact counts, so after the last difference the result equals the loop's.

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.batch import Sample, Samples
from data.blend import SURPLUS, Blend, DataPhase, starts_of
from data.gpt_dataset import GPTDataset, SplitRequest, TooFewTokensError
from data.index_cache import CacheEntry, StoredArray, cached
from paro.errors import UserError

_LEAST_CHUNK = 256
_MAX_LANES = 4096
_RUN_IN = 4  # length of the warm-up, in mean distances between samples of the rarest corpus
_MAX_RUN_IN = 4096

Counts = NDArray[np.int64]  # of every corpus, in every lane


class BlendIndices(NamedTuple):
    """The corpus of every sample of a blend, and its number among that corpus's samples."""

    dataset_index: NDArray[np.int16] | StoredArray
    dataset_sample_index: NDArray[np.int64] | StoredArray


@dataclass(eq=False)
class BlendedDataset:
    """A blend: sample i is the next unread sample of the corpus that the blend order has at i.

    Held-out data with fewer samples than a run draws are read again from the start.
    """

    members: Sequence[GPTDataset]
    indices: BlendIndices
    _: KW_ONLY
    num_samples: int
    source: str
    left_out: Sequence[str] = ()

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        position = index % len(self.indices.dataset_index)
        member = self.members[int(self.indices.dataset_index[position])]
        return member[int(self.indices.dataset_sample_index[position])]

    def describe(self) -> str:
        """Return one line: corpora, samples from each corpus, and where the order is stored."""
        size = len(self.indices.dataset_index)
        counts = np.bincount(np.asarray(self.indices.dataset_index), minlength=len(self.members))
        parts = ", ".join(
            f"{count / max(size, 1):.2%} {member.indexed.prefix} "
            f"({count * member.plan.seq_length / member.plan.tokens_per_epoch:.2f} epochs)"
            for count, member in zip(counts.tolist(), self.members, strict=True)
        )
        rounds = f" in {self.num_samples / size:.2f} rounds" if self.num_samples > size else ""
        without = "".join(f"; nothing of {prefix}: too few tokens" for prefix in self.left_out)
        return f"{self.num_samples:,} samples{rounds}, blended from {parts}; {self.source}{without}"


@dataclass(eq=False)
class PhasedDataset:
    """The samples of all phases, one phase after the other.

    A phase that was over when the run began has no data set, and its samples cannot be read. One
    without a number of samples is never over: a longer training reads more of it.
    """

    phases: Sequence[DataPhase]
    data_sets: Sequence[Samples | None]
    num_samples: int

    def __post_init__(self) -> None:
        self._starts = starts_of(self.phases)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        number = bisect_right(self._starts, index) - 1
        data_set = self.data_sets[number]
        assert data_set is not None, f"sample {index} of a phase that is over"
        return data_set[index - self._starts[number]]

    def describe(self) -> str:
        """Return a line for each phase, after one with the number of samples."""
        lines = [f"{self.num_samples:,} samples in {len(self.phases)} phases"]
        for phase, start, data_set in zip(self.phases, self._starts, self.data_sets, strict=True):
            text = "over" if data_set is None else data_set.describe()
            text += " (the training ends before it)" * (start >= self.num_samples)
            lines.append(f"{phase.name}, after sample {start:,}: {text}")
        return "\n".join(lines)


def build_samples(blend: Blend, request: SplitRequest) -> GPTDataset | BlendedDataset:
    """Return one split of a blend; `TooFewTokensError` if it has no sample.

    For training data, `TooFewTokensError` is also raised if any corpus has no sample.
    """
    request = replace(request, flag=blend.flag)
    # Megatron blends a single corpus only if it has a weight and all splits are cut from it.
    is_single = blend.weights is None or request.config.split_in_use is None
    if len(blend.prefixes) == 1 and is_single:
        return request.build(blend.prefixes[0], request.num_samples)
    blend, left_out = _without_empty(blend, request)
    dataset = _by_size(blend, request) if blend.weights is None else _by_weight(blend, request)
    dataset.left_out = left_out
    return dataset


def build_phases(
    phases: Sequence[DataPhase], request: SplitRequest, consumed: int
) -> PhasedDataset:
    """Return the training data of all phases; those that end before `consumed` are not opened.

    Each is built for its own number of samples, so that its order depends on nothing else.
    """
    total, starts = request.num_samples, starts_of(phases)
    assert total is not None, "training draws a number of samples"
    end = total if phases[-1].samples is None else starts[-1] + phases[-1].samples
    if end < total:
        raise UserError(
            f"{phases[-1].blend.flag} phases end after {end:,} samples, and training draws "
            f"{total:,}: give the last phase no number of samples, or train less"
        )
    data_sets = [
        None
        if stop <= consumed and phase.samples is not None
        else build_samples(phase.blend, replace(request, num_samples=max(1, stop - start)))
        for phase, (start, stop) in zip(phases, pairwise([*starts, end]), strict=True)
    ]
    return PhasedDataset(phases, data_sets, total)


def _without_empty(blend: Blend, request: SplitRequest) -> tuple[Blend, tuple[str, ...]]:
    """Return the blend without held-out corpora that have no sample, and their prefixes."""
    empty: dict[int, TooFewTokensError] = {}
    for index, prefix in enumerate(blend.prefixes):
        try:
            request.total_samples(prefix, None)
        except TooFewTokensError as error:
            empty[index] = error
    if empty and (request.split_name == "train" or len(empty) == len(blend.prefixes)):
        raise next(iter(empty.values()))
    usable = [index for index in range(len(blend.prefixes)) if index not in empty]
    weights = None if blend.weights is None else tuple(blend.weights[index] for index in usable)
    filled = replace(blend, prefixes=tuple(blend.prefixes[i] for i in usable), weights=weights)
    return filled, tuple(blend.prefixes[index] for index in empty)


def _by_weight(blend: Blend, request: SplitRequest) -> BlendedDataset:
    if request.num_samples is None:
        raise UserError(
            f"{blend.flag} has weights, and --full-validation reads every sample once: leave the "
            "weights out, or --full-validation"
        )
    shares = blend.shares()
    counts = [math.ceil(request.num_samples * share) for share in shares]
    size = sum(counts)
    build = partial(blend_samples, shares, size)
    indices, source = _cached_indices(blend, request, shares, size, build)
    drawn = np.bincount(np.asarray(indices.dataset_index), minlength=len(shares)).tolist()
    members = []
    for prefix, count, used in zip(blend.prefixes, counts, drawn, strict=True):
        planned = math.ceil(count * (1 + SURPLUS))
        if request.total_samples(prefix, planned) < used:  # Megatron fails here
            planned = used
        members.append(request.build(prefix, planned))
    return BlendedDataset(members, indices, num_samples=size, source=source)


def _by_size(blend: Blend, request: SplitRequest) -> BlendedDataset:
    members = [request.build(prefix, None) for prefix in blend.prefixes]
    sizes = [len(member) for member in members]
    total = sum(sizes)
    num_samples = total if request.num_samples is None else request.num_samples
    if num_samples > total and request.split_name == "train":
        raise UserError(
            f"{blend.flag} without weights holds {total} samples of --seq-length "
            f"{request.config.seq_length}, and training draws {num_samples}: give a weight "
            "before each path, so that data are repeated, or train less"
        )
    size = min(num_samples, total)
    limits = sizes if request.num_samples is None else None
    build = partial(blend_samples, [each / total for each in sizes], size, limits)
    indices, source = _cached_indices(blend, request, sizes, size, build)
    return BlendedDataset(members, indices, num_samples=num_samples, source=source)


def _cached_indices(
    blend: Blend,
    request: SplitRequest,
    weights: Sequence[float],
    size: int,
    build: Callable[[], BlendIndices],
) -> tuple[BlendIndices, str]:
    """Return the blend order, cached on disk; it depends only on weights or sizes and length."""
    facts = {
        "class": "BlendedDataset",
        "datasets": list(blend.prefixes),
        "split": request.split_name,
        "weights": list(weights),
        "size": None if request.num_samples is None else size,
    }
    folder = request.config.cache_folder(blend.prefixes[0])
    entry = CacheEntry(folder=folder, split_name=request.split_name, facts=facts)
    return cached(entry, BlendIndices, build)


def blend_samples(
    corpus_shares: Sequence[float], num_samples: int, sizes: Sequence[int] | None = None
) -> BlendIndices:
    """Return the first samples of a blend, of corpora that end after `sizes` samples or never.

    Bit for bit Megatron's, computed in parallel lanes.
    """
    shares = np.array(corpus_shares, dtype=np.float64)
    limits = None if sizes is None else np.array(sizes, dtype=np.int64)
    chunk = max(_LEAST_CHUNK, -(-num_samples // _MAX_LANES))
    num_lanes = max(1, -(-num_samples // chunk))
    rarest = float(shares[shares > 0].min())  # numpy warns of overflow in a division
    run_in = int(min(_RUN_IN / rarest, _MAX_RUN_IN, chunk))
    chosen = np.empty((num_lanes, chunk), dtype=np.int16)
    samples = np.empty((num_lanes, chunk), dtype=np.int64)

    starts = np.arange(num_lanes, dtype=np.int64) * chunk
    begun = np.zeros((len(shares), num_lanes), dtype=np.int64)
    if num_lanes > 1:
        begun[:, 1:] = _likely_counts(shares, starts[1:] - run_in)
        for step in range(-run_in, 0):
            _choose(shares, limits, starts[1:] + step, begun[:, 1:])
    ended = np.empty_like(begun)
    lanes = np.arange(num_lanes)
    while lanes.size:
        counts = begun[:, lanes]
        for step in range(chunk):
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
