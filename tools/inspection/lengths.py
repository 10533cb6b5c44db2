"""How long the documents of a data set are: figures, and a histogram as text and as a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.indexed_dataset import IndexedDataset
from tools.shared.picture import drawing

BAR = 40  # characters of the longest bar


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Documents of `first` to `last` tokens."""

    first: int
    last: int
    documents: int

    @property
    def label(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


def document_lengths(dataset: IndexedDataset) -> NDArray[np.int64]:
    """Tokens of each document; a document may have several sequences, or none."""
    ends = np.zeros(len(dataset) + 1, dtype=np.int64)
    np.cumsum(dataset.sequence_lengths(), out=ends[1:])
    lengths: NDArray[np.int64] = np.diff(ends[dataset.document_indices()])
    return lengths


def figures(lengths: NDArray[np.int64]) -> str:
    """Minimum, quartiles, mean and maximum, in a line."""
    if len(lengths) == 0:
        return "no documents"
    parts = zip(("least", "25%", "median", "75%", "99%", "most"), (0, 25, 50, 75, 99, 100),
                strict=True)  # fmt: skip
    named = [f"{name} {np.percentile(lengths, part):,.0f}" for name, part in parts]
    return ", ".join([*named, f"mean {lengths.mean():,.1f}"])


def histogram(lengths: NDArray[np.int64]) -> list[Bin]:
    """Bins of doubling width: 0, 1, 2-3, 4-7, ...; all up to the longest document."""
    if len(lengths) == 0:
        return []
    places = np.zeros(len(lengths), dtype=np.int64)
    positive = lengths > 0
    places[positive] = np.floor(np.log2(lengths[positive])).astype(np.int64) + 1
    counts = np.bincount(places).tolist()
    edges = [(0, 0)] + [(2**k, 2 ** (k + 1) - 1) for k in range(len(counts) - 1)]
    return [
        Bin(first=first, last=last, documents=count)
        for (first, last), count in zip(edges, counts, strict=True)
    ]


def draw_text(bins: list[Bin]) -> list[str]:
    """A line per bin, with a bar for its share."""
    width = max((len(item.label) for item in bins), default=0)
    most = max((item.documents for item in bins), default=0) or 1
    return [
        f"{item.label:>{width}} {'#' * -(-BAR * item.documents // most):<{BAR}} {item.documents:,}"
        for item in bins
    ]


def draw_picture(path: Path, by_name: dict[str, list[Bin]]) -> None:
    """Writes a panel per data set."""
    with drawing(path, len(by_name), 1, size=(8, 3.5 * len(by_name))) as (_, panels):
        for panel, (name, bins) in zip(panels, by_name.items(), strict=True):
            panel.bar([item.label for item in bins], [item.documents for item in bins])
            panel.set(title=name, xlabel="tokens of a document", ylabel="documents")
            panel.tick_params(axis="x", rotation=45)
