"""The ranks of a save or load: one rank per folder decides, and all ranks raise the same error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch

from paro.checkpoint.folder_lock import FolderLock
from paro.checkpoint.locked_folders import LockedFolders
from paro.distributed.control import Control
from paro.distributed.groups import make_save_groups
from paro.distributed.world import World
from paro.errors import UserError, describe, is_memory_failure, is_storage_failure

T = TypeVar("T")


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

    @property
    def token(self) -> str:
        """Token of the lock, for file names that no other run uses; empty without a lock."""
        return "" if self.lock is None else self.lock.token

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
        result: T = self.near.gather(outcome)[0]
        return result

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


def ranks_that_save(locked: LockedFolders, control: Control, timeout: timedelta) -> CheckpointRanks:
    """Return ranks with process groups of their own, for saves while the ranks train."""
    if control.world.size == 1:
        return CheckpointRanks(control, control, range(1), locked.lock)
    world, near = make_save_groups(locked.folders, control.world.rank, timeout)
    everyone = control.over(world, range(control.world.size))
    if len(locked.folders) == 1:
        return CheckpointRanks(everyone, everyone, range(control.world.size), locked.lock)
    (members,) = (ranks for ranks in locked.folders if control.world.rank in ranks)
    return CheckpointRanks(everyone, control.over(near, members), members, locked.lock)
