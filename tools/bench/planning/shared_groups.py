"""Process groups that several trainings of a process share; every live gloo group uses CPU time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist


class SharedGroups:
    """Groups of the trainings of a process that take turns; none of them may be closed.

    In one training every group has a purpose of its own, also where two have the same ranks. So a
    training gets the first, second, .. group of some ranks where it asks for the first, second, ..
    """

    def __init__(self) -> None:
        self._made: dict[tuple[Sequence[int], int], dist.ProcessGroup] = {}

    @contextmanager
    def one_training(self) -> Iterator[None]:
        """Around building a training; every rank must build the same ones in the same order."""
        make = dist.new_group
        asked: Counter[Sequence[int]] = Counter()

        def shared(ranks: list[int], **settings: Any) -> dist.ProcessGroup:
            members = tuple(ranks)
            key = members, asked[members]
            asked[members] += 1
            if key not in self._made:
                self._made[key] = make(ranks, **settings)
            return self._made[key]

        with patch.object(dist, "new_group", shared):
            yield
