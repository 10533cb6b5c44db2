"""The .bin/.idx format: bytes as documented, parts, and all corruptions."""

from __future__ import annotations

import pickle
import struct
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from data import indexed_dataset
from data.indexed_dataset import (
    HEADER,
    IndexedDataset,
    IndexedDatasetWriter,
    dtype_for_vocab,
    sequence_pointers,
)
from paro.errors import UserError
from tests.helpers.corpora import Documents, encoded, write_corpus
from tests.helpers.refusals import refused

DOCUMENTS: Documents = [[[1, 2, 3]], [], [[4], [5, 6]]]


def write(prefix: Path, documents: Documents, vocab_size: int = 100) -> Path:
    return write_corpus(prefix, documents, dtype_for_vocab(vocab_size))


def test_two_sequences_make_the_documented_82_bytes(tmp_path: Path) -> None:
    write(tmp_path / "x", [[[1, 2, 3]], [[4, 5]]])
    assert (tmp_path / "x.idx").read_bytes().hex() == (
        "4d4d49444944580000" "0100000000000000" "08" "0200000000000000" "0300000000000000"
        "03000000" "02000000" "0000000000000000" "0600000000000000"
        "0000000000000000" "0100000000000000" "0200000000000000"
    )  # fmt: skip
    assert (tmp_path / "x.bin").read_bytes().hex() == "01000200030004000500"


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    index=st.integers(0, 5),
    cuts=st.tuples(st.integers(0, 6), st.integers(0, 6)),
)
def test_any_part_of_any_sequence(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    index: int,
    cuts: tuple[int, int],
) -> None:
    sequences = [list(range(10 * i, 10 * i + length)) for i, length in enumerate(lengths)]
    indexed = IndexedDataset(write(tmp_path_factory.mktemp("data") / "x", [sequences]))
    whole = sequences[index % len(sequences)]
    begin, end = sorted(min(cut, len(whole)) for cut in cuts)
    part = indexed.get(index % len(sequences), begin, end - begin)
    assert part.tolist() == whole[begin:end]
    assert indexed.get(index % len(sequences), begin).tolist() == whole[begin:]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_whatever_byte_of_header_or_lengths_is_wrong_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    prefix = write(tmp_path_factory.mktemp("data") / "x", DOCUMENTS)
    path = Path(f"{prefix}.idx")
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, HEADER.size + 4 * 3 - 1))
    changed = content[place] ^ data.draw(st.integers(1, 255))
    # Signed ids of the same size: nothing else in the files says which they are.
    assume((place, content[place], changed) != (17, 8, 3))
    content[place] = changed
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"x\.(idx|bin) ") as caught:
        IndexedDataset(prefix)
    assert "\n" not in str(caught.value)


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
    ("vocab_size", "name"),
    [(10, "uint16"), (65499, "uint16"), (65500, "int32"), (128256, "int32")],
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


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_missing_file_is_named(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / "x", DOCUMENTS)
    (tmp_path / f"x{suffix}").unlink()
    refused(lambda: IndexedDataset(tmp_path / "x"), f"x{suffix} is missing ... --data-path")


def test_a_prefix_given_with_its_suffix_is_explained(tmp_path: Path) -> None:
    write(tmp_path / "x", DOCUMENTS)
    refused(lambda: IndexedDataset(tmp_path / "x.bin"), "without .bin or .idx")


def patched(offset: int, layout: str, value: int) -> tuple[str, int, bytes]:
    return ".idx", offset, struct.pack(layout, value)


# DOCUMENTS make 3 sequences and 4 document entries: lengths at 34, pointers 46, documents 70.
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (patched(0, "B", 0x4E), "x.idx is not a Megatron index file"),
        (patched(9, "<Q", 2), "x.idx has format version 2"),
        (patched(17, "B", 6), "x.idx declares floating-point numbers"),
        (patched(17, "B", 99), "x.idx declares an unknown type"),
        (patched(17, "B", 4), "x.idx contradicts itself"),  # pointers are of another type
        (patched(18, "<Q", 2**60), "x.idx holds 102 bytes where its header says"),
        (patched(34, "<i", -3), "x.idx contradicts itself"),
        ((".idx", 34, struct.pack("<2i", -1, 5)), "x.idx contradicts itself"),  # the sum is right
        (patched(46, "<q", 2), "x.idx contradicts itself"),
        (patched(70, "<q", 1), "x.idx contradicts itself"),
        (patched(94, "<q", 2), "x.idx contradicts itself"),
    ],
)
def test_a_damaged_index_is_refused(
    tmp_path: Path, change: tuple[str, int, bytes], message: str
) -> None:
    write(tmp_path / "x", DOCUMENTS)
    suffix, offset, content = change
    path = tmp_path / f"x{suffix}"
    whole = bytearray(path.read_bytes())
    assert len(whole) == 102
    whole[offset : offset + len(content)] = content
    path.write_bytes(whole)
    refused(lambda: IndexedDataset(tmp_path / "x"), message, "tools/preprocess_data.py")


def test_multimodal_files_are_refused_as_such(tmp_path: Path) -> None:
    write(tmp_path / "x", DOCUMENTS)
    with (tmp_path / "x.idx").open("ab") as stream:
        stream.write(bytes(3))
    refused(lambda: IndexedDataset(tmp_path / "x"), "multimodal")


@pytest.mark.parametrize(
    ("at", "value"), [(54, 10_000), (54, 0), (34 + 12 * 3 + 8, 99), (34 + 12 * 3 + 8, -1)]
)
def test_every_pointer_and_document_is_checked_at_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, value: int
) -> None:
    write(tmp_path / "x", DOCUMENTS)
    path = tmp_path / "x.idx"
    whole = bytearray(path.read_bytes())
    whole[at : at + 8] = struct.pack("<q", value)  # of the middle sequence, or a document
    for entries in (1, 2, 2**20):  # also where a part of the check ends
        monkeypatch.setattr(indexed_dataset, "_CHECKED_AT_ONCE", entries)
        path.write_bytes(bytes(whole))
        refused(partial(IndexedDataset, tmp_path / "x"), "contradicts itself, it is damaged")
