"""Writes small corpora in the .bin/.idx format, and reads them back as lists of ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from data.fingerprint import Fingerprint
from data.indexed_dataset import EncodedDocuments, IndexedDataset, IndexedDatasetWriter

Documents = list[list[list[int]]]


def write_corpus(
    prefix: Path | str,
    documents: Iterable[Iterable[ArrayLike]],
    dtype: DTypeLike = "<u2",
    made_with: Fingerprint | None = None,
) -> Path:
    """Writes documents, each of any number of sequences of ids; returns the prefix."""
    with IndexedDatasetWriter(prefix, np.dtype(dtype), made_with) as writer:
        writer.add_documents(encoded(documents, writer.dtype))
    return Path(prefix)


def write_conversations(
    prefix: Path | str, conversations: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> Path:
    """Writes conversations, each as its ids and the mark of each id; returns the prefix."""
    documents = encoded([[ids] for ids, _ in conversations])
    loss_mask = np.array([mark for _, marks in conversations for mark in marks], dtype=np.uint8)
    with IndexedDatasetWriter(prefix, np.dtype("<u2"), has_loss_mask=True) as writer:
        writer.add_documents(documents._replace(loss_mask=loss_mask))
    return Path(prefix)


def encoded(
    documents: Iterable[Iterable[ArrayLike]], dtype: DTypeLike = "<u2", *, unfinished: bool = False
) -> EncodedDocuments:
    """Documents as a writer takes them; sequences without ids are left out."""
    sequences = [[np.asarray(ids) for ids in document] for document in documents]
    kept = [[ids for ids in document if ids.size] for document in sequences]
    every = [ids for document in kept for ids in document]
    return EncodedDocuments(
        np.concatenate([np.array([], dtype), *every]).astype(dtype),
        np.array([ids.size for ids in every], dtype=np.int32),
        np.array([len(document) for document in kept], dtype=np.int64),
        unfinished,
    )


def read_corpus(prefix: Path | str) -> Documents:
    """All documents, each a list of sequences of ids."""
    indexed = IndexedDataset(prefix)
    bounds = indexed.document_indices().tolist()
    return [[indexed[i].tolist() for i in range(begin, end)] for begin, end in pairwise(bounds)]


def corpus_bytes(prefix: Path | str, *suffixes: str) -> list[bytes]:
    """The contents of a corpus's files: of all three, or of those with these suffixes."""
    names = suffixes or ("bin", "idx", "bin.crc")
    return [Path(f"{prefix}.{suffix}").read_bytes() for suffix in names]
