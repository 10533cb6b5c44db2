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
import secrets
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from paro.distributed.world import read_job_id, read_rendezvous_id
from paro.errors import StorageError, UserError
from paro.untrusted.schema import Count, Positive, parse_json

BEAT_SECONDS = 5.0
STILL_SECONDS = 60.0
_NAME = re.compile(r"lease_(\d{1,15})\.json")
_REMOVED = (errno.ENOENT, errno.ESTALE)  # why a file cannot be opened
_FILE_BYTES = 2048  # constant size of a lock file: one write replaces all of the content
_TEXT_LENGTH = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LockHolder:
    """The process that holds a lock file; `token` differs for every start."""

    token: str
    host: str
    pid: Positive
    start_ticks: Count  # start time after boot; with the pid, unique until the next boot
    boot_id: str
    pid_namespace: str  # namespace of the pid: another container may use an equal pid
    rendezvous_id: str  # torchrun's --rdzv-id, or empty
    slurm_job: str
    since: str
    heartbeat: Count = 0
    released: bool = False  # whether the process has ended its use of the lock

    @classmethod
    def this_process(cls) -> Self:
        return cls(
            token=secrets.token_hex(8),
            host=_short(socket.gethostname()),
            pid=os.getpid(),
            start_ticks=_start_ticks(os.getpid()) or 0,
            boot_id=_boot_id(),
            pid_namespace=_pid_namespace(),
            rendezvous_id=_short(read_rendezvous_id()),
            slurm_job=_short(read_job_id()),
            since=datetime.now().astimezone().isoformat(" ", "seconds"),
        )

    @classmethod
    def parse(cls, content: bytes) -> Self | None:
        """Return the holder in a lock file's content, with printable texts; None if damaged."""
        try:
            holder: Self = parse_json(content, cls, "")
        except UserError:
            return None
        values = asdict(holder).items()
        texts: dict[str, Any] = {n: _short(text) for n, text in values if isinstance(text, str)}
        return replace(holder, **texts)

    def is_same_job(self, other: LockHolder) -> bool:
        """Return whether both are starts of one torchrun or SLURM job."""
        jobs = (self.rendezvous_id, other.rendezvous_id), (self.slurm_job, other.slurm_job)
        return any(mine and mine == theirs for mine, theirs in jobs)

    def is_dead_here(self) -> bool:
        """Return whether the process is known to be dead; False for a process on another host."""
        if not self.boot_id or not self.pid_namespace:
            return False
        if (self.boot_id, self.pid_namespace) != (_boot_id(), _pid_namespace()):
            return False
        try:
            os.kill(self.pid, 0)  # only checks that the process exists
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            return False  # a live process of another user, maybe hidden in /proc
        return _start_ticks(self.pid) != self.start_ticks

    def describe(self) -> str:
        job = f", torchrun's job {self.rendezvous_id}" if self.rendezvous_id else ""
        slurm = f", SLURM job {self.slurm_job}" if self.slurm_job else ""
        return f"process {self.pid} on {self.host}{job}{slurm}, since {self.since}"


