"""Ranks that save or load together: one decides, and all see the same failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from paro.checkpoint.directory import CheckpointError, describe

T = TypeVar("T")


class Ranks:
    """All ranks of a process group, or this process alone where there is none.

    Every method is collective and called from the one thread that uses the group. With NCCL the
    objects travel through the current device, which the runtime has set.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, *, alone: bool = False) -> None:
        self.group = process_group
        self.alone = alone or not (dist.is_available() and dist.is_initialized())
        self.is_first = self.alone or dist.get_rank(process_group) == 0

    def first_decides(self, action: Callable[[], T], blame: str) -> T:
        """What `action` returns on the first rank; its failure is raised by every rank."""
        outcome: list[Any] = [None, None]
        failure: Exception | None = None
        if self.is_first:
            try:
                outcome[0] = action()
            except Exception as error:
                failure, outcome[1] = error, _blamed(blame, error)
        if not self.alone:
            dist.broadcast_object_list(outcome, group=self.group, group_src=0)
        if failure is not None and not isinstance(failure, (CheckpointError, OSError)):
            raise failure
        if outcome[1] is not None:
            raise CheckpointError(outcome[1])
        result: T = outcome[0]
        return result

    @contextmanager
    def share_failure(self, blame: str) -> Iterator[None]:
        """Turns a failure on any rank, which DCP hands to all of them, into one line."""
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(_blamed(blame, error)) from error
        except CheckpointException as failure:
            rank = min(failure.failures)
            cause = failure.failures[rank][0]
            where = blame if self.alone else f"{blame}: rank {rank}"
            raise CheckpointError(_blamed(where, cause)) from cause


def _blamed(blame: str, error: BaseException) -> str:
    text = str(error) if isinstance(error, CheckpointError) else describe(error)
    return f"{blame}: {text}"
