"""The lease of a save folder: one run at a time owns it, proves that it lives, and can lose it."""

# lease_7.json in the folder names the owner; only the file with the highest number counts. A new
# owner creates the next number, which exactly one process can do, and then removes older files.
# The owner writes its heartbeat into its own file, in place: an owner that was stopped for a
# minute and wakes up writes into a file that is gone, never over that of its successor. The last
# file stays after the end, marked as released: numbers must not start again while an owner sleeps.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from data.atomic_file import temporary_beside
from paro.distributed.world import read_job_id, read_rendezvous_id
from paro.errors import StorageError, UserError

BEAT_SECONDS = 5.0
STILL_SECONDS = 60.0
_NAME = re.compile(r"lease_(\d{1,15})\.json")
_FILE_BYTES = 2048  # constant, so that a heartbeat replaces the whole content with one write
_TEXT_LENGTH = 128
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class LeaseLostError(StorageError):
    """Another run has taken the folder over: this one stops before it renames anything there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who holds a lease; `token` differs for every start."""

    token: str
    host: str
    pid: int
    start_ticks: int  # after boot; with the pid, it names a process until the next boot
    boot_id: str
    pid_namespace: str  # in another container on the same host a pid is another process
    rendezvous_id: str  # torchrun's --rdzv-id, or empty
    slurm_job: str
    since: str

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
    def from_json(cls, found: object) -> Self | None:
        """The owner in a parsed lease file, its texts fit to be printed; None if damaged."""
        if not isinstance(found, dict):
            return None
        values: dict[str, Any] = {}
        for field in fields(cls):
            value = found.get(field.name)
            kind = int if field.type == "int" else str
            if type(value) is not kind:
                return None
            values[field.name] = _short(value) if isinstance(value, str) else value
        return cls(**values)

    def is_same_job(self, other: Owner) -> bool:
        """Whether both are starts of one torchrun or SLURM job."""
        return any(
            mine and mine == theirs
            for mine, theirs in (
                (self.rendezvous_id, other.rendezvous_id),
                (self.slurm_job, other.slurm_job),
            )
        )

    def is_dead_here(self) -> bool:
        """Whether it is known to be dead, as only a process of this very host can be."""
        if not self.boot_id or not self.pid_namespace:
            return False
        if (self.boot_id, self.pid_namespace) != (_boot_id(), _pid_namespace()):
            return False
        try:
            os.kill(self.pid, 0)  # sends nothing
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            return False  # it runs as another user, and /proc may hide it
        return _start_ticks(self.pid) != self.start_ticks

    def describe(self) -> str:
        job = f", torchrun's job {self.rendezvous_id}" if self.rendezvous_id else ""
        slurm = f", SLURM job {self.slurm_job}" if self.slurm_job else ""
        return f"process {self.pid} on {self.host}{job}{slurm}, since {self.since}"


