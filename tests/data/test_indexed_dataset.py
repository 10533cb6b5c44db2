"""The .bin/.idx format: all corruptions, and documents written in any number of batches."""

from __future__ import annotations

import pickle
import re
import struct
from functools import partial
from itertools import chain, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import indexed_dataset
from data.indexed_dataset import (
    HEADER,
    IndexedDataset,
    IndexedDatasetWriter,
    dtype_for_vocab,
    sequence_pointers,
)
from tests.helpers.corpora import Documents, corpus_bytes, encoded, read_corpus, write_corpus
from tests.helpers.refusals import refused

DOCUMENTS: Documents = [[[1, 2, 3]], [], [[4], [5, 6]]]


def write(prefix: Path, documents: Documents, vocab_size: int = 100) -> Path:
    return write_corpus(prefix, documents, dtype_for_vocab(vocab_size))


def test_whatever_byte_of_header_or_lengths_is_wrong_is_noticed(tmp_path: Path) -> None:
    path = Path(f"{write(tmp_path / 'x', DOCUMENTS)}.idx")
    whole = path.read_bytes()
    for place, flipped in product(range(HEADER.size + 4 * 3), (1, 2, 11, 128, 255)):
        content = bytearray(whole)
        content[place] ^= flipped
        # Signed ids of the same size: nothing else in the files says which they are.
        if (place, content[place]) != (17, 3):
            path.write_bytes(content)
            line = refused(partial(IndexedDataset, tmp_path / "x"))
            assert re.match(rf".*{tmp_path}/x\.(idx|bin) ", line), line


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    write(tmp_path / "x", DOCUMENTS)
    content = path.read_bytes()
    for kept in range(len(content)):
        path.write_bytes(content[:kept])
        told = refused(partial(IndexedDataset, tmp_path / "x"), path.name)
        assert f"holds {kept} bytes" in told or (suffix == "idx" and kept < HEADER.size)


@pytest.mark.parametrize(
    ("vocab_size", "name"), [(10, "uint16"), (65499, "uint16"), (65500, "int32"), (128256, "int32")]
)
def test_type_follows_the_vocabulary(vocab_size: int, name: str) -> None:
    assert dtype_for_vocab(vocab_size).name == name


def test_data_beyond_4_gib_is_read_where_it_lies(tmp_path: Path) -> None:
    lengths = np.array([2**31 - 8, 2**31 - 8, 3], dtype="<i4")
    with (tmp_path / "x.idx").open("wb") as stream:
        stream.write(HEADER.pack(b"MMIDIDX\0\0", 1, 8, 3, 2))
        stream.write(lengths.tobytes() + sequence_pointers(lengths, 2).tobytes())
        stream.write(struct.pack("<2q", 0, 3))
    with (tmp_path / "x.bin").open("wb") as stream:  # sparse: takes no disk space
        stream.seek(2 * int(lengths[:2].sum(dtype=np.int64)))
        stream.write(struct.pack("<3H", 11, 12, 13))
    assert IndexedDataset(tmp_path / "x").get(2, 1).tolist() == [12, 13]


def test_pickle_carries_the_prefix_and_not_the_data(tmp_path: Path) -> None:
    indexed = IndexedDataset(write(tmp_path / "x", [[[5] * 10_000]]))
    pickled = pickle.dumps(indexed)
    assert len(pickled) < 1000
    assert pickle.loads(pickled)[0].tolist() == [5] * 10_000


def test_an_error_while_writing_leaves_the_old_files_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "x", DOCUMENTS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail() -> None:
        with IndexedDatasetWriter(tmp_path / "x", np.dtype("<u2")) as writer:
            writer.add_documents(encoded([[[9, 9, 9]]]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_files_of_other_kinds_and_missing_ones_are_named(tmp_path: Path) -> None:
    write(tmp_path / "x", DOCUMENTS)
    refused(lambda: IndexedDataset(tmp_path / "x.bin"), "without .bin or .idx")
    with (tmp_path / "x.idx").open("ab") as stream:
        stream.write(bytes(3))
    refused(lambda: IndexedDataset(tmp_path / "x"), "multimodal")
    for suffix in (".idx", ".bin"):
        write(tmp_path / "x", DOCUMENTS)
        (tmp_path / f"x{suffix}").unlink()
        told = f"x{suffix} is missing ... --data-path"
        refused(partial(IndexedDataset, tmp_path / "x"), told)


# DOCUMENTS make 3 sequences and 4 document entries: lengths at 34, pointers 46, documents 70.
@pytest.mark.parametrize(
    ("at", "content", "told"),
    [
        (0, b"\x4e", "is not a Megatron index file"),
        (9, struct.pack("<Q", 2), "has format version 2"),
        (17, b"\6", "declares floating-point numbers"),
        (17, b"\x63", "declares an unknown type"),
        (17, b"\4", "contradicts itself"),  # pointers are of another type
        (18, struct.pack("<Q", 2**60), "holds 102 bytes where its header says"),
        (34, struct.pack("<i", -3), "contradicts itself"),
        (34, struct.pack("<2i", -1, 5), "contradicts itself"),  # the sum is right
        *(
            (at, struct.pack("<q", value), "contradicts itself, it is damaged")
            for at, value in ((46, 2), (54, 10_000), (54, 0), (70, 1), (78, 99), (78, -1), (94, 2))
        ),
    ],
)
def test_a_damaged_index_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, content: bytes, told: str
) -> None:
    path = Path(f"{write(tmp_path / 'x', DOCUMENTS)}.idx")
    whole = bytearray(path.read_bytes())
    assert len(whole) == 102
    whole[at : at + len(content)] = content
    path.write_bytes(whole)
    for entries in (1, 2, 2**20):  # also where a part of the check ends
        monkeypatch.setattr(indexed_dataset, "_CHECKED_AT_ONCE", entries)
        remedy = "tools/preprocess_data.py"
        refused(partial(IndexedDataset, tmp_path / "x"), f"x.idx {told}", remedy)


# Writing


SEQUENCE = st.lists(st.integers(0, 65535), min_size=1, max_size=5)
SEVERAL = st.lists(st.lists(SEQUENCE, max_size=3), max_size=5)
PARTS = st.lists(st.lists(st.integers(0, 65535), max_size=4), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(batches=st.lists(st.one_of(SEVERAL, PARTS.map(tuple)), max_size=5))
def test_batches_and_parts_make_the_same_files_as_all_at_once(
    tmp_path_factory: pytest.TempPathFactory, batches: list[Documents | tuple[list[int], ...]]
) -> None:
    """A tuple is a document of one sequence that arrives in parts."""
    folder = tmp_path_factory.mktemp("writer")
    whole: Documents = []
    with IndexedDatasetWriter(folder / "batches", np.dtype("<u2")) as writer:
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
        with IndexedDatasetWriter(tmp_path / "x", np.dtype("<u2")) as writer:
            writer.add_documents(encoded([[[1, 2, 3]]], unfinished=True))
            writer.add_documents(encoded([[[1, 2, 3]]]))

    refused(write, "a sequence of 6 tokens exceeds the format's 5")
    assert list(tmp_path.iterdir()) == []
