"""Blocks of objects on the local disk: each is fetched once by the processes of a machine."""

# <folder>/<digest of the URL and the object's version>/<number>: a block, renamed into place. The
# blocks that were written first are removed first, once all take more than half of the disk's room.

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, ClassVar

from paro.errors import UserError, reading, writing
from paro.files.atomic_file import replace_file
from paro.files.object_store import StorePath, path_of, store_timeout
from paro.files.waits import claimed, wait_for_lock

FLAG = "--object-storage-cache-path"
BLOCK_BYTES = 2**20
MAX_BYTES = 2**28  # of a small file, read at once; the largest tokenizer.json has a tenth of it
_AHEAD = 8  # blocks that are fetched before they are read, where reads follow one another
_THREADS = 8  # calls at once of a process
_LOCKS = 64  # files of locks per object
BLOCKS = "blocks"  # the folder of blocks in that of the cache
_DEFAULT = Path(tempfile.gettempdir()) / f"llama-paro-objects-{os.getuid()}"


class ObjectCache:
    """The folder of the blocks, and of files on their way into a store; shared by a machine."""

    folder: ClassVar[Path] = _DEFAULT  # runs set it by their flag
    most_bytes: ClassVar[int | None] = None  # of blocks; None: half of the room on the disk
    kept_between: ClassVar[int] = 32  # least blocks that a process keeps between two looks at it
    _until_look: ClassVar[int] = 0  # blocks that this process still keeps before it looks again

    @classmethod
    def made(cls, *names: str) -> Path:
        """Make the folder, or one inside it; `UserError` for a default that another user made."""
        with writing(f"{FLAG} {cls.folder}"):
            cls.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if cls.folder == _DEFAULT:  # any user may have made a folder under its name
                status = cls.folder.lstat()
                if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
                    raise UserError(f"{cls.folder} is of another user: give {FLAG}")
                if stat.S_IMODE(status.st_mode) != 0o700:
                    cls.folder.chmod(0o700)
            folder = cls.folder.joinpath(*names)
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    @classmethod
    def keep(cls, path: Path, content: bytes) -> None:
        """Write a block; where there is no room for it, it is fetched again for the next read."""
        with suppress(OSError):
            cls._until_look -= 1
            if cls._until_look < 0:
                # A look costs what the blocks there are, so it is after a part of their number.
                cls._until_look = max(cls.kept_between, cls.make_room() // 64) - 1
            replace_file(path, content)

    @classmethod
    def make_room(cls) -> int:
        """Remove the oldest blocks above the limit; locks stay. Return the number of files."""
        files = []
        for path in (cls.folder / BLOCKS).glob("*/*"):
            with suppress(OSError):  # removed by another process just now
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_blocks * 512, path))
        used = sum(size for _, size, _ in files)
        most = cls.most_bytes
        if most is None:
            most = (used + shutil.disk_usage(cls.folder).free) // 2
        for _, size, path in sorted(files):
            if used <= most:
                break
            if path.suffix != ".lock":
                path.unlink(missing_ok=True)
                used -= size
        return len(files)


def local_copy(path: str) -> str:
    """Return the path of a local copy of an object, or of a folder's objects; a file's own path.

    It is for libraries that open files themselves, such as those of tokenizers. Of a folder, files
    that are too large for these are left out: weights of a model.
    """
    source = path_of(path)
    if not isinstance(source, StorePath):
        return path
    with reading(path):
        objects = [*source.iterdir()] if source.is_dir() else [source]
        if not objects:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        sizes = [each.stat().st_size for each in objects]
        if objects == [source] and sizes[0] > MAX_BYTES:
            raise UserError(f"{path} has {sizes[0]:,} bytes: it is no file of a tokenizer")
    digest = _digest(path, *(each.info() for each in objects))
    folder = ObjectCache.made("files", digest, source.name)
    for each, size in zip(objects, sizes, strict=True):
        if each.is_file() and size <= MAX_BYTES and not (folder / each.name).exists():
            with reading(path):
                content = each.read_range(0, size)
            with writing(f"{FLAG} {ObjectCache.folder}"):
                replace_file(folder / each.name, content)
    return str(folder if source.is_dir() else folder / source.name)


@contextmanager
def staging_folder() -> Iterator[Path]:
    """Give the block an empty local folder for files to upload; remove folders of killed runs."""
    parent = ObjectCache.made()
    with ExitStack() as until_uploaded:
        with writing(f"{FLAG} {parent}"):
            for left in parent.glob("upload-*"):
                with claimed(left) as is_left:
                    if is_left:
                        shutil.rmtree(left, ignore_errors=True)
            folder = Path(tempfile.mkdtemp(prefix="upload-", dir=parent))
            while not until_uploaded.enter_context(claimed(folder)):
                # Another process took the new folder for one that is left.
                folder = Path(tempfile.mkdtemp(prefix="upload-", dir=parent))
        until_uploaded.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


class CachedObject:
    """An object that is read by blocks of the local cache, which other processes read, too.

    If it is replaced after it was opened, blocks that are not in the cache yet are the new one's.
    """

    def __init__(self, path: StorePath) -> None:
        self._path = path
        info = path.info()
        if info["type"] == "directory":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        self.size = int(info["size"])
        self._names = (BLOCKS, _digest(path, info))
        self._folder = ObjectCache.made(*self._names)
        self._next = 0  # the byte after the last read
        self._coming: set[int] = set()  # blocks that are being fetched ahead

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
            if number not in self._coming and not (self._folder / str(number)).exists():
                self._coming.add(number)
                _threads(os.getpid()).apply_async(self._try, (number,))

    def _try(self, number: int) -> None:
        with suppress(OSError, UserError), store_timeout(0):
            self._part(number, 0, 1)
        self._coming.discard(number)

    def _part(self, number: int, begin: int, stop: int) -> bytes:
        """Return bytes of a block, from the cache or from the store.

        A block is fetched by one thread of this machine, whose lock ends with its process.
        """
        path = self._folder / str(number)
        content = _stored(path, begin, stop)
        if content is not None:
            return content
        # A folder in the temporary one may have been tidied away since the object was opened.
        lock = ObjectCache.made(*self._names) / f"{number % _LOCKS}.lock"
        with writing(f"{FLAG} {lock.parent}"):
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            wait_for_lock(descriptor, f"a block of {self._path}, which another process fetches")
            content = _stored(path, begin, stop)
            if content is None:
                first = number * BLOCK_BYTES
                block = self._path.read_range(first, min(first + BLOCK_BYTES, self.size))
                ObjectCache.keep(path, block)
                content = block[begin:stop]
        finally:
            os.close(descriptor)
        return content


def _stored(path: Path, begin: int, stop: int) -> bytes | None:
    """Return bytes of a block's file; None if it is missing or has been cut short."""
    try:
        with path.open("rb", buffering=0) as file:
            content = os.pread(file.fileno(), stop - begin, begin)
    except OSError:
        return None
    return content if len(content) == stop - begin else None


def _digest(path: object, *infos: Mapping[str, Any]) -> str:
    """Return a name for the present content of objects, by their metadata in the store."""
    # Each package has its own name for the version of an object.
    names = ("name", "size", "ETag", "etag", "generation", "LastModified", "last_modified", "mtime")
    facts = [str(path), *(str(each[name]) for each in infos for name in names if name in each)]
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=16).hexdigest()


@cache
def _threads(process: int) -> ThreadPool:
    """Return the threads that fetch blocks, of one process: none survives a fork.

    A process ends without a wait for them, unlike for those of `concurrent.futures`: a store may
    not answer.
    """
    return ThreadPool(_THREADS)
