"""Documents written in bulk make the same files as documents written one by one."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import indexed_dataset
from data.indexed_dataset import EncodedDocuments, IndexedDatasetWriter
from paro.errors import UserError
from tests.helpers.corpora import corpus_bytes

DTYPE = np.dtype("<u2")
Document = list[list[int]]


def encoded(documents: list[Document], *, unfinished: bool = False) -> EncodedDocuments:
    sequences = list(chain.from_iterable(documents))
    return EncodedDocuments(
        np.array(list(chain.from_iterable(sequences)), dtype=DTYPE),
        np.array([len(ids) for ids in sequences], dtype=np.int32),
        np.array([len(document) for document in documents], dtype=np.int64),
        unfinished,
    )


SEQUENCE = st.lists(st.integers(0, 65535), min_size=1, max_size=5)
DOCUMENTS = st.lists(st.lists(SEQUENCE, max_size=3), max_size=5)
PARTS = st.lists(st.lists(st.integers(0, 65535), max_size=4), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(batches=st.lists(st.one_of(DOCUMENTS, PARTS.map(tuple)), max_size=5))
def test_in_bulk_is_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[Document] | tuple[list[int], ...]]
) -> None:
    """A tuple is a document of one sequence that arrives in parts."""
    folder = tmp_path_factory.mktemp("writer")
    with (
        IndexedDatasetWriter(folder / "bulk", DTYPE) as bulk,
        IndexedDatasetWriter(folder / "one", DTYPE) as one,
    ):
        for batch in batches:
            if isinstance(batch, tuple):
                one.add_document([list(chain.from_iterable(batch))])
                for number, ids in enumerate(batch, start=1):
                    document = [ids] if ids else []
                    bulk.add_documents(encoded([document], unfinished=number < len(batch)))
            else:
                bulk.add_documents(encoded(batch))
                for document in batch:
                    one.add_document(document)
        assert (bulk.num_tokens, bulk.num_documents) == (one.num_tokens, one.num_documents)
    assert corpus_bytes(folder / "bulk") == corpus_bytes(folder / "one")


def test_a_document_in_parts_may_become_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed_dataset, "MAX_SEQUENCE_LENGTH", 5)

    def write() -> None:
        with IndexedDatasetWriter(tmp_path / "x", DTYPE) as writer:
            writer.add_documents(encoded([[[1, 2, 3]]], unfinished=True))
            writer.add_documents(encoded([[[1, 2, 3]]]))

    with pytest.raises(UserError, match="a sequence of 6 tokens exceeds the format's 5"):
        write()
    assert list(tmp_path.iterdir()) == []
