"""Synthetic tokens that a model can learn; a sample depends only on a seed and its number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESTART_PROBABILITY = 0.1  # per token, of a jump to another position of the cycle


@dataclass(kw_only=True, eq=False)
class MockDataset:
    """A walk along a fixed random cycle through the vocabulary, with jumps to random positions.

    The token after t is always the same unless there is a jump, and jumps favour some positions.
    So the loss falls at once (frequencies) and keeps falling (successors), down to the entropy of
    the jumps. Every stream (train, valid, test) has its own samples on the same cycle.
    """

    num_samples: int
    seq_length: int
    vocab_size: int
    seed: int
    stream: int = 0

    def __post_init__(self) -> None:
        order = np.random.RandomState(self.seed).permutation(self.vocab_size)
        self.cycle = order.astype(np.int64)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        random = np.random.Generator(np.random.PCG64([self.seed, self.stream, index]))
        count = self.seq_length + 1
        jumps = random.random(count) < RESTART_PROBABILITY
        jumps[0] = True
        uniform = random.random(count)
        targets = (len(self.cycle) * uniform * uniform * uniform).astype(np.int64)  # skewed
        times = np.arange(count)
        latest_jump = np.maximum.accumulate(np.where(jumps, times, 0))
        places = targets[latest_jump] + times - latest_jump
        return self.cycle[places % len(self.cycle)]

    def loss_mask(self, index: int) -> None:
        """Return None: every token is trained on."""

    def describe(self) -> str:
        return f"{self.num_samples:,} samples of synthetic tokens (--mock-data)"
