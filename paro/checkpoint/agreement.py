"""Collectives of a save or load: one rank decides, and all ranks raise the same error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from paro.checkpoint.manifest import DamagedError
from paro.errors import (
    PeerError,
    StorageError,
    UserError,
    describe,
    for_all_ranks,
    is_storage_failure,
)

T = TypeVar("T")


class Ranks:
    """All ranks of a process group, or this process alone where there is none.

    `near` is the group of ranks that see the same folder as this one, if not all do. Every method
    is collective and called from the one thread that uses the groups. With NCCL, objects are sent
    through the current device, which the runtime has set.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        *,
        near: dist.ProcessGroup | None = None,
        alone: bool = False,
    ) -> None:
        self.group = process_group
        self.near = near or process_group
        self.alone = alone or not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self.alone else dist.get_rank(process_group)
        self.is_first = self.rank == 0
        self.is_first_near = self.alone or dist.get_rank(self.near) == 0
        self.all_near = self.near is self.group
        # The ranks that see the same folder as this one; None: all ranks.
        self.sharing = None if self.all_near else frozenset(_members(near))

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in rank order."""
        if self.alone:
            return [value]
        gathered: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def gather_near(self, value: T) -> list[T]:
        """The values of the ranks that see the same folder, in rank order."""
        if self.alone:
            return [value]
        gathered: list[Any] = [None] * dist.get_world_size(self.near)
        dist.all_gather_object(gathered, value, group=self.near)
        return gathered

    def first_decides(self, action: Callable[[], T], blame: str) -> T:
        """Runs `action` on the first rank of every folder; all get its result or its error."""
        outcome: list[Any] = [None]
        with self.raise_on_all_ranks(blame, name_rank=False):
            if self.is_first_near:
                outcome[0] = action()
        if not self.alone:
            dist.broadcast_object_list(outcome, group=self.near, group_src=0)
        result: T = outcome[0]
        return result

    @contextmanager
    def raise_on_all_ranks(self, blame: str = "", *, name_rank: bool = True) -> Iterator[None]:
        """Runs a block that may fail on any rank; if it does, every rank raises the same line.

        The line starts with `blame`, and names the rank unless all ranks failed in the same way.
        It is a `DamagedError` if every failing rank met one, and a `StorageError` for a full disk;
        any other error of the system is about the folder that the user gave. A bug is raised
        unchanged on its rank of origin, and as a `PeerError` on the others.
        """
        failure: BaseException | None = None
        told: tuple[int, UserError | StorageError | PeerError] | None = None
        try:
            yield
        except CheckpointException as error:  # DCP raises it on all its ranks
            rank = min(error.failures)
            failure = error.failures[rank][0]
            failure.__cause__ = error  # it shows the traceback of each rank
            named = rank if self.all_near else _members(self.near)[rank]
            told = (named, _of_the_folder(failure, named))
        except Exception as error:
            failure, told = error, (self.rank, _of_the_folder(error, self.rank))
        # A failed rank takes part too, before it raises: the others would wait for it forever.
        everyone = self.gather(told)
        if failure is not None and told is not None and isinstance(told[1], PeerError):
            raise failure
        failures = [entry for entry in everyone if entry is not None]
        if failures:
            rank, first = failures[0]
            if isinstance(first, PeerError):
                raise first
            all_fail = len({where for where, _ in failures}) == len(everyone)
            alike = all_fail and len({str(what) for _, what in failures}) == 1
            named = not (self.alone or alike) and (name_rank or not self.all_near)
            parts = [blame] * bool(blame) + [f"rank {rank}"] * named + [str(first)]
            damaged = all(isinstance(what, DamagedError) for _, what in failures)
            kind = UserError if isinstance(first, DamagedError) and not damaged else type(first)
            raise kind(": ".join(parts)) from failure


def _of_the_folder(error: BaseException, rank: int) -> UserError | StorageError | PeerError:
    if isinstance(error, OSError) and not is_storage_failure(error):
        return UserError(describe(error))
    return for_all_ranks(error, rank)


def _members(group: dist.ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(group)
