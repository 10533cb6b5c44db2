"""Reads all token ids of a data set once: checksums, the range of ids, and ends of documents."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from data.block_checksums import BlockSums, sums_path
from data.indexed_dataset import IndexedDataset, bin_path
from paro.errors import one_line, writing
from paro.files.atomic_file import replacing

NOTICE_SECONDS = 10.0  # before progress is shown, and between two times


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The contents of a data set that was read whole; no damage was found."""

    least: int
    most: int
    filled: int  # documents that have a token
    ended: int  # those of them whose last token is the end-of-document token
    checksums: str


def read_contents(
    dataset: IndexedDataset, lengths: NDArray[np.int64], eod: int | None, *, write_checksums: bool
) -> Contents:
    """Read every block, and write the checksums of a data set that has none if that is asked for.

    `lengths` are those of its documents. Raises `UserError` at the first damaged block.
    """
    ends = np.cumsum(lengths)[lengths > 0] - 1  # of documents, as positions in the .bin file
    sums, least, most, ended, done = BlockSums(), sys.maxsize, -1, 0, 0
    how: dict[str, Any] = {"desc": one_line(f"{bin_path(dataset.prefix)}"), "unit": " tokens"}
    how |= {"unit_scale": True, "delay": NOTICE_SECONDS, "mininterval": NOTICE_SECONDS}
    with tqdm(total=dataset.num_tokens, **how) as bar:
        for part in dataset.part_ranges():
            ids = dataset.read(*part)
            sums.update(ids)
            first, last = np.searchsorted(ends, (done, done + len(ids)))
            if eod is not None:
                ended += int((ids[ends[first:last] - done] == eod).sum())
            least, most = min(least, int(ids.min())), max(most, int(ids.max()))
            done += len(ids)
            bar.update(len(ids))
    return Contents(
        least=least,
        most=most,
        filled=len(ends),
        ended=ended,
        checksums=_checksums(dataset, sums, write_checksums),
    )


def _checksums(dataset: IndexedDataset, sums: BlockSums, write_checksums: bool) -> str:
    path = sums_path(bin_path(dataset.prefix))
    if dataset.has_checksums:
        return f"all blocks of .bin agree with {path}"
    if not write_checksums:
        return f"none, so damage of .bin is not noticed; --write-checksums writes {path}"
    with writing(f"{path}"), replacing(path) as temporary:
        sums.write(temporary)
    return f"written to {path}, of .bin as it is now"
