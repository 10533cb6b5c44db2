"""The lock file of a save folder: its holder proves by a heartbeat that it lives, or loses it."""

# lease_7.json in the folder names the holder; only the file with the highest number counts. A new
# holder creates the next number, which exactly one process can do, and then removes older files.
# The holder writes heartbeats into its own file, in place: a holder that was stopped for a minute
# and wakes up finds that file removed, and never writes over that of its successor. The last file
# stays after the end, marked as released: numbers must not start again while a holder sleeps.

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
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from paro.distributed.world import read_job_id, read_rendezvous_id
from paro.errors import StorageError, UserError
from paro.files.object_store import StorePath, store_timeout
from paro.files.schema import Count, Positive, parse_json

BEAT_SECONDS = 5.0
STILL_SECONDS = 60.0
_NAME = re.compile(r"lease_(\d{1,15})\.json")
_REMOVED = (errno.ENOENT, errno.ESTALE)  # why a file cannot be opened
_TEXT_LENGTH = 128  # most characters of each text in a lock file
_FILE_BYTES = 2048  # constant size of a lock file: one write replaces all of the content
_LATER = (OSError, UserError)  # a full disk, a lost mount: the next save reports them


class LockLostError(StorageError):
    """The error of a run whose folder another has taken over; it renames nothing there."""


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
        boot_id, pid_namespace = _boot_and_pid_namespace()
        return cls(
            token=secrets.token_hex(8),
            host=_short(socket.gethostname()),
            pid=os.getpid(),
            start_ticks=_start_ticks(os.getpid()) or 0,
            boot_id=boot_id,
            pid_namespace=pid_namespace,
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

    def gives_way_to(self, other: LockHolder) -> bool:
        """Return whether the process has ended, or is an earlier start of the other's job."""
        jobs = (self.rendezvous_id, other.rendezvous_id), (self.slurm_job, other.slurm_job)
        is_same_job = any(mine and mine == theirs for mine, theirs in jobs)
        return self.released or is_same_job or self.is_dead_here()

    def is_dead_here(self) -> bool:
        """Return whether the process is known to be dead; False for a process on another host."""
        where = self.boot_id, self.pid_namespace
        if not all(where) or where != _boot_and_pid_namespace():
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


class FolderLock:
    """A lock file that this process holds; a thread beats until `release` or until it is lost."""

    def __init__(self, root: Path, number: int, holder: LockHolder) -> None:
        self._root = root
        self._path = _path(root, number)
        self._number = number
        self.holder = holder
        self.lost: str | None = None  # why this process does not hold the lock any more
        self._device = root.stat().st_dev
        self._checked = time.monotonic()
        self._lock = threading.RLock()  # taken by the saving thread and the heartbeat thread
        self._ended = threading.Event()
        threading.Thread(target=self._beat_on, name="lease", daemon=True).start()

    def is_ours(self) -> bool:
        """Return whether no other run may hold the lock; reads the file only after a long sleep."""
        if self.lost is None and time.monotonic() - self._checked > STILL_SECONDS / 2:
            with suppress(*_LATER, LockLostError), store_timeout(BEAT_SECONDS):
                self.check()
        return self.lost is None

    def check(self) -> None:
        """Raise `LockLostError` if another process holds the lock; write a file again that is gone.

        The file may have been removed by hand, perhaps with the folder. An unmounted file system
        raises `OSError`.
        """
        with self._lock:
            if self.lost is None:
                newest = _newest(self._root)
                if newest is None:
                    in_store = isinstance(self._root, StorePath)
                    if not in_store and self._root.stat().st_dev != self._device:
                        where = f"{self._root} is on another file system than at the start"
                        raise OSError(errno.ENODEV, f"{where}: is it still mounted?")
                    if not _create(self._root, self._number, self.holder):
                        newest = _newest(self._root)
                if newest is not None and newest.is_of_another(self._number, self.holder.token):
                    self.lost = f"{newest.who}, has taken it over"
        if self.lost is not None:
            raise LockLostError(
                f"this run lost its lease of {self._root}: {self.lost}; nothing was changed there "
                "since; if this run is the one to go on, end the other and start this one again"
            )
        self._checked = time.monotonic()

    def beat(self) -> None:
        """Show that this process lives; raises as `check` does."""
        with self._lock:
            self.check()
            self.holder = replace(self.holder, heartbeat=self.holder.heartbeat + 1)
            _write(self._path, self.holder)

    def release(self) -> None:
        """Mark the lock file as released for the next run; write nothing if the lock is lost."""
        with self._lock:
            with suppress(*_LATER, LockLostError), store_timeout(BEAT_SECONDS):
                self.check()
                _write(self._path, replace(self.holder, released=True))
            self.lost = self.lost or "this run has ended"
            self._ended.set()

    def _beat_on(self) -> None:
        while self.lost is None and not self._ended.wait(BEAT_SECONDS):
            with suppress(*_LATER, LockLostError), store_timeout(BEAT_SECONDS):
                self.beat()


def attempts_to_lock(root: Path, holder: LockHolder) -> Iterator[FolderLock | str]:
    """Try once in every turn to get the lock of `root`; yield the lock, or who holds it until then.

    `UserError` if that run lives. Clocks of machines differ, so heartbeats are not compared with
    times: a holder counts as dead if the heartbeat does not change for a minute of this process's
    own clock.
    """
    seen: _LockFile | None = None
    seen_at = 0.0
    while True:
        newest = _newest(root)
        is_still = newest == seen and time.monotonic() - seen_at >= STILL_SECONDS
        if newest is None or is_still or (newest.holder and newest.holder.gives_way_to(holder)):
            number = 1 if newest is None else newest.number + 1
            root.mkdir(parents=True, exist_ok=True)
            if _create(root, number, holder):
                yield FolderLock(root, number, holder)
                return
            yield "another run, which starts at this moment"
            continue
        if seen is None:
            seen, seen_at = newest, time.monotonic()
        elif newest != seen:
            raise UserError(
                f"--save {root} is in use by {newest.who}: give another --save, or end that run "
                "first"
            )
        yield newest.who


@dataclass(frozen=True, slots=True)
class _LockFile:
    """A lock file as it was read; two reads are equal if there was no heartbeat in between."""

    name: str
    number: int
    content: bytes
    holder: LockHolder | None  # the process named in the file; None: the file is damaged

    @property
    def who(self) -> str:
        """Description of the holder. A live holder repairs a damaged file by a heartbeat."""
        if self.holder is None:
            return f"an unknown run ({self.name} is damaged)"
        return self.holder.describe()

    def is_of_another(self, number: int, token: str) -> bool:
        """Return whether another process holds the lock than that of a number and a token."""
        return self.number > number or (self.holder is not None and self.holder.token != token)


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
        return _LockFile(path.name, max(numbers), content, LockHolder.parse(content))
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
    lose it at their next check. A store that lets more than one create an object is refused.
    """
    path = _path(root, number)
    if isinstance(path, StorePath):
        if not path.create(_content(holder)):
            return False
        if path.create(b"a second time"):
            raise UserError(
                f"--save {root}: its store overwrites where it is asked not to (If-None-Match), "
                "so that two runs could save there: give another --save"
            )
    else:
        try:
            _write(path, holder, is_new=True)
        except FileExistsError:
            return False
    others = _numbers(root)
    if max(others) > number:
        path.unlink(missing_ok=True)
        return False
    for older in others:
        if older < number:
            _path(root, older).unlink(missing_ok=True)
    return True


def _write(path: Path, holder: LockHolder, *, is_new: bool = False) -> None:
    """Write a lock file in place: its holder, or a new one that no other process has created."""
    content = _content(holder)
    if isinstance(path, StorePath):
        path.write_bytes(content)
        return
    flags = os.O_CREAT | os.O_EXCL if is_new else os.O_NONBLOCK
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | flags, 0o644)
    try:
        if os.pwrite(descriptor, content, 0) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(descriptor)
    except OSError:
        if is_new:  # a full disk: an empty lock would be watched for a minute
            path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _content(holder: LockHolder) -> bytes:
    text = json.dumps(asdict(holder), indent=1)
    content = f"{text.ljust(_FILE_BYTES - 1)}\n".encode()
    assert len(content) == _FILE_BYTES, "texts of a holder are short"
    return content


def _short(text: str) -> str:
    """Shorten a text and make it printable ASCII, for terminals and a file of constant size."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text[:_TEXT_LENGTH])


def _boot_and_pid_namespace() -> tuple[str, str]:
    """Return IDs of this host until the next boot, and of its pids; empty where there are none."""
    with suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return boot_id, os.readlink("/proc/self/ns/pid")
    return "", ""


def _start_ticks(pid: int) -> int | None:
    """Return when a process started, after boot; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = text.rpartition(")")[2].split()  # the name may hold any text
    return None if state in "ZX" else int(rest[18])
