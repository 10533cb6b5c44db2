"""Recomputation in backward, and attention's outputs that are saved from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

AttentionOutput = tuple[Tensor, Tensor]  # an output, and the log-sum-exp of its scores


def checkpointed(function: Callable[..., Any], *args: object) -> Any:
    """Call the function; backward calls it again instead of saving activations."""
    # Dropout is a hash, so there is no random generator state to save.
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


class SavedAttention:
    """Outputs and log-sum-exps of attention in a function that backward recomputes.

    The first run saves the outputs. The second run, after `end_first_run`, takes the outputs in
    order instead of computing attention; they then live as long as its other activations.
    """

    def __init__(self) -> None:
        self._outputs: deque[AttentionOutput] = deque()
        self._is_second_run = False

    def end_first_run(self) -> None:
        self._is_second_run = True

    def output_of(self, attend: Callable[[], AttentionOutput]) -> AttentionOutput:
        """Call `attend` and save its output; take a saved one instead in the second run."""
        if self._is_second_run:
            return self._outputs.popleft()
        out, lse = attend()
        self._outputs.append((out.detach(), lse))
        return out, lse
