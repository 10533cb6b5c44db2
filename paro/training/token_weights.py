"""The weight of every token in a step's loss, and the factor from sums over ranks to the loss."""

from __future__ import annotations

import math

from torch import Tensor

from data.batch import Batch


class TokenWeights:
    """The weight of every token in the loss that backward starts from (Note: gradient scaling).

    Megatron's loss is the mean over micro-batches of their token means; those without an unmasked
    token have no mean and are left out. With --calculate-per-token-loss it is the mean over all
    tokens of the global batch. How many micro-batches or tokens count is known only at the end of
    the step: until then all are assumed to; `unscale` corrects it.

    Ranks that share a sample give its tokens equal weights: they divide by sums of whole samples.
    """

    def __init__(self, num_parts: int, num_sharing: int, *, scale: float, per_token: bool) -> None:
        """Weigh `num_parts` micro-batches, of all ranks, each on `num_sharing` ranks."""
        self._per_token = per_token
        self._num_sharing = num_sharing
        self._num_parts = num_parts
        self._factor = scale / self._num_parts
        self._scale = scale
        self._nominal_tokens = 0
        self._mask_sum = 0.0
        self.num_filled = 0  # batches so far that have an unmasked token

    def __call__(self, batch: Batch) -> Tensor:
        self._nominal_tokens = batch.loss_mask_BS.numel() * self._num_sharing
        self._mask_sum += batch.mask_sum
        self.num_filled += batch.mask_sum > 0.0
        tokens = self._nominal_tokens if self._per_token else max(batch.mask_sum, 1.0)
        return batch.loss_mask_BS * (self._factor / tokens)

    @property
    def num_tokens(self) -> float:
        """The unmasked tokens of this rank's samples in this step so far, its share of them."""
        return self._mask_sum / self._num_sharing

    def unscale(self, num_tokens: float, num_filled: float) -> float:
        """Compute the factor from the accumulated loss and gradients to the true ones.

        `num_tokens` and `num_filled` are sums over all ranks. NaN without tokens, as is the loss.
        """
        if num_tokens == 0.0:
            return math.nan
        if not self._per_token:
            return self._num_parts * self._num_sharing / num_filled / self._scale
        return self._num_parts * self._nominal_tokens / num_tokens / self._scale
