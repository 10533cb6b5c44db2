"""Megatron's indexed data set: token ids in `<prefix>.bin`, sequence offsets in `<prefix>.idx`.

The index file, little-endian: 9 bytes magic, uint64 version 1, uint8 dtype code, uint64 S
sequences, uint64 D = documents + 1, int32[S] lengths in tokens, int64[S] byte offsets into the
.bin file, int64[D] the first sequence of each document and S at the end. The .bin file is the
sequences' token ids one after the other. The 8-byte arrays start at byte 34 + 4S, unaligned.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.block_checksums import CheckedFile, replacing_checked, sums_path, with_checks
from data.fingerprint import Fingerprint, fingerprint_path, read_fingerprint
from data.loss_mask import LossMask, loss_mask_path, open_loss_mask
from paro.errors import UserError, reading, writing
from paro.files.atomic_file import replacing
from paro.files.object_cache import ObjectCache
from paro.files.object_store import path_of
from paro.files.regular_file import RegularFile

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document entries
TOKEN_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
FLOAT_CODES = (6, 7)  # valid in the format, but not for token ids
PART_TOKENS = 2**22  # tokens per part when all tokens are read
MAX_SEQUENCE_LENGTH = np.iinfo(np.int32).max
REMEDY = "write both files again with tools/preprocess_data.py"
_CHECKED_AT_ONCE = 2**20  # index entries checked at a time, which bounds the memory of the check

Tokens = NDArray[Any]


def dtype_for_vocab(vocab_size: int) -> np.dtype[Any]:
    """Return Megatron's dtype of ids of this vocabulary: uint16, int32 from 65500 on."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


