"""The .bin/.idx format and its checksums: all corruptions, and documents written in batches."""

from __future__ import annotations

import errno
import os
import pickle
import re
import struct
import zlib
from collections.abc import Callable
from functools import partial
from itertools import chain, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import indexed_dataset
from data.block_checksums import BLOCK_BYTES, sums_path
from data.indexed_dataset import (
    HEADER,
    IndexedDataset,
    IndexedDatasetWriter,
    dtype_for_vocab,
    sequence_pointers,
)
from paro.files.atomic_file import replacing
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
def test_a_file_cut_anywhere_or_missing_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    write(tmp_path / "x", DOCUMENTS)
    content = path.read_bytes()
    for kept in range(len(content)):
        path.write_bytes(content[:kept])
        message = refused(partial(IndexedDataset, tmp_path / "x"), path.name)
        assert f"holds {kept} bytes" in message or (suffix == "idx" and kept < HEADER.size)
    path.unlink()
    refused(partial(IndexedDataset, tmp_path / "x"), f"x.{suffix} is missing ... --data-path")


def test_type_follows_the_vocabulary() -> None:
    assert [dtype_for_vocab(size).name for size in (65499, 65500)] == ["uint16", "int32"]


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


def test_files_of_other_kinds_are_named(tmp_path: Path) -> None:
    write(tmp_path / "x", DOCUMENTS)
    refused(lambda: IndexedDataset(tmp_path / "x.bin"), "without .bin or .idx")
    with (tmp_path / "x.idx").open("ab") as stream:
        stream.write(bytes(3))
    refused(lambda: IndexedDataset(tmp_path / "x"), "multimodal")


# DOCUMENTS make 3 sequences and 4 document entries: lengths at 34, pointers 46, documents 70.
def test_a_damaged_index_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for at, content, message in (
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
    ):
        path = Path(f"{write(tmp_path / 'x', DOCUMENTS)}.idx")
        whole = bytearray(path.read_bytes())
        assert len(whole) == 102
        whole[at : at + len(content)] = content
        path.write_bytes(whole)
        for entries in (1, 2, 2**20):  # also where a part of the check ends
            monkeypatch.setattr(indexed_dataset, "_CHECKED_AT_ONCE", entries)
            remedy = "tools/preprocess_data.py"
            refused(partial(IndexedDataset, tmp_path / "x"), f"x.idx {message}", remedy)


# Writing


IDS = st.lists(st.integers(0, 65535), min_size=1, max_size=5)
SEVERAL = st.lists(st.lists(IDS, max_size=3), max_size=5)
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


NUM_TOKENS = 3 * BLOCK_BYTES // 2 + 500  # three whole blocks, and a part of one
SEQUENCE = 1000


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    ids = np.random.default_rng(0).integers(0, 60_000, NUM_TOKENS).astype("<u2")
    begins = range(0, NUM_TOKENS, SEQUENCE)
    return write_corpus(tmp_path / "x", ([ids[at : at + SEQUENCE]] for at in begins))


