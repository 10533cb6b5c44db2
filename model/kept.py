"""What attention of recomputed blocks keeps, so that their recomputation computes none."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor

Attended = tuple[Tensor, Tensor]  # an output, and the log-sum-exp of its scores


class KeptAttention:
    """Outputs and log-sum-exps of attention in a function that backward runs again.

    The first run adds them, the second, after `complete`, takes them in the same order; then they
    live as long as its other activations.
    """

    def __init__(self) -> None:
        self._found: deque[Attended] = deque()
        self._is_complete = False

    def complete(self) -> None:
        """Ends the first run."""
        self._is_complete = True

    def attended(self, attend: Callable[[], Attended]) -> Attended:
        """What `attend` returns, which only the first run calls."""
        if self._is_complete:
            return self._found.popleft()
        out, lse = attend()
        self._found.append((out.detach(), lse))
        return out, lse
