"""The ranks of a save or load, by the folder that they see: one locks it and decides for all."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch

from paro.checkpoint.directory import RANK_MARK
from paro.checkpoint.folder_lock import STILL_SECONDS, FolderLock, LockHolder, attempts_to_lock
from paro.distributed.control import Control
from paro.distributed.groups import make_save_groups
from paro.distributed.world import World
from paro.errors import UserError, describe, is_memory_failure, is_storage_failure, reading, writing
from paro.files.object_store import is_url

T = TypeVar("T")
_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class CheckpointRanks:
    """All ranks, and the ranks (of a node, or all) that see this rank's folder of checkpoints.

    Every method is collective and called from the only thread that uses the groups.
    """

    everyone: Control
    near: Control
    folder_ranks: Sequence[int]  # the ranks of `near`, by their numbers in `everyone`
    lock: FolderLock | None = None  # the folder's lock, on the folder's first rank; None elsewhere

    @property
    def share_one_folder(self) -> bool:
        return self.near is self.everyone

    @property
    def is_first_of_folder(self) -> bool:
        return self.near.world.rank == 0

    def check_lock(self) -> None:
        """Raise `LockLostError` on the folder's first rank if another run holds the folder now."""
        if self.lock is not None:
            self.lock.check()

    def first_decides(self, action: Callable[[], T], blame: str) -> T:
        """Run `action` on the first rank of every folder; all ranks get the result or the error."""
        outcome: T | None = None
        with self.raise_on_all_ranks(blame, name_rank=False):
            if self.is_first_of_folder:
                outcome = action()
        return self.near.gather(outcome)[0]

    @contextmanager
    def raise_on_all_ranks(self, blame: str = "", *, name_rank: bool = True) -> Iterator[None]:
        """Raise an error of the block, which reads or writes the folder, on all ranks.

        An `OSError` other than a full disk becomes a `UserError`: it is about the given folder.
        """
        name_rank = name_rank or not self.share_one_folder
        with self.everyone.raise_on_all_ranks(blame, name_rank=name_rank):
            try:
                yield
            except OSError as error:
                if is_storage_failure(error) or is_memory_failure(error):
                    raise
                raise UserError(describe(error)) from error


def with_one_folder(control: Control) -> CheckpointRanks:
    """Return the ranks of a run that all see one folder."""
    return CheckpointRanks(control, control, range(control.world.size))


def one_process() -> CheckpointRanks:
    """Return the ranks of a program of one process."""
    return with_one_folder(Control(World(), torch.device("cpu")))


@dataclass(frozen=True, slots=True)
class LockedFolders:
    """The ranks grouped by the folder that they see; the first rank of a folder has the lock."""

    folders: tuple[tuple[int, ...], ...]
    lock: FolderLock | None


def ranks_that_save(locked: LockedFolders, control: Control, timeout: timedelta) -> CheckpointRanks:
    """Return ranks with process groups of their own, for saves while the ranks train."""
    if control.world.size == 1:
        return CheckpointRanks(control, control, range(1), locked.lock)
    world, near = make_save_groups(locked.folders, control.world.rank, timeout)
    everyone = control.over(world, range(control.world.size))
    (members,) = (ranks for ranks in locked.folders if control.world.rank in ranks)
    among = everyone if near is world else control.over(near, members)
    return CheckpointRanks(everyone, among, members, locked.lock)


@contextmanager
def lock_folders(
    root: Path, control: Control, say: Callable[[str], None], progressed: Callable[[], None]
) -> Iterator[LockedFolders]:
    """Hold the lock of every folder in the block; collective.

    Raises `UserError` on all ranks if another run holds a folder. `say` gets a line on every rank
    if the start has to wait; `progressed` is called in every turn of the wait.
    """
    folders = ranks_by_folder(root, control, f"--save {root}")
    is_first = any(control.world.rank == ranks[0] for ranks in folders)
    attempts = attempts_to_lock(root, LockHolder.this_process()) if is_first else iter(())
    lock: FolderLock | None = None
    said = False
    try:
        # In short turns: a collective must not wait for a minute.
        while True:
            progressed()
            with control.raise_on_all_ranks(), writing(f"--save {root}"):
                outcome = next(attempts, "")
            if isinstance(outcome, FolderLock):
                lock, outcome = outcome, ""
            holders = [name for name in control.gather(outcome) if name]
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


def ranks_by_folder(root: Path, control: Control, blame: str) -> tuple[tuple[int, ...], ...]:
    """Return the ranks, grouped by the folder that they see under this path; collective.

    Every rank creates a temporary marker file and looks for the markers of the other ranks. Raises
    `UserError` if two ranks see each other's markers differently. `blame` names the folder's flag.
    """
    rank, size = control.world.rank, control.world.size
    if size == 1 or is_url(root):
        return (tuple(range(size)),)
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