def flip(path: Path, place: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def test_the_files_bytes_are_the_documented_ones(prefix: Path) -> None:
    content = Path(f"{prefix}.bin").read_bytes()
    blocks = [content[begin : begin + 16384] for begin in range(0, len(content), 16384)]
    table = struct.pack("<4I", *map(zlib.crc32, blocks))
    fields = b"PAROCRC\0" + struct.pack("<IIQI", 1, 16384, len(content), zlib.crc32(table))
    assert len(fields) == 28
    expected = fields + struct.pack("<I", zlib.crc32(fields)) + table
    assert sums_path(f"{prefix}.bin").read_bytes() == expected


def test_whole_data_are_read_as_they_are_in_any_pieces(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, plain = IndexedDataset(prefix), np.fromfile(f"{prefix}.bin", "<u2")
    assert checked.has_checksums
    assert checked.read(0, NUM_TOKENS).tolist() == plain.tolist()
    for begin, count in ((0, 0), (8191, 2), (8192, 8192), (NUM_TOKENS - 1, 1), (NUM_TOKENS, 0)):
        assert checked.read(begin, count).tolist() == plain[begin : begin + count].tolist()
    assert np.concatenate(list(checked)).tolist() == plain.tolist()
    pread = os.pread  # a read that the system shortens is continued
    monkeypatch.setattr(os, "pread", lambda file, length, at: pread(file, min(length, 1000), at))
    assert checked.read(0, NUM_TOKENS).tolist() == plain.tolist()


@pytest.mark.parametrize("place", [0, 16383, 16384, 40_000, 2 * NUM_TOKENS - 1])
def test_a_flipped_bit_is_found_by_every_read_of_its_block_and_by_no_other(
    prefix: Path, place: int
) -> None:
    whole = IndexedDataset(prefix).read(0, NUM_TOKENS)
    flip(Path(f"{prefix}.bin"), place, bit=place % 8)
    damaged = IndexedDataset(prefix)
    begin = place // BLOCK_BYTES * BLOCK_BYTES
    end = min(begin + BLOCK_BYTES, 2 * NUM_TOKENS)
    for _ in range(2):
        for first, count in ((begin // 2, 1), (end // 2 - 1, 1), (0, NUM_TOKENS), (place // 2, 1)):
            refused(
                partial(damaged.read, first, count),
                f"{prefix}.bin ... bytes {begin:,} to {end:,}, ... {prefix}.bin.crc",
                f"--data-path {prefix} --write-checksums",
            )
    for first, stop in ((0, begin // 2), (end // 2, NUM_TOKENS)):
        if first < stop:
            assert damaged.read(first, stop - first).tolist() == whole[first:stop].tolist()


def test_without_checksums_nothing_is_checked(prefix: Path) -> None:
    sums_path(f"{prefix}.bin").unlink()
    flip(Path(f"{prefix}.bin"), 5)
    unchecked = IndexedDataset(prefix)
    assert not unchecked.has_checksums
    assert len(unchecked[0]) == SEQUENCE


def test_whatever_is_wrong_with_the_checksums_is_noticed_at_open(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "x", [[np.arange(20_000)]])
    path = sums_path(f"{prefix}.bin")
    whole = path.read_bytes()
    flipped = [
        whole[:place] + bytes([whole[place] ^ bits]) + whole[place + 1 :]
        for place in range(len(whole))
        for bits in (1, 128, 255)
    ]
    cut = [whole[:length] for length in range(len(whole))]
    for content in (*flipped, *cut, whole + b"\0", whole + b"123456789"):
        path.write_bytes(content)
        remedy = f"remove {path} ... tools/inspect_dataset.py --data-path {prefix} "
        refused(lambda: IndexedDataset(prefix), f"{path} is damaged", remedy)


def forged(version: int, block_bytes: int, num_bytes: int) -> Callable[[Path], object]:
    """Writes checksums without a table."""
    fields = b"PAROCRC\0" + struct.pack("<IIQI", version, block_bytes, num_bytes, 0)
    return lambda path: path.write_bytes(fields + struct.pack("<I", zlib.crc32(fields)))


SIZE = 2 * NUM_TOKENS


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (forged(2, BLOCK_BYTES, SIZE), "has format version 2, only 1 is known ... {remedy}"),
        (forged(1, 0, SIZE), "is damaged ... {remedy}"),
        (forged(1, 1, SIZE), "is damaged ... {remedy}"),
        (forged(1, BLOCK_BYTES, SIZE - 1), "has the checksums of ... 50,151 bytes ... {remedy}"),
        (forged(1, 1, 2**63), "of a file of 9,223,372,036,854,775,808 bytes ... {remedy}"),
        (os.mkfifo, "is no regular file"),
        (os.mkdir, "cannot be read: Is a directory"),
        (lambda path: path.symlink_to("none"), "cannot be read: No such file"),
        (lambda path: path.symlink_to(path.name), "cannot be read: Too many levels"),
    ],
)
def test_checksums_that_do_not_fit_or_cannot_be_read_are_not_taken_for_absent(
    prefix: Path, make: Callable[[Path], object], message: str
) -> None:
    path = sums_path(f"{prefix}.bin")
    path.unlink()
    make(path)
    refused(lambda: IndexedDataset(prefix), f"{path} ... {message.format(remedy=f'remove {path}')}")


def test_a_file_that_changes_while_it_is_open_is_one_line(prefix: Path) -> None:
    indexed = IndexedDataset(prefix)
    for suffix in ("bin", "bin.crc", "idx"):
        path = Path(f"{prefix}.{suffix}")
        content = path.read_bytes()
        os.truncate(path, 20)
        message = f"{path} has 20 bytes ... {len(content):,} ... restore it and run again"
        refused(lambda: indexed.get(3), message)
        path.write_bytes(content)
        indexed.get(3)
    path.write_bytes(content[:40] + b"\xff" * (len(content) - 40))
    refused(lambda: indexed.get(3), f"{path} ... sequence 3 ... changed")


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_an_error_of_the_disk_names_the_file(
    prefix: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexed = IndexedDataset(prefix)
    pread, path = os.pread, os.stat(f"{prefix}.{suffix}")

    def fail(descriptor: int, length: int, begin: int) -> bytes:
        if os.fstat(descriptor).st_ino == path.st_ino:
            raise OSError(errno.EIO, "Input/output error")
        return pread(descriptor, length, begin)

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(OSError, match=f"x.{suffix} cannot be read: Input/output error") as caught:
        indexed.get(0)
    assert caught.value.errno == errno.EIO


def test_no_descriptor_is_left_open(prefix: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    indexed = IndexedDataset(prefix)
    assert len(os.listdir("/proc/self/fd")) == before + 3
    del indexed
    assert len(os.listdir("/proc/self/fd")) == before


def test_writers_of_the_same_file_do_not_share_a_name(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    with replacing(path) as first, replacing(path) as second:
        first.write_text("first")
        second.write_text("second")
        assert first != second
    assert path.read_text() == "first"  # the one that ended last
