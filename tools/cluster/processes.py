"""Finds and ends the processes that run in a cluster's namespaces."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from paro.errors import UserError
from tools.cluster.network import NETNS

# In the environment of all processes that `run` starts, inherited by their children.
RUN_VARIABLE = "PARO_CLUSTER_RUN"


def processes_in(namespaces: Iterable[str], *, started_by_run: str | None = None) -> Iterator[int]:
    """Yield the processes in these namespaces; of a named cluster, those that `run` started."""
    paths = (NETNS / namespace for namespace in namespaces)
    inodes = {(stat.st_dev, stat.st_ino) for stat in map(_stat_or_none, paths) if stat}
    entry = f"{RUN_VARIABLE}={started_by_run}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        stat = _stat_or_none(path / "ns/net")
        if stat is None or (stat.st_dev, stat.st_ino) not in inodes:
            continue
        pid = int(path.name)
        if started_by_run is None or entry in environment(pid):
            yield pid


def end_processes(
    namespaces: Iterable[str], *, started_by_run: str | None = None, seconds: float = 10.0
) -> None:
    """Kill them and any processes they start meanwhile; wait until all are gone."""
    namespaces = list(namespaces)
    deadline = time.monotonic() + seconds
    while pids := list(processes_in(namespaces, started_by_run=started_by_run)):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise UserError(
                f"processes {', '.join(map(str, pids))} do not end, not even by SIGKILL"
            )
        time.sleep(0.02)


def _stat_or_none(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:  # gone, or a zombie
        return None


def environment(pid: int) -> list[bytes]:
    """Return the environment with which a process was started; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def children(pid: int) -> list[int]:
    """Return the processes that a process has started; none if it is gone."""
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []
