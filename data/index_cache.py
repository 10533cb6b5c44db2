"""Disk cache of built indices under Megatron's file names, safe with concurrent builders.

File names contain the MD5 of a description of everything the indices depend on. Each file is
renamed into place; the description, which also has the checksums, comes last. Two processes that
build the same indices write the same bytes. Indices that do not match are rebuilt. What a sample
needs is read from the files when it is needed, so that no rank or worker has a copy of its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.atomic_file import replacing
from data.sample_order import (
    DOCUMENT_DTYPE,
    OrderPlan,
    SampleOrder,
    build_order,
    sample_index_dtype,
    shuffle_index_dtype,
)
from data.stored_array import StoredArray
from data.waits import Wait
from paro.errors import UserError, open_files_limit
from paro.untrusted.checksum import crc32
from paro.untrusted.regular_file import read_text

_POLL_SECONDS = 0.05
Arrays = Mapping[str, NDArray[Any]]  # name of an index: its array in memory
StoredArrays = Mapping[str, NDArray[Any] | StoredArray]
Expected = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]  # name of an index: shape, dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """The identity of cached indices: folder, split and kind, and the facts they depend on."""

    folder: Path
    split_name: str
    description: str
    kind: str = "GPTDataset"

    @property
    def digest(self) -> str:
        return hashlib.md5(self.description.encode(), usedforsecurity=False).hexdigest()

    def path(self, part: str) -> Path:
        return self.folder / f"{self.digest}-{self.kind}-{self.split_name}-{part}"


def cached_order(
    entry: CacheEntry, lengths: NDArray[np.int32], plan: OrderPlan
) -> tuple[SampleOrder, str]:
    """Return a plan's order and its source: the cache if it has an intact copy, else built now."""
    expected: Expected = {
        "document_index": ((plan.num_entries,), DOCUMENT_DTYPE),
        "sample_index": ((plan.total_samples + 1, 2), sample_index_dtype(plan, lengths)),
        "shuffle_index": ((plan.total_samples,), shuffle_index_dtype(plan)),
    }
    arrays, source = cached_arrays(entry, expected, lambda: build_order(lengths, plan)._asdict())
    return SampleOrder(**arrays), source


def cached_arrays(
    entry: CacheEntry, expected: Expected, build: Callable[[], Arrays]
) -> tuple[StoredArrays, str]:
    """Return an entry's arrays and their source: the cache if intact there, else built now.

    One process per machine builds while the others wait for its files. Machines do not wait for
    each other. If the folder cannot be written, the run continues without the cache.
    """
    arrays = _read(entry, expected)
    if arrays is not None:
        return arrays, f"indices read from {entry.folder}"
    with _alone_on_this_machine(entry):
        arrays = _read(entry, expected)
        if arrays is not None:
            return arrays, f"indices read from {entry.folder}"
        arrays = build()
        try:
            _write(entry, arrays)
        except OSError as error:
            # numpy gives no reason if only a part of an array was written.
            why = open_files_limit(error) or error.strerror or "no room is left"
            cause = f"{entry.folder} cannot be written: {why}"
            return arrays, f"indices kept in memory, {cause}"
    return _read(entry, expected) or arrays, f"indices written to {entry.folder}"


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
        _lock(descriptor, path)
        yield
        path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    """Take the lock and write this process into its file, for processes that wait."""
    wait: Wait | None = None
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if wait is None:
                holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
                who = f"process {holder or 'unknown'} of this machine"
                wait = Wait(f"{who}, which builds indices and holds the lock {path}")
            wait.check()
            time.sleep(_POLL_SECONDS)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)


def checksum(array: NDArray[Any] | StoredArray) -> int:
    """Return the CRC-32 of an array's bytes."""
    if not isinstance(array, StoredArray):
        return crc32(np.ascontiguousarray(array).data)
    found = 0
    for part in array.parts():
        found = crc32(part, found)
    return found


def _seal(entry: CacheEntry, arrays: StoredArrays) -> str:
    """Return the content of the description file: Megatron's, and a line of checksums."""
    sums = {name: checksum(array) for name, array in arrays.items()}
    return f"{entry.description}\n{json.dumps({'crc32': sums})}\n"


def _write(entry: CacheEntry, arrays: Arrays) -> None:
    entry.folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        with replacing(entry.path(f"{name}.npy")) as temporary, temporary.open("wb") as stream:
            np.save(stream, array, allow_pickle=False)
    with replacing(entry.path("description.txt")) as temporary:
        temporary.write_text(_seal(entry, arrays))


def _read(entry: CacheEntry, expected: Expected) -> StoredArrays | None:
    """Return the stored arrays; None if a file is missing or differs from what was written."""
    try:
        seal = read_text(entry.path("description.txt"))
        arrays = {
            name: StoredArray(entry.path(f"{name}.npy"), shape, dtype)
            for name, (shape, dtype) in expected.items()
        }
        return arrays if seal == _seal(entry, arrays) else None
    except (OSError, UserError):
        return None
