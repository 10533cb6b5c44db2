"""How long the documents of a data set are: figures, and a histogram as text and as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.indexed_dataset import IndexedDataset
from tools.shared.picture import drawing

BAR = 40  # characters of the longest bar


def document_lengths(dataset: IndexedDataset) -> NDArray[np.int64]:
    """Return tokens of each document; a document may have several sequences, or none."""
    ends = np.zeros(len(dataset) + 1, dtype=np.int64)
    np.cumsum(dataset.sequence_lengths(), out=ends[1:])
    lengths: NDArray[np.int64] = np.diff(ends[dataset.document_indices()])
    return lengths


def figures(lengths: NDArray[np.int64]) -> str:
    """Format minimum, quartiles, mean and maximum in a line."""
    if len(lengths) == 0:
        return "no documents"
    parts = zip(("least", "25%", "median", "75%", "99%", "most"), (0, 25, 50, 75, 99, 100),
                strict=True)  # fmt: skip
    named = [f"{name} {np.percentile(lengths, part):,.0f}" for name, part in parts]
    return ", ".join([*named, f"mean {lengths.mean():,.1f}"])


def histogram(lengths: NDArray[np.int64]) -> dict[str, int]:
    """Count documents by tokens, in steps of doubling width: 0, 1, 2-3, 4-7, ..."""
    if len(lengths) == 0:
        return {}
    places = np.zeros(len(lengths), dtype=np.int64)
    positive = lengths > 0
    places[positive] = np.floor(np.log2(lengths[positive])).astype(np.int64) + 1
    counts: list[int] = np.bincount(places).tolist()
    wide = (f"{2**k}-{2 ** (k + 1) - 1}" for k in range(1, len(counts)))
    return dict(zip(("0", "1", *wide), counts, strict=False))


def draw_text(counts: dict[str, int]) -> list[str]:
    """Format a line per step, with a bar for its share."""
    width, most = max(map(len, counts), default=0), max(counts.values(), default=0) or 1
    return [
        f"{label:>{width}} {'#' * -(-BAR * count // most):<{BAR}} {count:,}"
        for label, count in counts.items()
    ]


def draw_picture(path: Path, by_name: dict[str, dict[str, int]]) -> None:
    """Write a panel per data set."""
    with drawing(path, len(by_name), 1, size=(8, 3.5 * len(by_name))) as (_, panels):
        for panel, (name, counts) in zip(panels, by_name.items(), strict=True):
            panel.bar(list(counts), list(counts.values()))
            panel.set(title=name, xlabel="tokens of a document", ylabel="documents")
            panel.tick_params(axis="x", rotation=45)
