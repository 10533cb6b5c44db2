"""Recomputation in backward, and what attention keeps so that none is computed again there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

Attended = tuple[Tensor, Tensor]  # an output, and the log-sum-exp of its scores


def checkpointed(function: Callable[..., Any], *args: object) -> Any:
    """Return the function's result; backward calls it again instead of keeping what it computes."""
    # Dropout is a hash of numbers, so there is no state of a random generator to save.
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


class KeptAttention:
    """Outputs and log-sum-exps of attention in a function that backward runs again.

    The first run adds them, the second, after `complete`, takes them in the same order; then they
    live as long as its other activations.
    """

    def __init__(self) -> None:
        self._found: deque[Attended] = deque()
        self._is_complete = False

    def complete(self) -> None:
        """End the first run."""
        self._is_complete = True

    def attended(self, attend: Callable[[], Attended]) -> Attended:
        """What `attend` returns, which only the first run calls."""
        if self._is_complete:
            return self._found.popleft()
        out, lse = attend()
        self._found.append((out.detach(), lse))
        return out, lse
