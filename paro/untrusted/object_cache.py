"""Blocks of objects on the local disk: each is fetched once by the processes of a machine."""

# <folder>/<digest of the URL and the object's version>/<number>: a block, renamed into place. The
# blocks that were written first are removed first, once all take more than half of the disk's room.

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from paro.errors import reading, writing
from paro.untrusted.atomic_file import replace_file, replacing
from paro.untrusted.object_store import StorePath, path_of, patience
from paro.untrusted.waits import Wait

FLAG = "--object-storage-cache-path"
BLOCK_BYTES = 2**20
_AHEAD = 8  # blocks that are fetched before they are read, where reads follow one another
_THREADS = 8  # calls at once of a process
_LOCKS = 64  # files of locks per object
_BLOCKS = "blocks"
_POLL_SECONDS = 0.02
_kept = count()


class ObjectCache:
    """The folder of the blocks, and of files on their way into a store; shared by a machine."""

    folder: ClassVar[Path] = Path(tempfile.gettempdir()) / f"llama-paro-objects-{os.getuid()}"
    most_bytes: ClassVar[int | None] = None  # of blocks; None: half of the room on the disk
    kept_between: ClassVar[int] = 32  # blocks that a process keeps between two looks at the room

    @classmethod
    def use(cls, folder: str | None) -> None:
        """Keep blocks in the folder of a flag from now on; None: under the temporary folder."""
        if folder is not None:
            cls.folder = Path(folder)

    @classmethod
    def keep(cls, path: Path, content: bytes) -> None:
        """Write a block; where there is no room for it, it is fetched again for the next read."""
        if next(_kept) % cls.kept_between == 0:
            cls.make_room()
        with suppress(OSError), replacing(path) as temporary:
            temporary.write_bytes(content)

    @classmethod
    def make_room(cls) -> None:
        """Remove the oldest blocks above the limit; locks stay."""
        found = []
        for path in (cls.folder / _BLOCKS).glob("*/*"):
            with suppress(OSError):  # removed by another process just now
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_blocks * 512, path))
        used = sum(size for _, size, _ in found)
        most = cls.most_bytes
        if most is None:
            most = (used + shutil.disk_usage(cls.folder).free) // 2
        for _, size, path in sorted(found):
            if used <= most:
                break
            if path.suffix != ".lock":
                path.unlink(missing_ok=True)
                used -= size


def local_copy(path: str) -> str:
    """Return the path of a local copy of an object, or of a folder's objects; a file's own path.

    It is for libraries that open files themselves, such as those of tokenizers.
    """
    source = path_of(path)
    if not isinstance(source, StorePath):
        return path
    with reading(path):
        objects = [*source.iterdir()] if source.is_dir() else [source]
        if not objects:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    folder = (
        ObjectCache.folder
        / "files"
        / _digest(path, *(each.info() for each in objects))
        / source.name
    )
    with writing(f"{FLAG} {ObjectCache.folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    for each in objects:
        if each.is_file() and not (folder / each.name).exists():
            content = each.read_bytes()
            with writing(f"{FLAG} {ObjectCache.folder}"):
                replace_file(folder / each.name, content)
    return str(folder if source.is_dir() else folder / source.name)


@contextmanager
def way_station() -> Iterator[Path]:
    """Give an empty local folder for files that are then uploaded; those of killed runs go."""
    with writing(f"{FLAG} {ObjectCache.folder}"):
        ObjectCache.folder.mkdir(parents=True, exist_ok=True)
        for left in ObjectCache.folder.glob("upload-*"):
            if not Path(f"/proc/{left.name.split('-')[1]}").exists():
                shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f"upload-{os.getpid()}-", dir=ObjectCache.folder))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class CachedObject:
    """An object that is read by blocks of the local cache; as it was when it was opened."""

    def __init__(self, path: StorePath) -> None:
        self._path = path
        found = path.info()
        if found["type"] == "directory":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        self.size = int(found["size"])
        self._folder = ObjectCache.folder / _BLOCKS / _digest(path, found)
        with writing(f"{FLAG} {ObjectCache.folder}"):
            self._folder.mkdir(parents=True, exist_ok=True)
        self._next = 0  # the byte after the last read

    def read(self, begin: int, length: int) -> bytes:
        """Return bytes of the object; blocks that are missing are fetched at once."""
        stop = min(begin + length, self.size)
        if stop <= begin:
            return b""
        numbers = range(begin // BLOCK_BYTES, -(-stop // BLOCK_BYTES))
        if begin == self._next and begin > 0:
            self.read_soon(numbers.stop * BLOCK_BYTES, _AHEAD * BLOCK_BYTES)
        self._next = stop

        def part(number: int) -> bytes:
            first = number * BLOCK_BYTES
            return self._part(number, max(begin - first, 0), min(stop - first, BLOCK_BYTES))

        if len(numbers) == 1:
            return part(numbers[0])
        return b"".join(_threads(os.getpid()).map(part, numbers))

    def read_soon(self, begin: int, length: int) -> None:
        """Start to fetch bytes that are going to be read; an error is met again by the read."""
        stop = min(begin + length, self.size)
        for number in range(begin // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            if not (self._folder / str(number)).exists():
                _threads(os.getpid()).submit(self._try, number)

    def _try(self, number: int) -> None:
        with suppress(OSError), patience(0):
            self._part(number, 0, 1)

    def _part(self, number: int, begin: int, stop: int) -> bytes:
        """Return bytes of a block, from the cache or from the store."""
        path = self._folder / str(number)
        content = _stored(path, begin, stop)
        if content is not None:
            return content
        with self._alone(number):
            content = _stored(path, begin, stop)
            if content is None:
                first = number * BLOCK_BYTES
                block = self._path.read_range(first, min(first + BLOCK_BYTES, self.size))
                ObjectCache.keep(path, block)
                content = block[begin:stop]
        return content

    @contextmanager
    def _alone(self, number: int) -> Iterator[None]:
        """Hold a block's lock among the threads and processes of this machine, till they end."""
        path = self._folder / f"{number % _LOCKS}.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        wait = Wait(f"a block of {self._path}, which another process fetches")
        try:
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                wait.check()
                time.sleep(_POLL_SECONDS)
            yield
        finally:
            os.close(descriptor)


def _stored(path: Path, begin: int, stop: int) -> bytes | None:
    """Return bytes of a block's file; None if it is missing or has been cut short."""
    try:
        with path.open("rb", buffering=0) as file:
            content = os.pread(file.fileno(), stop - begin, begin)
    except OSError:
        return None
    return content if len(content) == stop - begin else None


def _digest(path: object, *found: Mapping[str, Any]) -> str:
    """Return a name for the present content of objects, by what the store says of them."""
    # Each package has its own name for the version of an object.
    names = ("name", "size", "ETag", "etag", "generation", "LastModified", "last_modified", "mtime")
    facts = [str(path), *(str(each[name]) for each in found for name in names if name in each)]
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=16).hexdigest()


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Return the threads that fetch blocks, of one process: none survives a fork."""
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="objects")