class Lease:
    """A lease that this process holds; a thread beats until `release` or until it is lost."""

    def __init__(self, root: Path, number: int, owner: Owner) -> None:
        self._root = root
        self._path = _path(root, number)
        self._number = number
        self._owner = owner
        self._beats = 0
        self._lost: str | None = None
        self._device = root.stat().st_dev
        self._lock = threading.Lock()  # of the saving thread and the one that beats
        self._ended = threading.Event()
        threading.Thread(target=self._beat_on, name="lease", daemon=True).start()

    @property
    def token(self) -> str:
        return self._owner.token

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    def check(self) -> None:
        """Raises `LeaseLostError` unless this process holds the lease now."""
        with self._lock, self._own_file():
            pass

    def beat(self) -> None:
        """Shows that this process lives; raises as `check` does."""
        with self._lock, self._own_file() as descriptor:
            self._beats += 1
            _overwrite(descriptor, _content(self._owner, beats=self._beats, released=False))

    def release(self) -> None:
        """Lets the next run have the folder at once; of a lost lease nothing is written."""
        with self._lock:
            if self._lost is None and not self._ended.is_set():
                with suppress(OSError, LeaseLostError), self._own_file() as descriptor:
                    _overwrite(descriptor, _content(self._owner, beats=self._beats, released=True))
            self._lost = self._lost or "this run has ended"
            self._ended.set()

    def _beat_on(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                self.beat()
            except LeaseLostError:
                return
            except OSError:
                continue  # a full disk or a lost mount is the next save's to report

    @contextmanager
    def _own_file(self) -> Iterator[int]:
        """The open lease file, which is this process's."""
        if self._lost is None:
            try:
                descriptor = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    raise
                descriptor = self._restored()
            try:
                found = Owner.from_json(_parsed(os.pread(descriptor, _FILE_BYTES, 0)))
                if found is not None and found.token != self.token:
                    self._lost = f"{found.describe()}, has taken it over"
                if self._lost is None:
                    yield descriptor
                    return
            finally:
                os.close(descriptor)
        raise LeaseLostError(
            f"this run lost its lease of {self._root}: {self._lost}; nothing was changed there "
            "since; if this run is the one to go on, end the other and start this one again"
        )

    def _restored(self) -> int:
        """Opens a file that was removed: by a successor, or with the folder and no other is there.

        Raises `LeaseLostError` in the first case. The folder below a mount that is gone gets none.
        """
        if self._root.stat().st_dev != self._device:
            text = f"{self._root} is on another file system than at the start: is it still mounted?"
            raise OSError(errno.ENODEV, text)
        found = _newest(self._root)
        if found is None and not _create(self._root, self._number, self._owner):
            found = _newest(self._root)
        if found is not None:
            who = "another run" if found.owner is None else found.owner.describe()
            self._lost = f"{who}, has taken it over"
            return os.open(found.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        return os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)


class Contender:
    """A process that wants the lease of `root`; `attempt` is called until it returns the lease.

    Clocks of machines differ, so a heartbeat is compared with nothing but itself: it must not
    change for a minute of this process's own clock.
    """

    def __init__(
        self, root: Path, owner: Owner, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._root = root
        self._owner = owner
        self._clock = clock
        self._seen: _Found | None = None
        self._seen_at = 0.0

    def attempt(self) -> Lease | str:
        """The lease, or whom it waits for, in words; `UserError` if another run lives."""
        found = _newest(self._root)
        if found is None or self._is_free(found):
            number = 1 if found is None else found.number + 1
            self._root.mkdir(parents=True, exist_ok=True)
            if _create(self._root, number, self._owner):
                return Lease(self._root, number, self._owner)
            return "another run, which starts at this moment"
        who = "another run" if found.owner is None else found.owner.describe()
        if self._seen is None:
            self._seen, self._seen_at = found, self._clock()
        elif found != self._seen:
            raise UserError(
                f"--save {self._root} is in use by {who}: give another --save, or end that run "
                "first"
            )
        return who

    def _is_free(self, found: _Found) -> bool:
        owner = found.owner
        if owner is not None and (
            found.released or owner.is_same_job(self._owner) or owner.is_dead_here()
        ):
            return True
        return found == self._seen and self._clock() - self._seen_at >= STILL_SECONDS


@dataclass(frozen=True, slots=True)
class _Found:
    """A lease file as it was read; two are equal if nothing has moved in between."""

    path: Path
    number: int
    content: bytes
    modified_ns: int
    owner: Owner | None  # None: damaged
    released: bool


def _newest(root: Path) -> _Found | None:
    """The lease file that counts; None if there is none."""
    while numbers := _numbers(root):
        path = _path(root, max(numbers))
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                continue  # a successor has just removed it
            if error.errno == errno.ELOOP:
                raise UserError(f"{path} is no regular file: remove it") from None
            raise
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"{path} is no regular file: remove it")
            content = os.pread(descriptor, _FILE_BYTES, 0)
        finally:
            os.close(descriptor)
        record = _parsed(content)
        owner = Owner.from_json(record)
        released = isinstance(record, dict) and record.get("released") is True
        return _Found(path, max(numbers), content, status.st_mtime_ns, owner, released)
    return None


def _numbers(root: Path) -> list[int]:
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    return [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]


def _path(root: Path, number: int) -> Path:
    return root / f"lease_{number}.json"


def _create(root: Path, number: int, owner: Owner) -> bool:
    """Creates lease `number`, complete at once, and removes older ones; False if too late.

    A slow contender may create a number that its successors have passed and removed.
    """
    path = _path(root, number)
    temporary = temporary_beside(path)
    content = _content(owner, beats=0, released=False)
    try:
        _write_new(temporary, content)
        try:
            os.link(temporary, path)
        except FileExistsError:
            # Over NFS an answer may be lost and its repetition fail: then the file has two names.
            if temporary.stat().st_nlink != 2:
                return False
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            try:
                _write_new(path, content)
            except FileExistsError:
                return False
    finally:
        temporary.unlink(missing_ok=True)
    others = _numbers(root)
    if max(others) > number:
        path.unlink(missing_ok=True)
        return False
    for older in others:
        if older < number:
            _path(root, older).unlink(missing_ok=True)
    return True


def _write_new(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        _overwrite(descriptor, content)
    finally:
        os.close(descriptor)


def _overwrite(descriptor: int, content: bytes) -> None:
    if os.pwrite(descriptor, content, 0) != len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(descriptor)


def _content(owner: Owner, *, beats: int, released: bool) -> bytes:
    record = {**asdict(owner), "heartbeat": beats, "released": released}
    text = json.dumps(record, indent=1)
    content = f"{text.ljust(_FILE_BYTES - 1)}\n".encode()
    assert len(content) == _FILE_BYTES, "texts of an owner are short"
    return content


def _parsed(content: bytes) -> object:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _short(text: str) -> str:
    """Printable ASCII of a limited length: for terminals, and for a file of fixed size."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text[:_TEXT_LENGTH])


def _boot_id() -> str:
    """Names this host until it boots again; empty where the system does not tell."""
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
    """When a process started, after boot; None if there is none or only its exit status is left."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = text.rpartition(")")[2].split()  # the name before may hold anything
    return None if state in "ZX" else int(rest[18])
