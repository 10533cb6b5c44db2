"""Agrees on the step after which groups that train alone stop, without a group waiting in training.

Each group counts its steps in the store. A group that wants to stop marks all counters, and names a
step that no group has passed. A group sees the mark when it counts its next step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

_MARK = 1 << 40  # above any number of steps
_STEP = "stop/step"


@dataclass(slots=True, kw_only=True)
class StopStep:
    """The step after which all groups stop, as the first rank of a group learns of it."""

    store: dist.Store
    group: int
    num_groups: int

    def count(self, *, wants_to_stop: bool) -> int:
        """Count a step of this group, which it is about to end; return the step to stop after.

        0 means that no group wants to stop. Steps are counted from 1 at the first call. The call
        waits for another group only while that group names the step.
        """
        counted = self.store.add(_key(self.group), 1)
        if counted < _MARK and not wants_to_stop:
            return 0
        if wants_to_stop and self.store.add("stop/claims", 1) == 1:
            counters = [self.store.add(_key(each), _MARK) for each in range(self.num_groups)]
            self.store.set(_STEP, str(max(counter % _MARK for counter in counters) + 1))
        return int(self.store.get(_STEP))


def _key(group: int) -> str:
    return f"stop/steps/{group}"
