"""Keeps built sample orders on disk under Megatron's file names, safe under concurrent builders.

A description of everything the order depends on names the files by its MD5. Each file is renamed
into place and the description, which also holds the checksums, comes last; two processes that build
the same order write the same bytes. What does not match is built anew. Readers map the files, so
that the ranks of a node share one copy.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.atomic_file import replacing
from data.sample_order import (
    DOCUMENT_DTYPE,
    OrderPlan,
    SampleOrder,
    build_order,
    sample_index_dtype,
    shuffle_index_dtype,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """Where one order is kept: a folder, the name of the split and what the order depends on."""

    folder: Path
    split_name: str
    description: str

    def path(self, part: str) -> Path:
        digest = hashlib.md5(self.description.encode(), usedforsecurity=False).hexdigest()
        return self.folder / f"{digest}-GPTDataset-{self.split_name}-{part}"


def describe_order(facts: dict[str, Any], lengths: NDArray[np.int32]) -> str:
    """The text that identifies an order: what was asked for, and a checksum of the sizes in use.

    With the sizes in it, files rewritten under the same prefix never meet an old order.
    """
    return json.dumps({**facts, "sequence_lengths_crc32": _checksum(lengths)}, indent=4)


def cached_order(
    entry: CacheEntry, lengths: NDArray[np.int32], plan: OrderPlan
) -> tuple[SampleOrder, str]:
    """The order of a plan, from the cache where it is there and whole; and where it came from.

    A folder that cannot be written costs the cache, not the run.
    """
    order = _read(entry, lengths, plan)
    if order is not None:
        return order, f"indices read from {entry.folder}"
    order = build_order(lengths, plan)
    try:
        _write(entry, order)
    except OSError as error:
        return order, f"indices kept in memory, {entry.folder} cannot be written: {error.strerror}"
    return _read(entry, lengths, plan) or order, f"indices written to {entry.folder}"


def _checksum(array: NDArray[Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(array).data)


def _seal(entry: CacheEntry, order: SampleOrder) -> str:
    """The content of the description file: Megatron's, and a line of checksums."""
    sums = {name: _checksum(array) for name, array in order._asdict().items()}
    return f"{entry.description}\n{json.dumps({'crc32': sums})}\n"


def _write(entry: CacheEntry, order: SampleOrder) -> None:
    entry.folder.mkdir(parents=True, exist_ok=True)
    for name, array in order._asdict().items():
        with replacing(entry.path(f"{name}.npy")) as temporary, temporary.open("wb") as stream:
            np.save(stream, array, allow_pickle=False)
    with replacing(entry.path("description.txt")) as temporary:
        temporary.write_text(_seal(entry, order))


def _read(entry: CacheEntry, lengths: NDArray[np.int32], plan: OrderPlan) -> SampleOrder | None:
    """The stored order, or None when a file is missing, unreadable or not what was written."""
    try:
        seal = entry.path("description.txt").read_text()
        order = SampleOrder(
            *(
                np.load(entry.path(f"{name}.npy"), mmap_mode="r", allow_pickle=False)
                for name in SampleOrder._fields
            )
        )
    except (OSError, ValueError, EOFError):  # absent, cut short, or no array at all
        return None
    expected = (
        ((plan.num_entries,), DOCUMENT_DTYPE),
        ((plan.total_samples + 1, 2), sample_index_dtype(plan, lengths)),
        ((plan.total_samples,), shuffle_index_dtype(plan)),
    )
    if tuple((array.shape, array.dtype) for array in order) != expected:
        return None
    return order if seal == _seal(entry, order) else None
