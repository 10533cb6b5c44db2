"""Disk cache of built indices under Megatron's file names, safe with concurrent builders.

File names contain the MD5 of a description of everything the indices depend on. Each file is
renamed into place; the description, which also has the checksums, comes last. Two processes that
build the same indices write the same bytes. Indices that do not match are rebuilt. What a sample
needs is read from the files when it is needed, so that no rank or worker has a copy of its own.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from paro.errors import UserError, open_files_limit
from paro.files.atomic_file import replace_file, replacing
from paro.files.checksum import crc32_of_file
from paro.files.regular_file import RegularFile, read_text
from paro.files.waits import wait_for_lock

_HEADER_BYTES = 2**14  # largest .npy header that numpy writes for arrays of numbers
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
Indices = TypeVar("Indices", bound=NamedTuple)  # arrays, by the names of their files


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """The identity of cached indices: folder, split, and the facts they depend on."""

    folder: Path
    split_name: str
    facts: Mapping[str, Any]  # with the `class` of the data set

    @property
    def description(self) -> str:
        return json.dumps(self.facts, indent=4)

    @property
    def digest(self) -> str:
        return hashlib.md5(self.description.encode(), usedforsecurity=False).hexdigest()

    def path(self, part: str) -> Path:
        return self.folder / f"{self.digest}-{self.facts['class']}-{self.split_name}-{part}"


def cached(
    entry: CacheEntry, kind: type[Indices], build: Callable[[], Indices]
) -> tuple[Indices, str]:
    """Return an entry's arrays and their source: the cache if intact there, else built now.

    One process per machine builds while the others wait for its files. Machines do not wait for
    each other. If the folder cannot be written, the run continues without the cache.
    """
    if (indices := _read(entry, kind)) is not None:
        return indices, f"indices read from {entry.folder}"
    with _alone_on_this_machine(entry):
        if (indices := _read(entry, kind)) is not None:
            return indices, f"indices read from {entry.folder}"
        indices = build()
        try:
            _write(entry, indices)
        except (OSError, UserError) as error:
            # numpy gives no reason if only a part of an array was written.
            why = error.strerror if isinstance(error, OSError) else str(error)
            why = open_files_limit(error) or why or "no room is left"
            return indices, f"indices kept in memory, {entry.folder} cannot be written: {why}"
    return _read(entry, kind) or indices, f"indices written to {entry.folder}"


@contextmanager
def _alone_on_this_machine(entry: CacheEntry) -> Iterator[None]:
    """Hold the machine-wide lock of an entry; the end of the holder's process releases it.

    The lock file is in the local temporary folder, since not every shared folder supports locks.
    Removing the lock file is safe: a later process finds the entry, or builds the same bytes.
    """
    key = hashlib.md5(f"{entry.folder.absolute()} {entry.digest}".encode(), usedforsecurity=False)
    path = Path(tempfile.gettempdir()) / f"llama-paro-{os.getuid()}-{key.hexdigest()}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:  # no lock possible: every process builds
        yield
        return
    try:
        holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
        who = f"process {holder or 'unknown'} of this machine"
        wait_for_lock(descriptor, f"{who}, which builds indices and holds the lock {path}")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)  # for processes that wait
        yield
        path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _sealed(entry: CacheEntry, sums: Mapping[str, int]) -> str:
    """Return the content of the description file: Megatron's, and a line of checksums."""
    return f"{entry.description}\n{json.dumps({'crc32': sums})}\n"


def _write(entry: CacheEntry, indices: NamedTuple) -> None:
    entry.folder.mkdir(parents=True, exist_ok=True)
    sums = {}
    for name, array in indices._asdict().items():
        with replacing(entry.path(f"{name}.npy")) as temporary:
            with temporary.open("wb") as stream:
                np.save(stream, array, allow_pickle=False)
            sums[name] = crc32_of_file(RegularFile(temporary))
    replace_file(entry.path("description.txt"), _sealed(entry, sums))


def _read(entry: CacheEntry, kind: type[Indices]) -> Indices | None:
    """Return the stored arrays; None if a file is missing or has changed since it was written."""
    try:
        arrays = {name: StoredArray(entry.path(f"{name}.npy")) for name in kind._fields}
        sums = {name: crc32_of_file(array.file) for name, array in arrays.items()}
        sealed = read_text(entry.path("description.txt"))
    except (OSError, UserError):
        return None
    return kind._make(arrays.values()) if sealed == _sealed(entry, sums) else None


class StoredArray:
    """A .npy file of numbers that is read row by row, as its own header describes it.

    The file is read, not mapped: if another program truncates a mapped file, the process ends with
    SIGBUS. All processes of a machine share the file's pages in the page cache.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)
        self._open()

    def _open(self) -> None:
        self.file = RegularFile(self._path, remedy="run again, and it is written again")
        head = io.BytesIO(self.file.read(0, min(_HEADER_BYTES, self.file.size)))
        try:
            self.shape, _, self.dtype = _HEADERS[npy.read_magic(head)](head)
        except Exception:  # numpy's parser fails in many ways
            raise UserError(f"{self._path} is no array of numpy's") from None
        self._begin = head.tell()
        self._row_bytes = prod(self.shape[1:]) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: int | slice) -> NDArray[Any]:
        """Read a row, or a slice of rows, from the file; nothing is cached."""
        wanted = key if isinstance(key, slice) else slice(key, key + 1)
        begin, stop, step = wanted.indices(len(self))
        assert step == 1, "neighbouring rows"
        rows = np.frombuffer(self._read(begin, max(0, stop - begin)), self.dtype)
        return rows.reshape(-1, *self.shape[1:])[slice(None) if isinstance(key, slice) else 0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return all rows, for numpy's functions."""
        return self[:] if dtype is None else self[:].astype(dtype)

    def _read(self, begin: int, count: int) -> bytes:
        first, length = self._begin + begin * self._row_bytes, count * self._row_bytes
        try:
            return self.file.read(first, length)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        # Over NFS: another machine has replaced the file by an equal one, which it built too.
        self._open()
        return self.file.read(first, length)

    def __reduce__(self) -> tuple[type[StoredArray], tuple[str]]:
        return StoredArray, (self._path,)
