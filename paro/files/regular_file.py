"""Reads untrusted files: regular ones only, and not without a limit."""

from __future__ import annotations

import errno
import os
import stat
from fnmatch import fnmatchcase
from pathlib import Path
from weakref import finalize

from paro.errors import UserError, reading
from paro.files.object_cache import MAX_BYTES, CachedObject
from paro.files.object_store import StorePath

_BLOCK_BYTES = 2**20


def paths_in(folder: Path, *patterns: str) -> list[Path]:
    """Return the sorted paths in a folder whose names match a pattern; none if it does not exist.

    `UserError` if it may not be listed, where a glob would find nothing.
    """
    with reading(f"{folder}"):
        try:
            names = sorted(path.name for path in folder.iterdir())
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise UserError(f"{folder} is a file: give a folder") from None
    return [folder / name for name in names if any(fnmatchcase(name, each) for each in patterns)]


def check_regular(path: str | Path, what: str = "") -> None:
    """Raise `UserError` unless a library, which opens the file itself, could read it.

    The error begins with `what`, or with the path.
    """
    what = what or str(path)
    with reading(what):
        os.close(_open(path, what))


def read_bytes(path: str | Path, what: str = "", *, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file."""
    what = what or str(path)
    with reading(what):
        if isinstance(path, StorePath):
            size = path.info()["size"] or 0
            content = path.read_range(0, size) if size <= max_bytes else b""
        else:
            with open(_open(path, what), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                content = file.read(max_bytes + 1) if size <= max_bytes else b""
    size = max(size, len(content))  # a file of /proc says 0
    if size > max_bytes:
        raise UserError(f"{what} has {size:,} bytes, more than the {max_bytes:,} that may be read")
    return content


def read_text(path: str | Path, what: str = "", *, max_bytes: int = MAX_BYTES) -> str:
    """Return the content of a regular file as UTF-8."""
    content = read_bytes(path, what, max_bytes=max_bytes)
    with reading(what or str(path)):
        return content.decode("utf-8").replace("\r\n", "\n")


class RegularFile:
    """A regular file that is open for reading, or an object; every error of a read names it.

    It is not mapped into memory: a mapped file that another program shortens ends the process with
    SIGBUS, and an I/O error does so too.
    """

    def __init__(self, path: str | Path, remedy: str = "restore it and run again") -> None:
        self.path = str(path)
        self._remedy = remedy  # if it is shortened
        self._object: CachedObject | None = None
        with reading(self.path):
            if isinstance(path, StorePath):
                self._object = CachedObject(path)
                self.size = self._object.size
                return
            self._descriptor = _open(path, self.path)
            finalize(self, os.close, self._descriptor)
            self.size = os.fstat(self._descriptor).st_size

    def read(self, begin: int, length: int) -> bytes:
        """Return the `length` bytes from byte `begin` on, of the file as it was opened."""
        content = b""
        try:
            if self._object is not None:
                return self._object.read(begin, length)
            while len(content) < length:  # the system reads at most 2 GiB at once
                more = os.pread(self._descriptor, length - len(content), begin + len(content))
                if not more:
                    raise UserError(
                        f"{self.path} has {os.fstat(self._descriptor).st_size:,} bytes and had "
                        f"{self.size:,} when it was opened: another program has shortened it; "
                        f"{self._remedy}"
                    )
                content += more
        except OSError:
            with reading(self.path):
                raise
        return content

    def read_into(self, room: memoryview, begin: int) -> int:
        """Fill `room` with bytes from byte `begin` on; return how many the file had."""
        if self._object is None:
            return os.preadv(self._descriptor, [room], begin)
        content = self._object.read(begin, len(room))
        room[: len(content)] = content
        return len(content)

    def read_soon(self, begin: int, length: int) -> None:
        """Start to read ahead, by blocks: Linux would read only the beginning of a long range."""
        if self._object is not None:
            self._object.read_soon(begin, length)
            return
        for block in range(begin, begin + length, _BLOCK_BYTES):
            os.posix_fadvise(self._descriptor, block, _BLOCK_BYTES, os.POSIX_FADV_WILLNEED)


def _open(path: str | Path, what: str) -> int:
    """Return a descriptor of a regular file; the error for another kind begins with `what`.

    A pipe or a device, which could block or never end, is refused without a wait.
    """
    if isinstance(path, StorePath):
        path.open()
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise UserError(f"{what} is no regular file: give a file")
