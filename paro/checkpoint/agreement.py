"""Ranks that save or load together: one decides, and all see the same failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from paro.checkpoint.errors import CheckpointError, DamagedError, describe

T = TypeVar("T")


class Ranks:
    """All ranks of a process group, or this process alone where there is none.

    `near` is the group of those ranks that see the same folder as this one, where not all do.
    Every method is collective and called from the one thread that uses the groups. With NCCL the
    objects travel through the current device, which the runtime has set.
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
        # The ranks that share this one's folder, or None for all.
        self.sharing = None if self.all_near else frozenset(_members(near))

    def gather(self, value: T) -> list[T]:
        """What every rank passed, by rank."""
        if self.alone:
            return [value]
        gathered: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def gather_near(self, value: T) -> list[T]:
        """What every rank that sees the same folder passed."""
        if self.alone:
            return [value]
        gathered: list[Any] = [None] * dist.get_world_size(self.near)
        dist.all_gather_object(gathered, value, group=self.near)
        return gathered

    def first_decides(self, action: Callable[[], T], blame: str) -> T:
        """What `action` returns on the first rank of every folder; a failure is raised by all."""
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
        """Runs a block that may fail on any rank: then every rank raises the same line.

        It begins with `blame`, and names the rank where others met something else or nothing.
        It is a `DamagedError` where every failing rank met one. What is neither a user's nor a
        file's fault is raised as it is where it happened.
        """
        failure: Exception | None = None
        cause: BaseException | None = None
        told: tuple[int, bool, str] | None = None
        try:
            yield
        except CheckpointException as error:  # DCP hands it to all ranks that it ran on
            rank = min(error.failures)
            cause = error.failures[rank][0]
            named = rank if self.all_near else _members(self.near)[rank]
            told = (named, isinstance(cause, DamagedError), _text(cause))
        except Exception as error:
            failure = error
            told = (self.rank, isinstance(error, DamagedError), _text(error))
        everyone = self.gather(told)
        failures = [entry for entry in everyone if entry is not None]
        if failure is not None and not isinstance(failure, (CheckpointError, OSError)):
            raise failure
        if failures:
            rank, _, text = failures[0]
            all_fail = len({where for where, _, _ in failures}) == len(everyone)
            alike = all_fail and len({what for _, _, what in failures}) == 1
            named = not (self.alone or alike) and (name_rank or not self.all_near)
            parts = [blame] * bool(blame) + [f"rank {rank}"] * named + [text]
            damaged = all(is_damage for _, is_damage, _ in failures)
            kind = DamagedError if damaged else CheckpointError
            raise kind(": ".join(parts)) from (failure or cause)


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else describe(error)


def _members(group: dist.ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(group)
