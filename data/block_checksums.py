"""CRC-32 of every block of `<prefix>.bin`, in `<prefix>.bin.crc`; reads of a block check it.

The file, little-endian: 8 bytes magic, uint32 version 1, uint32 bytes in a block, uint64 bytes in
the .bin file, uint32 CRC-32 of the table, uint32 CRC-32 of the 28 bytes before; the table, a uint32
CRC-32 for each block. The last block of the .bin file may be shorter.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from paro.errors import UserError, reading
from paro.files.atomic_file import replacing
from paro.files.checksum import crc32, crc32_of_file
from paro.files.object_store import path_of
from paro.files.regular_file import RegularFile

# A check reads whole blocks. With this size, samples of 2,048 tokens are read at nine tenths of the
# speed of mapped files if they are in the page cache, and at six times it if they are not; with
# 64 KiB at 0.6 and four times (tools/bench/bench_loader.py). Smaller blocks gain little, and the
# table, a 4,096th of the .bin file here, grows: opening it reads all of it.
BLOCK_BYTES = 2**14
MAX_BLOCK_BYTES = 2**24  # of files of other versions
MAGIC = b"PAROCRC\x00"
VERSION = 1
_FIELDS = struct.Struct("<8sIIQ4s")
_HEADER_BYTES = _FIELDS.size + 4


def sums_path(file: str | Path) -> Path:
    """Return the file with the checksums of another."""
    return path_of(f"{file}.crc")


class BlockSums:
    """The checksums of a .bin file, computed from its content part by part."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._table = array("I")
        self._begun = 0  # the CRC-32 so far of the last block, which is incomplete
        self._num_bytes = 0

    def update(self, content: bytes | memoryview | NDArray[Any]) -> None:
        """Continue with the next part of the file."""
        rest = memoryview(np.frombuffer(content, dtype=np.uint8).data)
        while rest:
            part = rest[: self._block_bytes - self._num_bytes % self._block_bytes]
            self._begun = crc32(part, self._begun)
            self._num_bytes += len(part)
            if self._num_bytes % self._block_bytes == 0:
                self._table.append(self._begun)
                self._begun = 0
            rest = rest[len(part) :]

    def _content(self) -> bytes:
        table = np.array(self._table, dtype="<u4").tobytes()
        unfinished = self._num_bytes % self._block_bytes > 0
        return table + self._begun.to_bytes(4, "little") if unfinished else table

    @property
    def sum_of_table(self) -> bytes:
        """The CRC-32 of the checksums of all parts so far."""
        return crc32(self._content()).to_bytes(4, "little")

    def write(self, path: Path) -> None:
        """Write the checksums of all parts so far."""
        size, num_bytes = self._block_bytes, self._num_bytes
        fields = _FIELDS.pack(MAGIC, VERSION, size, num_bytes, self.sum_of_table)
        path.write_bytes(fields + crc32(fields).to_bytes(4, "little") + self._content())


class CheckedWriter:
    """A writer of a file and of the checksums of its blocks, which `complete` writes."""

    def __init__(self, stream: BinaryIO, sums_file: Path) -> None:
        self.stream = stream
        self.sums = BlockSums()
        self._sums_file = sums_file

    def write(self, content: bytes | memoryview) -> None:
        self.stream.write(content)
        self.sums.update(content)

    def complete(self) -> None:
        self.stream.close()
        self.sums.write(self._sums_file)


@contextmanager
def replacing_checked(path: Path, *, wanted: bool = True) -> Iterator[CheckedWriter]:
    """Write a file and its checksums when the block succeeds; if unwanted, remove earlier ones."""
    with (
        replacing(sums_path(path), wanted=wanted) as sums_file,
        replacing(path, wanted=wanted) as temporary,
        temporary.open("wb") as stream,
    ):
        yield CheckedWriter(stream, sums_file)


class CheckedFile:
    """A .bin file whose blocks are compared with their checksums whenever they are read.

    `again`: advice on how to write checksums for a file that was replaced on purpose. Every read is
    checked: with many ranks and workers, nearly every read of a block is the first read of its
    process, and a repeated check costs microseconds.
    """

    def __init__(self, file: RegularFile, again: str) -> None:
        """Read the header of the checksums; `UserError` if they are damaged, or of another file."""
        self._file, self._again = file, again
        self.path, self.size = file.path, file.size
        self._sums = sums = RegularFile(sums_path(file.path))
        damaged = UserError(
            f"{sums.path} is damaged: restore it; if you know that {file.path} is not, {again}"
        )
        if sums.size < _HEADER_BYTES:
            raise damaged
        header = sums.read(0, _HEADER_BYTES)
        magic, version, block_bytes, num_bytes, sum_of_table = _FIELDS.unpack(header[:-4])
        if magic != MAGIC or header[-4:] != crc32(header[:-4]).to_bytes(4, "little"):
            raise damaged
        if version != VERSION:
            raise UserError(
                f"{sums.path} has format version {version}, only {VERSION} is known: {again}"
            )
        if not 0 < block_bytes <= MAX_BLOCK_BYTES:
            raise damaged
        if num_bytes != self.size:
            raise UserError(
                f"{sums.path} has the checksums of a file of {num_bytes:,} bytes and {file.path} "
                f"has {self.size:,}: restore the file that belongs to them; if it was replaced on "
                f"purpose, {again}"
            )
        if sums.size != _HEADER_BYTES + 4 * -(-num_bytes // block_bytes):
            raise damaged
        if crc32_of_file(sums, _HEADER_BYTES).to_bytes(4, "little") != sum_of_table:
            raise damaged
        self._block_bytes, self.sum_of_table = int(block_bytes), bytes(sum_of_table)

    def read(self, begin: int, length: int) -> memoryview:
        """Read `length` bytes from byte `begin` on; `UserError` if a block of them is damaged."""
        size = self._block_bytes
        first, last = begin // size, -(-(begin + length) // size)  # blocks [first, last)
        start = first * size
        content = memoryview(self._file.read(start, min(last * size, self.size) - start))
        sums = self._sums.read(_HEADER_BYTES + 4 * first, 4 * (last - first))
        for number, (expected,) in enumerate(struct.iter_unpack("<I", sums)):
            if crc32(content[number * size : (number + 1) * size]) != expected:
                damaged = start + number * size
                raise UserError(
                    f"{self._file.path} is damaged in bytes {damaged:,} to "
                    f"{min(damaged + size, self.size):,}, by their checksum in {self._sums.path}: "
                    f"restore it, or write it again with tools/preprocess_data.py; if it was "
                    f"replaced on purpose, {self._again}"
                )
        return content[begin - start : begin - start + length]


def with_checks(file: RegularFile) -> RegularFile | CheckedFile:
    """Return the .bin file; if checksums exist, every read is checked."""
    path = sums_path(file.path)
    with reading(str(path)):
        try:
            path.lstat()
        except FileNotFoundError:
            return file
    again = (
        f"remove {path} and write it again: tools/inspect_dataset.py --data-path "
        f"{file.path.removesuffix('.bin')} --write-checksums"
    )
    return CheckedFile(file, again)
