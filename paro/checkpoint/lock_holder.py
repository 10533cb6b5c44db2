"""The process that holds a folder's lock: what its lock file says of it, and whether it is dead."""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from paro.distributed.world import read_job_id, read_rendezvous_id
from paro.errors import UserError
from paro.files.schema import Count, Positive, parse_json

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


def _short(text: str) -> str:
    """Shorten a text and make it printable ASCII, for terminals and a file of constant size."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text[:_TEXT_LENGTH])


def _boot_id() -> str:
    """Return an ID of this host until the next boot; empty where the system has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _pid_namespace() -> str:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _start_ticks(pid: int) -> int | None:
    """Return when a process started, after boot; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = text.rpartition(")")[2].split()  # the name may hold any text
    return None if state in "ZX" else int(rest[18])
