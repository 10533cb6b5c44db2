"""The weight of every token in a step's loss, and the factor from sums over ranks to the loss."""

from __future__ import annotations

import math

from torch import Tensor

from data.batch import Batch


class TokenWeights:
    """The weight of every token in the loss that backward starts from (Note: gradient scaling).

    - By default, as in Megatron: mean over micro-batches of the micro-batch's token mean;
      micro-batches without an unmasked token do not count.
    - With --calculate-per-token-loss: mean over all unmasked tokens of the global batch.

    Both counts are known only at the end of the step. Until then every micro-batch and token is
    assumed to count; `unscale` corrects gradients and loss. Context-parallel ranks divide by counts
    of whole samples, so the tokens of a sample have equal weights on all of them.
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
        self.num_filled = 0  # micro-batches so far with at least one unmasked token

    def __call__(self, batch: Batch) -> Tensor:
        self._nominal_tokens = batch.loss_mask_BS.numel() * self._num_sharing
        self._mask_sum += batch.mask_sum
        self.num_filled += batch.mask_sum > 0.0
        tokens = self._nominal_tokens if self._per_token else max(batch.mask_sum, 1.0)
        return batch.loss_mask_BS * (self._factor / tokens)

    @property
    def num_tokens(self) -> float:
        """The number of unmasked tokens in this step so far, divided by the ranks of a sample."""
        return self._mask_sum / self._num_sharing

    def unscale(self, num_tokens: float, num_filled: float) -> float:
        """Compute the factor from the accumulated loss and gradients to the true ones.

        `num_tokens` and `num_filled` are sums over all ranks. The factor is NaN without tokens.
        """
        if num_tokens == 0.0:
            return math.nan
        if not self._per_token:
            return self._num_parts * self._num_sharing / num_filled / self._scale
        return self._num_parts * self._nominal_tokens / num_tokens / self._scale
