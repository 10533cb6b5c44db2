"""The lock file of a save folder: its holder proves by a heartbeat that it lives, or loses it."""

# lease_7.json in the folder names the holder; only the file with the highest number counts. A new
# holder creates the next number, which exactly one process can do, and then removes older files.
# The holder writes heartbeats into its own file, in place: a holder that was stopped for a minute
# and wakes up writes into a removed file, never over the file of its successor. The last file stays
# after the end, marked as released: numbers must not start again while a holder sleeps.

from __future__ import annotations

import errno
import json
import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from paro.checkpoint.lock_holder import LockHolder
from paro.errors import StorageError, UserError
from paro.files.object_store import StorePath, store_timeout

BEAT_SECONDS = 5.0
STILL_SECONDS = 60.0
_NAME = re.compile(r"lease_(\d{1,15})\.json")
_REMOVED = (errno.ENOENT, errno.ESTALE)  # why a file cannot be opened
_FILE_BYTES = 2048  # constant size of a lock file: one write replaces all of the content


class LockLostError(StorageError):
    """The error of a run whose folder another has taken over; it renames nothing there."""


class FolderLock:
    """A lock file that this process holds; a thread beats until `release` or until it is lost."""

    def __init__(self, root: Path, number: int, holder: LockHolder) -> None:
        self._root = root
        self._path = _path(root, number)
        self._number = number
        self._holder = holder
        self._lost: str | None = None
        self._device = root.stat().st_dev
        self._checked = time.monotonic()
        self._lock = threading.Lock()  # taken by the saving thread and the heartbeat thread
        self._ended = threading.Event()
        threading.Thread(target=self._beat_on, name="lease", daemon=True).start()

    @property
    def token(self) -> str:
        return self._holder.token

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    def is_ours(self) -> bool:
        """Return whether no other run may hold the lock; reads the file only after a long sleep."""
        if not self.is_lost and time.monotonic() - self._checked > STILL_SECONDS / 2:
            # The next save reports a lost mount.
            with suppress(OSError, LockLostError), store_timeout(BEAT_SECONDS):
                self.check()
        return not self.is_lost

    def check(self) -> None:
        """Raise `LockLostError` unless this process holds the lock now."""
        with self._lock, self._own_file():
            pass

    def beat(self) -> None:
        """Show that this process lives; raises as `check` does."""
        with self._lock, self._own_file() as descriptor:
            self._holder = replace(self._holder, heartbeat=self._holder.heartbeat + 1)
            _overwrite(descriptor, self._holder)

    def release(self) -> None:
        """Mark the lock file as released for the next run; write nothing if the lock is lost."""
        with self._lock:
            if self._lost is None and not self._ended.is_set():
                quietly = suppress(OSError, LockLostError)
                with quietly, store_timeout(BEAT_SECONDS), self._own_file() as descriptor:
                    _overwrite(descriptor, replace(self._holder, released=True))
            self._lost = self._lost or "this run has ended"
            self._ended.set()

    def _beat_on(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                with store_timeout(BEAT_SECONDS):
                    self.beat()
            except LockLostError:
                return
            except OSError:
                continue  # the next save reports a full disk or a lost mount

    @contextmanager
    def _own_file(self) -> Iterator[int | StorePath]:
        """Open the lock file for the block; raise `LockLostError` if another process holds it."""
        if self._lost is None and isinstance(self._path, StorePath):
            newest = _newest(self._root)
            if newest is None and not _create(self._root, self._number, self._holder):
                newest = _newest(self._root)
            if newest is not None and newest.number > self._number:
                self._lost = f"{newest.who}, has taken it over"
            else:
                self._checked = time.monotonic()
                yield self._path
                return
        elif self._lost is None:
            try:
                descriptor = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError as error:
                if error.errno not in _REMOVED:
                    raise
                descriptor = self._restored()
            try:
                holder = LockHolder.parse(os.pread(descriptor, _FILE_BYTES, 0))
                if holder is not None and holder.token != self.token:
                    self._lost = f"{holder.describe()}, has taken it over"
                if self._lost is None:
                    self._checked = time.monotonic()
                    yield descriptor
                    return
            finally:
                os.close(descriptor)
        raise LockLostError(
            f"this run lost its lease of {self._root}: {self._lost}; nothing was changed there "
            "since; if this run is the one to go on, end the other and start this one again"
        )

    def _restored(self) -> int:
        """Create and open the lock file again, which was removed, perhaps with the folder.

        If a successor removed it, the lock is lost. An unmounted file system raises `OSError`.
        """
        if self._root.stat().st_dev != self._device:
            text = f"{self._root} is on another file system than at the start: is it still mounted?"
            raise OSError(errno.ENODEV, text)
        newest = _newest(self._root)
        if newest is None and not _create(self._root, self._number, self._holder):
            newest = _newest(self._root)
        if newest is not None:
            self._lost = f"{newest.who}, has taken it over"
            return os.open(newest.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        return os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)


class LockWaiter:
    """A process that wants the lock of `root`; `attempt` is called until it returns the lock.

    Clocks of machines differ, so heartbeats are not compared with times: a holder counts as dead
    if the heartbeat does not change for a minute of this process's own clock.
    """

    def __init__(self, root: Path, holder: LockHolder) -> None:
        self._root = root
        self._holder = holder
        self._seen: _LockFile | None = None
        self._seen_at = 0.0

    def attempt(self) -> FolderLock | str:
        """Return the lock or a description of the awaited holder; `UserError` if that run lives."""
        newest = _newest(self._root)
        if newest is None or self._is_free(newest):
            number = 1 if newest is None else newest.number + 1
            self._root.mkdir(parents=True, exist_ok=True)
            if _create(self._root, number, self._holder):
                return FolderLock(self._root, number, self._holder)
            return "another run, which starts at this moment"
        if self._seen is None:
            self._seen, self._seen_at = newest, time.monotonic()
        elif newest != self._seen:
            raise UserError(
                f"--save {self._root} is in use by {newest.who}: give another --save, or end that "
                "run first"
            )
        return newest.who

    def _is_free(self, newest: _LockFile) -> bool:
        holder = newest.holder
        if holder is not None and (
            holder.released or holder.is_same_job(self._holder) or holder.is_dead_here()
        ):
            return True
        return newest == self._seen and time.monotonic() - self._seen_at >= STILL_SECONDS


@dataclass(frozen=True, slots=True)
class _LockFile:
    """A lock file as it was read; two reads are equal if there was no heartbeat in between."""

    path: Path
    number: int
    content: bytes
    holder: LockHolder | None  # the process named in the file; None: the file is damaged

    @property
    def who(self) -> str:
        """Description of the holder. A live holder repairs a damaged file by a heartbeat."""
        if self.holder is None:
            return f"an unknown run ({self.path.name} is damaged)"
        return self.holder.describe()


def _newest(root: Path) -> _LockFile | None:
    """Return the lock file with the highest number; None if there is no file."""
    while numbers := _numbers(root):
        path = _path(root, max(numbers))
        try:
            if isinstance(path, StorePath):
                content = path.read_bytes()
            elif not stat.S_ISREG(path.lstat().st_mode):
                raise UserError(f"{path} is no regular file: remove it")
            else:
                with path.open("rb") as file:
                    content = file.read(_FILE_BYTES)
        except OSError as error:
            if error.errno in _REMOVED:
                continue  # by a successor, just now
            raise
        return _LockFile(path, max(numbers), content, LockHolder.parse(content))
    return None


def _numbers(root: Path) -> list[int]:
    try:
        # Unlike a glob, it raises where the folder may not be listed.
        names = [path.name for path in root.iterdir()]
    except FileNotFoundError:
        return []
    return [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]


def _path(root: Path, number: int) -> Path:
    return root / f"lease_{number}.json"


def _create(root: Path, number: int, holder: LockHolder) -> bool:
    """Create lock file `number` and remove older files; return False if it is too late.

    A slow waiter may create a number that later holders have passed and removed. If a file system
    lets several processes create one file, the last writer holds the lock, and the other processes
    lose it at their next check.
    """
    path = _path(root, number)
    if isinstance(path, StorePath):
        return _create_object(path, _content(holder)) and _is_newest(root, number)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    try:
        _overwrite(descriptor, holder)
    except OSError:  # a full disk: an empty lock would be watched for a minute
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return _is_newest(root, number)


def _create_object(path: StorePath, content: bytes) -> bool:
    """Create a lock object, which one process alone can do; `UserError` if its store lets more."""
    if not path.create(content):
        return False
    if path.create(b"a second time"):
        raise UserError(
            f"--save {path.parent}: its store overwrites where it is asked not to (If-None-Match), "
            "so that two runs could save there: give another --save"
        )
    return True


def _is_newest(root: Path, number: int) -> bool:
    """Return whether a lock file that was just created is the newest; remove older ones, or it."""
    others = _numbers(root)
    if max(others) > number:
        _path(root, number).unlink(missing_ok=True)
        return False
    for older in others:
        if older < number:
            _path(root, older).unlink(missing_ok=True)
    return True


def _overwrite(target: int | StorePath, holder: LockHolder) -> None:
    content = _content(holder)
    if isinstance(target, StorePath):
        target.write_bytes(content)
        return
    if os.pwrite(target, content, 0) != len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(target)


def _content(holder: LockHolder) -> bytes:
    text = json.dumps(asdict(holder), indent=1)
    content = f"{text.ljust(_FILE_BYTES - 1)}\n".encode()
    assert len(content) == _FILE_BYTES, "texts of a holder are short"
    return content
