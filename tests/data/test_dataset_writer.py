"""Documents make the same files in any number of batches."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import indexed_dataset
from data.indexed_dataset import IndexedDatasetWriter
from tests.helpers.corpora import corpus_bytes, encoded, read_corpus, write_corpus
from tests.helpers.refusals import refused

DTYPE = np.dtype("<u2")
Document = list[list[int]]


SEQUENCE = st.lists(st.integers(0, 65535), min_size=1, max_size=5)
DOCUMENTS = st.lists(st.lists(SEQUENCE, max_size=3), max_size=5)
PARTS = st.lists(st.lists(st.integers(0, 65535), max_size=4), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(batches=st.lists(st.one_of(DOCUMENTS, PARTS.map(tuple)), max_size=5))
def test_batches_and_parts_make_the_same_files_as_all_at_once(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[Document] | tuple[list[int], ...]]
) -> None:
    """A tuple is a document of one sequence that arrives in parts."""
    folder = tmp_path_factory.mktemp("writer")
    whole: list[Document] = []
    with IndexedDatasetWriter(folder / "batches", DTYPE) as writer:
        for batch in batches:
            if isinstance(batch, tuple):
                whole.append([list(chain.from_iterable(batch))])
                for number, ids in enumerate(batch, start=1):
                    writer.add_documents(encoded([[ids]], unfinished=number < len(batch)))
            else:
                whole += batch
                writer.add_documents(encoded(batch))
        assert writer.num_documents == len(whole)
    write_corpus(folder / "whole", whole)
    assert corpus_bytes(folder / "batches") == corpus_bytes(folder / "whole")
    expected = [[ids for ids in document if ids] for document in whole]
    assert read_corpus(folder / "batches") == expected


def test_a_document_in_parts_may_become_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed_dataset, "MAX_SEQUENCE_LENGTH", 5)

    def write() -> None:
        with IndexedDatasetWriter(tmp_path / "x", DTYPE) as writer:
            writer.add_documents(encoded([[[1, 2, 3]]], unfinished=True))
            writer.add_documents(encoded([[[1, 2, 3]]]))

    refused(write, "a sequence of 6 tokens exceeds the format's 5")
    assert list(tmp_path.iterdir()) == []
