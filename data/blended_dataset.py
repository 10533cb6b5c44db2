"""Data set that blends samples of several corpora, in Megatron's order."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from data.blend import SURPLUS, Blend, members_of
from data.blend_order import (
    DATASET_DTYPE,
    SAMPLE_DTYPE,
    BlendIndices,
    blend_by_share,
    blend_exhaustively,
)
from data.gpt_dataset import GPTDataset, SplitRequest, TooFewTokensError
from data.index_cache import CacheEntry, Expected, cached_arrays
from data.loss_mask import LossMask
from paro.errors import UserError


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

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        member, sample = self._place(index)
        return member[sample]

    def loss_mask(self, index: int) -> LossMask | None:
        """Return the loss mask of a sample; None in a corpus without one."""
        member, sample = self._place(index)
        return member.loss_mask(sample)

    def _place(self, index: int) -> tuple[GPTDataset, int]:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        place = index % len(self.indices.dataset_index)
        member = self.members[int(self.indices.dataset_index[place])]
        return member, int(self.indices.dataset_sample_index[place])

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


def _without_empty(blend: Blend, request: SplitRequest) -> tuple[Blend, tuple[str, ...]]:
    """Return the blend without held-out corpora that have no sample, and their prefixes."""
    empty: dict[int, TooFewTokensError] = {}
    for place, prefix in enumerate(blend.prefixes):
        try:
            request.total_samples(prefix, None)
        except TooFewTokensError as error:
            empty[place] = error
    if empty and (request.split_name == "train" or len(empty) == len(blend.prefixes)):
        raise next(iter(empty.values()))
    kept = [place for place in range(len(blend.prefixes)) if place not in empty]
    weights = None if blend.weights is None else tuple(blend.weights[place] for place in kept)
    rest = replace(blend, prefixes=tuple(blend.prefixes[i] for i in kept), weights=weights)
    return rest, tuple(blend.prefixes[place] for place in empty)


def _by_weight(blend: Blend, request: SplitRequest) -> BlendedDataset:
    if request.num_samples is None:
        raise UserError(
            f"{blend.flag} has weights, and --full-validation reads every sample once: leave the "
            "weights out, or --full-validation"
        )
    shares = blend.shares()
    wanted = members_of(shares, request.num_samples)
    size = sum(wanted)
    build = partial(blend_by_share, shares, size)
    indices, source = _cached_indices(blend, request, shares, size, build)
    drawn = np.bincount(np.asarray(indices.dataset_index), minlength=len(shares)).tolist()
    members = []
    for prefix, count, used in zip(blend.prefixes, wanted, drawn, strict=True):
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
    build = partial(blend_exhaustively, sizes)
    if request.num_samples is not None:
        shares = replace(blend, weights=tuple(map(float, sizes))).shares()
        build = partial(blend_by_share, shares, size)
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
    entry = CacheEntry(
        folder=request.config.cache_folder(blend.prefixes[0]),
        split_name=request.split_name,
        description=json.dumps(facts, indent=4),
        kind="BlendedDataset",
    )
    expected: Expected = {
        "dataset_index": ((size,), DATASET_DTYPE),
        "dataset_sample_index": ((size,), SAMPLE_DTYPE),
    }
    arrays, source = cached_arrays(entry, expected, lambda: build()._asdict())
    return BlendIndices(**arrays), source
