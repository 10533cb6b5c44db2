"""Micro-batches on the device, the time that training waits for them, and their tokens' weights."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from data.batch import Batch
from paro.distributed.timers import Timers
from paro.errors import UserError


@dataclass(slots=True)
class TimedBatches(Iterator[Batch]):
    """Micro-batches on the device, with the seconds that the training thread waited for them."""

    source: Iterator[Batch]
    device: torch.device
    timers: Timers
    seconds: float = 0.0

    def __next__(self) -> Batch:
        begin = time.perf_counter()
        try:
            with self.timers.measure("batch-generator", level=2):
                batch = next(self.source)
        # Causes: a token id above the vocabulary in a file too large to scan, or a dead worker.
        except UserError as error:
            raise UserError(*error.args, on_this_rank=True) from error
        self.seconds += time.perf_counter() - begin
        return batch.to(self.device, non_blocking=True)


@dataclass(slots=True)
class TokenWeights:
    """The weight of every token in the loss that backward starts from; collectives only sum.

    - By default, as in Megatron: mean over micro-batches of the micro-batch's token mean;
      micro-batches without an unmasked token do not count.
    - With --calculate-per-token-loss: mean over all unmasked tokens of the global batch.

    Both counts are known only at the end of the step. Until then every micro-batch and token is
    assumed to count; `unscale` corrects gradients and loss. Context-parallel ranks divide by counts
    of whole samples, so the tokens of a sample have equal weights on all of them.
    """

    num_parts: int  # micro-batches of all ranks
    context_parallel_size: int  # ranks of a micro-batch
    scale: float  # loss scale
    per_token: bool
    num_filled: int = 0  # micro-batches so far with at least one unmasked token
    _nominal_tokens: int = 0
    _mask_sum: float = 0.0

    def __call__(self, batch: Batch) -> Tensor:
        self._nominal_tokens = batch.loss_mask_BS.numel() * self.context_parallel_size
        self._mask_sum += batch.mask_sum
        self.num_filled += batch.mask_sum > 0.0
        tokens = self._nominal_tokens if self.per_token else max(batch.mask_sum, 1.0)
        return batch.loss_mask_BS * (self.scale / self.num_parts / tokens)

    @property
    def num_tokens(self) -> float:
        """The number of unmasked tokens in this step so far, divided by the ranks of a sample."""
        return self._mask_sum / self.context_parallel_size

    def unscale(self, num_tokens: float, num_filled: float) -> float:
        """Compute the factor from the accumulated loss and gradients to the true ones.

        `num_tokens` and `num_filled` are sums over all ranks. The factor is NaN without tokens.
        """
        if num_tokens == 0.0:
            return math.nan
        if not self.per_token:
            return self.num_parts * self.context_parallel_size / num_filled / self.scale
        return self.num_parts * self._nominal_tokens / num_tokens / self.scale
