"""Locks --save for a run: one rank per folder that ranks see holds the folder's lock."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paro.checkpoint.directory import RANK_MARK
from paro.checkpoint.folder_lock import STILL_SECONDS, FolderLock, LockWaiter
from paro.checkpoint.lock_holder import LockHolder
from paro.distributed.control import Control
from paro.errors import UserError, reading, writing

_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class LockedFolders:
    """The ranks grouped by the folder that they see; the first rank of a folder has the lock."""

    folders: tuple[tuple[int, ...], ...]
    lock: FolderLock | None

    def is_ours(self) -> bool:
        """Return whether no other run may have locked this rank's folder yet."""
        return self.lock is None or self.lock.is_ours()


@contextmanager
def lock_folders(
    root: Path,
    control: Control,
    say: Callable[[str], None],
    *,
    progressed: Callable[[], None] = lambda: None,
) -> Iterator[LockedFolders]:
    """Hold the lock of every folder in the block; collective.

    Raises `UserError` on all ranks if another run holds a folder. `say` gets a line on every rank
    if the start has to wait; `progressed` is called in every turn of the wait.
    """
    folders = ranks_by_folder(root, control)
    is_first = any(control.world.rank == ranks[0] for ranks in folders)
    waiter = LockWaiter(root, LockHolder.this_process()) if is_first else None
    lock: FolderLock | None = None
    said = False
    try:
        # In short turns: a collective must not wait for a minute.
        while True:
            progressed()
            holder = ""
            with control.raise_on_all_ranks(), writing(f"--save {root}"):
                if waiter is not None and lock is None:
                    outcome = waiter.attempt()
                    if isinstance(outcome, FolderLock):
                        lock = outcome
                    else:
                        holder = outcome
            holders = [name for name in control.gather(holder) if name]
            if not holders:
                break
            if not said:
                say(
                    f"--save {root} belongs to {holders[0]}: waiting for a heartbeat; after "
                    f"{STILL_SECONDS:.0f} s without one this run takes it over"
                )
                said = True
            time.sleep(_LOOK_SECONDS)
        yield LockedFolders(folders, lock)
    finally:
        if lock is not None:
            lock.release()


def ranks_by_folder(
    root: Path, control: Control, *, blame: str = ""
) -> tuple[tuple[int, ...], ...]:
    """Return the ranks, grouped by the folder that they see under this path; collective.

    Every rank creates a temporary marker file and looks for the markers of the other ranks. Raises
    `UserError` if two ranks see each other's markers differently. `blame` names the folder's flag.
    """
    blame = blame or f"--save {root}"
    rank, size = control.world.rank, control.world.size
    if size == 1:
        return ((0,),)
    # Markers have rank 0's token in their names: leftovers of a killed run are not counted.
    token = control.gather(secrets.token_hex(8))[0]
    marks = [root / f"{RANK_MARK}{other}_{token}" for other in range(size)]
    try:
        with control.raise_on_all_ranks(), writing(blame):
            root.mkdir(parents=True, exist_ok=True)
            marks[rank].touch()
        # All markers exist: the block above ends once all ranks have left it.
        with control.raise_on_all_ranks(), reading(blame):
            listed = {*root.iterdir()}
        seen = tuple(other for other in range(size) if marks[other] in listed)
        # Also a barrier: no marker is removed before every rank has listed the folder.
        folders = control.gather(seen)
    finally:
        marks[rank].unlink(missing_ok=True)
    with control.raise_on_all_ranks():
        for other in seen:
            if folders[other] != seen:
                raise UserError(
                    f"{root}: ranks {rank} and {other} do not see each other's files in the same "
                    "way: give a folder that all share, or that every node has for itself"
                )
    return tuple(sorted(set(folders)))