class LockLostError(StorageError):
    """Another run has taken the folder over: this run stops before it renames anything there."""


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
            with suppress(OSError, LockLostError):  # the next save reports a lost mount
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
                with suppress(OSError, LockLostError), self._own_file() as descriptor:
                    _overwrite(descriptor, replace(self._holder, released=True))
            self._lost = self._lost or "this run has ended"
            self._ended.set()

    def _beat_on(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                self.beat()
            except LockLostError:
                return
            except OSError:
                continue  # the next save reports a full disk or a lost mount

    @contextmanager
    def _own_file(self) -> Iterator[int]:
        """Open the lock file for the block; raise `LockLostError` if another process holds it."""
        if self._lost is None:
            try:
                descriptor = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError as error:
                if error.errno not in _REMOVED:
                    raise
                descriptor = self._restored()
            try:
                found = LockHolder.parse(os.pread(descriptor, _FILE_BYTES, 0))
                if found is not None and found.token != self.token:
                    self._lost = f"{found.describe()}, has taken it over"
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
        found = _newest(self._root)
        if found is None and not _create(self._root, self._number, self._holder):
            found = _newest(self._root)
        if found is not None:
            self._lost = f"{found.who}, has taken it over"
            return os.open(found.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        return os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)


class LockWaiter:
    """A process that wants the lock of `root`; `attempt` is called until it returns the lock.

    Clocks of machines differ, so heartbeats are not compared with times: a holder counts as dead
    if the heartbeat does not change for a minute of this process's own clock.
    """

    def __init__(self, root: Path, holder: LockHolder) -> None:
        self._root = root
        self._holder = holder
        self._seen: _Found | None = None
        self._seen_at = 0.0

    def attempt(self) -> FolderLock | str:
        """Return the lock or a description of the awaited holder; `UserError` if that run lives."""
        found = _newest(self._root)
        if found is None or self._is_free(found):
            number = 1 if found is None else found.number + 1
            self._root.mkdir(parents=True, exist_ok=True)
            if _create(self._root, number, self._holder):
                return FolderLock(self._root, number, self._holder)
            return "another run, which starts at this moment"
        if self._seen is None:
            self._seen, self._seen_at = found, time.monotonic()
        elif found != self._seen:
            raise UserError(
                f"--save {self._root} is in use by {found.who}: give another --save, or end that "
                "run first"
            )
        return found.who

    def _is_free(self, found: _Found) -> bool:
        holder = found.holder
        if holder is not None and (
            holder.released or holder.is_same_job(self._holder) or holder.is_dead_here()
        ):
            return True
        return found == self._seen and time.monotonic() - self._seen_at >= STILL_SECONDS


@dataclass(frozen=True, slots=True)
class _Found:
    """A lock file as it was read; two reads are equal if there was no heartbeat in between."""

    path: Path
    number: int
    content: bytes
    modified_ns: int
    holder: LockHolder | None  # the process named in the file; None: the file is damaged

    @property
    def who(self) -> str:
        """Description of the holder. A live holder repairs a damaged file by a heartbeat."""
        if self.holder is None:
            return f"an unknown run ({self.path.name} is damaged)"
        return self.holder.describe()


def _newest(root: Path) -> _Found | None:
    """Return the lock file with the highest number; None if there is no file."""
    while numbers := _numbers(root):
        path = _path(root, max(numbers))
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"{path} is no regular file: remove it")
            with path.open("rb") as file:
                content = file.read(_FILE_BYTES)
        except OSError as error:
            if error.errno in _REMOVED:
                continue  # by a successor, just now
            raise
        holder = LockHolder.parse(content)
        return _Found(path, max(numbers), content, status.st_mtime_ns, holder)
    return None


def _numbers(root: Path) -> list[int]:
    try:
        names = os.listdir(root)  # unlike a glob, it raises where the folder may not be listed
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
    others = _numbers(root)
    if max(others) > number:
        path.unlink(missing_ok=True)
        return False
    for older in others:
        if older < number:
            _path(root, older).unlink(missing_ok=True)
    return True


def _overwrite(descriptor: int, holder: LockHolder) -> None:
    text = json.dumps(asdict(holder), indent=1)
    content = f"{text.ljust(_FILE_BYTES - 1)}\n".encode()
    assert len(content) == _FILE_BYTES, "texts of a holder are short"
    if os.pwrite(descriptor, content, 0) != len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(descriptor)


def _short(text: str) -> str:
    """Shorten a text and make it printable ASCII, for terminals and a file of constant size."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text[:_TEXT_LENGTH])


def _boot_id() -> str:
    """Return an ID of this host until the next boot; empty where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_ticks(pid: int) -> int | None:
    """Return when a process started, after boot; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = text.rpartition(")")[2].split()  # the name may hold any text
    return None if state in "ZX" else int(rest[18])
