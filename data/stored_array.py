"""An array that stays in its `.npy` file: every access reads the rows that it asks for."""

from __future__ import annotations

import errno
import io
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from paro.errors import UserError
from paro.untrusted.regular_file import RegularFile

_HEADER_BYTES = 2**14  # largest .npy header that numpy writes for arrays of numbers
_PART_BYTES = 2**22
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


class StoredArray:
    """A .npy file read row by row; `UserError` if shape or type differ from the expected ones.

    The file is read, not mapped: if another program truncates a mapped file, the process ends with
    SIGBUS. All processes of a machine share the file's pages in the page cache.
    """

    def __init__(self, path: str | Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape = shape
        self.dtype = dtype
        self._path = str(path)
        self._row_bytes = prod(shape[1:]) * dtype.itemsize
        self._open()

    def _open(self) -> None:
        self._file = RegularFile(self._path, remedy="run again, and it is written again")
        head = io.BytesIO(self._file.read(0, min(_HEADER_BYTES, self._file.size)))
        try:
            shape, is_fortran, dtype = _HEADERS[npy.read_magic(head)](head)
        except (ValueError, KeyError):
            raise UserError(f"{self._path} is no array of numpy's") from None
        self._begin = head.tell()
        size = self._begin + len(self) * self._row_bytes
        if (shape, dtype, self._file.size) != (self.shape, self.dtype, size) or is_fortran:
            raise UserError(f"{self._path} does not hold {self.shape} numbers of {self.dtype}")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: int | slice) -> NDArray[Any]:
        """Read a row, or a slice of rows, from the file; nothing is cached."""
        begin, stop, step = (key if isinstance(key, slice) else slice(key, key + 1)).indices(
            len(self)
        )
        assert step == 1, "neighbouring rows"
        rows = np.frombuffer(self._read(begin, max(0, stop - begin)), self.dtype)
        return rows.reshape(-1, *self.shape[1:])[slice(None) if isinstance(key, slice) else 0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return all rows, for numpy's functions."""
        return self[:] if dtype is None else self[:].astype(dtype)

    def parts(self) -> Iterator[bytes]:
        """Yield all rows as bytes, part by part."""
        rows = max(1, _PART_BYTES // self._row_bytes)
        for begin in range(0, len(self), rows):
            yield self._read(begin, min(rows, len(self) - begin))

    def _read(self, begin: int, count: int) -> bytes:
        first, length = self._begin + begin * self._row_bytes, count * self._row_bytes
        try:
            return self._file.read(first, length)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        # Over NFS: another machine has replaced the file by an equal one, which it built too.
        self._open()
        return self._file.read(first, length)

    def __reduce__(self) -> tuple[type[StoredArray], tuple[Any, ...]]:
        return StoredArray, (self._path, self.shape, self.dtype)