def bin_path(prefix: str | Path) -> Path:
    return path_of(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return path_of(f"{prefix}.idx")


def remove_dataset(prefix: str | Path) -> None:
    """Remove all files of a data set, also those that Megatron-LM does not know."""
    checked = bin_path(prefix), loss_mask_path(prefix)
    for path in (*checked, *map(sums_path, checked), idx_path(prefix), fingerprint_path(prefix)):
        path.unlink(missing_ok=True)


def sequence_pointers(lengths: NDArray[np.int32], itemsize: int) -> NDArray[np.int64]:
    """Return the byte offset of each sequence; all sums are 64 bits wide."""
    wide = lengths.astype("<i8")
    return (np.cumsum(wide) - wide) * itemsize


class IndexedDataset:
    """The sequences of one prefix; inconsistent files raise an error.

    Files are neither mapped nor cached: the index has 20 bytes a sequence, and every rank of a
    machine would hold its own copy. Only names are pickled, so that worker processes open the files
    themselves.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        with reading(f"{bin_path(self.prefix)}"):
            _check_present(self.prefix)
        self._index = RegularFile(idx_path(prefix))
        code, self._num_sequences, self._num_entries = _read_header(self._index)
        self.dtype = np.dtype(TOKEN_DTYPES[code])
        expected = self._bytes_by_index()
        if expected is None:
            raise UserError(f"{idx_path(prefix)} contradicts itself, it is damaged: {REMEDY}")
        content = RegularFile(bin_path(prefix))
        if content.size != expected:
            raise UserError(
                f"{bin_path(prefix)} holds {content.size} bytes where its .idx says {expected}: "
                f"truncated, or the two files do not belong together; {REMEDY}"
            )
        self._content = with_checks(content)
        self.loss_mask_file: CheckedFile | None = None
        if loss_mask_path(prefix).exists():
            self.loss_mask_file = open_loss_mask(self.prefix, self._content, self.num_tokens)

    def _bytes_by_index(self) -> int | None:
        """Return the size of the .bin file; None if the index contradicts itself."""
        count, entries = self._num_sequences, self._num_entries
        if entries == 0 or self._documents(0, 1) != 0 or self._documents(entries - 1, 1) != count:
            return None
        total = 0
        for start in range(0, count, _CHECKED_AT_ONCE):
            part = min(_CHECKED_AT_ONCE, count - start)
            sizes = self._lengths(start, part).astype(np.int64) * self.dtype.itemsize
            ends = total + np.cumsum(sizes)
            if sizes.min() < 0 or (self._pointers(start, part) != ends - sizes).any():
                return None
            total = int(ends[-1])
        for start in range(0, entries, _CHECKED_AT_ONCE):
            documents = self._documents(start, min(_CHECKED_AT_ONCE + 1, entries - start))
            if (np.diff(documents) < 0).any():
                return None
        return total

    def _lengths(self, first: int, count: int) -> NDArray[np.int32]:
        return np.frombuffer(self._index.read(HEADER.size + 4 * first, 4 * count), "<i4")

    def _pointers(self, first: int, count: int) -> NDArray[np.int64]:
        begin = HEADER.size + 4 * self._num_sequences
        return np.frombuffer(self._index.read(begin + 8 * first, 8 * count), "<i8")

    def _documents(self, first: int, count: int) -> NDArray[np.int64]:
        begin = HEADER.size + 12 * self._num_sequences
        return np.frombuffer(self._index.read(begin + 8 * first, 8 * count), "<i8")

    def __len__(self) -> int:
        return self._num_sequences

    @property
    def num_documents(self) -> int:
        return self._num_entries - 1

    @property
    def num_tokens(self) -> int:
        return self._content.size // self.dtype.itemsize

    @cached_property
    def made_with(self) -> Fingerprint | None:
        """The tokenizer that made the corpus; None if it is unknown."""
        return read_fingerprint(self.prefix)

    @property
    def has_checksums(self) -> bool:
        return isinstance(self._content, CheckedFile)

    def sequence_lengths(self) -> NDArray[np.int32]:
        """Return the tokens of every sequence, read from the file at each call."""
        return self._lengths(0, self._num_sequences)

    def document_indices(self) -> NDArray[np.int64]:
        """Read the first sequence of every document, and the number of sequences last."""
        return self._documents(0, self._num_entries)

    def tokens_in(self, first: int, last: int) -> int:
        """Return the tokens of the sequences from `first` to before `last`."""
        return (self._pointer(last) - self._pointer(first)) // self.dtype.itemsize

    def _pointer(self, index: int) -> int:
        return self._content.size if index == len(self) else int(self._pointers(index, 1)[0])

    def get(self, index: int, offset: int = 0, length: int | None = None) -> Tokens:
        """Read the ids of sequence `index` from `offset` on, `length` of them or all; read-only."""
        return self.read(*self._place(index, offset, length))

    __getitem__ = get

    def marks(self, index: int, offset: int = 0, length: int | None = None) -> LossMask:
        """Return the loss mask of the tokens that `get` returns; scripts read it by this name."""
        return self.read_marks(*self._place(index, offset, length))

    def _place(self, index: int, offset: int, length: int | None) -> tuple[int, int]:
        """Return (first token in the .bin file, number of tokens) of a part of a sequence."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        begin, end = self._pointers(index, 2).tolist()
        if index + 1 == len(self):
            end = self._content.size  # the last sequence ends at the end of the .bin file
        first, size = begin // self.dtype.itemsize, (end - begin) // self.dtype.itemsize
        stop = size if length is None else offset + length
        if not (0 <= offset <= stop <= size and 0 <= first <= self.num_tokens - size):
            raise UserError(
                f"{self._index.path} has no tokens {offset} to {stop} of sequence {index} any "
                "more: another program has changed it; restore it and run again"
            )
        return first + offset, stop - offset

    def read(self, begin: int, count: int) -> Tokens:
        """Read `count` ids of the .bin file from the id at `begin` on, of any sequences.

        Their blocks are checked, where there are checksums.
        """
        size = self.dtype.itemsize
        return np.frombuffer(self._content.read(begin * size, count * size), self.dtype)

    def read_marks(self, begin: int, count: int) -> LossMask:
        """Read the loss mask of `count` ids of the .bin file from the id at `begin` on."""
        assert self.loss_mask_file is not None, f"{self.prefix} has no loss mask"
        return np.frombuffer(self.loss_mask_file.read(begin, count), np.uint8)

    def part_ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the first id and the number of ids of each part in which all ids are read."""
        for begin in range(0, self.num_tokens, PART_TOKENS):
            yield begin, min(PART_TOKENS, self.num_tokens - begin)

    def __reduce__(self) -> tuple[Callable[[str, Path], IndexedDataset], tuple[str, Path]]:
        return _opened_again, (self.prefix, ObjectCache.folder)


def _opened_again(prefix: str, cache: Path) -> IndexedDataset:
    """Open a data set in another process, with the cache of the process that opened it before."""
    ObjectCache.folder = cache
    return IndexedDataset(prefix)


def _check_present(prefix: str) -> None:
    file = path_of(prefix)
    meant = "of a .bin and a .idx file as tools/preprocess_data.py writes them"
    if file.suffix in (".bin", ".idx") and file.is_file():
        meant = f"alone, {file.with_suffix('')}, without .bin or .idx"
    for path in (idx_path(prefix), bin_path(prefix)):
        if not path.is_file():
            raise UserError(f"{path} is missing: --data-path takes the prefix {meant}")


def _read_header(index: RegularFile) -> tuple[int, int, int]:
    """Return the code of the type, and the numbers of sequences and of entries of documents."""
    path, size = index.path, index.size
    if size < HEADER.size or index.read(0, len(MAGIC)) != MAGIC:
        raise UserError(f"{path} is not a Megatron index file (MMIDIDX): {REMEDY}")
    _, version, code, count, entries = HEADER.unpack(index.read(0, HEADER.size))
    if version != VERSION:
        raise UserError(f"{path} has format version {version}, only 1 is known: {REMEDY}")
    if code not in TOKEN_DTYPES:
        kind = "floating-point numbers" if code in FLOAT_CODES else f"an unknown type ({code})"
        raise UserError(f"{path} declares {kind} instead of token ids: {REMEDY}")
    expected = HEADER.size + 12 * count + 8 * entries
    if size == expected + count and count > 0:
        raise UserError(f"{path} is multimodal (it has modes); only text is supported: {REMEDY}")
    if size != expected:
        raise UserError(
            f"{path} holds {size} bytes where its header says {expected}, it is truncated or "
            f"damaged: {REMEDY}"
        )
    return code, count, entries


class EncodedDocuments(NamedTuple):
    """Documents ready to write: all ids, sequence lengths, number of sequences per document."""

    ids: Tokens  # all token ids, in the data set's dtype, checked against the vocabulary
    lengths: NDArray[np.int32]
    sequences: NDArray[np.int64]
    unfinished: bool = False  # True: the last sequence continues in the next batch
    loss_mask: LossMask | None = None  # an entry per id; None: not a corpus of conversations


class IndexedDatasetWriter:
    """A writer of one prefix: all files get their final names if the block succeeds, else none.

    The .bin file is streamed; the .idx file is written last, by `complete` or at the end.
    `tokenizer` is the fingerprint of the ids' tokenizer, if known. `has_loss_mask`: the corpus has
    conversations.
    """

    def __init__(
        self,
        prefix: str | Path,
        dtype: np.dtype[Any],
        tokenizer: Fingerprint | None = None,
        *,
        has_loss_mask: bool = False,
    ) -> None:
        self.prefix = str(prefix)
        self.dtype = dtype
        self._tokenizer = tokenizer
        self.has_loss_mask = has_loss_mask
        self.num_tokens = 0
        self.num_trained = 0
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._open_sequence = False
        self._files = self._open_files()

    @contextmanager
    def _open_files(self) -> Iterator[None]:
        bin_path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
        made_with, mask_path = self._tokenizer, loss_mask_path(self.prefix)
        with (
            replacing(idx_path(self.prefix)) as self._idx_file,
            replacing(fingerprint_path(self.prefix), wanted=made_with is not None) as fingerprint,
            replacing_checked(mask_path, wanted=self.has_loss_mask) as self._loss_mask,
            replacing_checked(bin_path(self.prefix)) as self._content,
        ):
            if made_with is not None:
                made_with.write(fingerprint)
            yield
            self.complete()

    def __enter__(self) -> IndexedDatasetWriter:
        with writing(f"{bin_path(self.prefix)}"):
            self._files.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._files.__exit__(*raised)

    def complete(self) -> None:
        """Write everything but the final names, so several writers can fail before any rename.

        No document can be added afterwards.
        """
        if self._content.stream.closed:
            return
        with writing(f"{bin_path(self.prefix)}"):
            self._content.complete()
            if self.has_loss_mask:
                self._loss_mask.write(self._content.sums.sum_of_table)
                self._loss_mask.complete()
            self._write_index(self._idx_file)

    @property
    def num_documents(self) -> int:
        return len(self._documents) - 1

    def add_documents(self, documents: EncodedDocuments) -> None:
        """Append many documents; no sequence may be empty; documents without any still count."""
        ids, lengths = documents.ids, documents.lengths
        assert ids.dtype == self.dtype, f"{ids.dtype} into a file of {self.dtype}"
        assert len(ids) == lengths.sum(dtype=np.int64), f"{len(ids)} ids in {lengths}"
        first = len(self._lengths)
        if self._open_sequence and len(lengths) > 0:
            length = self._lengths[-1] + int(lengths[0])
            if length > MAX_SEQUENCE_LENGTH:
                raise UserError(
                    f"a sequence of {length} tokens exceeds the format's {MAX_SEQUENCE_LENGTH}: "
                    "cut the document"
                )
            self._lengths[-1] = length
            first, lengths = first - 1, lengths[1:]
        self._write(ids, documents.loss_mask)
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())
        ends = first + np.cumsum(documents.sequences)
        self._open_sequence = documents.unfinished and (self._open_sequence or ends[-1] > first)
        closed = ends[:-1] if documents.unfinished else ends
        self._documents.frombytes(closed.astype(np.int64).tobytes())

    def add_dataset(self, dataset: IndexedDataset) -> None:
        """Append all documents of another data set of the same dtype; copies it in chunks."""
        if dataset.dtype != self.dtype:
            raise UserError(
                f"{bin_path(dataset.prefix)} holds {dataset.dtype.name} and {self.prefix} is to "
                f"hold {self.dtype.name}: only data sets of one tokenizer can be joined"
            )
        if (dataset.loss_mask_file is not None) != self.has_loss_mask:
            raise UserError(
                f"{dataset.prefix} has {'no ' if self.has_loss_mask else ''}conversations "
                "(.answered), unlike those before it: join those of one kind; training blends both"
            )
        for part in dataset.part_ranges():
            loss_mask = dataset.read_marks(*part) if self.has_loss_mask else None
            self._write(dataset.read(*part), loss_mask)
        lengths = dataset.sequence_lengths()
        documents = dataset.document_indices()[1:] + len(self._lengths)
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())
        self._documents.frombytes(documents.astype(np.int64).tobytes())

    def _write(self, ids: Tokens, loss_mask: LossMask | None) -> None:
        with writing(f"{bin_path(self.prefix)}"):
            self._content.write(ids.data)
            self.num_tokens += len(ids)
            if self.has_loss_mask:
                assert loss_mask is not None, "a conversation says which tokens are answered"
                self._loss_mask.write(loss_mask.data)
                self.num_trained += int(np.count_nonzero(loss_mask))

    def _write_index(self, path: Path) -> None:
        lengths = np.array(self._lengths, dtype="<i4")
        pointers = sequence_pointers(lengths, self.dtype.itemsize)
        documents = np.array(self._documents, dtype="<i8")
        code = next(code for code, name in TOKEN_DTYPES.items() if np.dtype(name) == self.dtype)
        with path.open("wb") as stream:
            stream.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(documents)))
            for part in (lengths, pointers, documents):
                stream.write(part.tobytes())
