"""The weight of every token in a step's loss, and what turns sums over ranks into the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from paro.distributed.world import World


class TokenWeights:
    """The weight of every token in the loss that backward starts from (Note: gradient scaling).

    Megatron's loss is the mean over micro-batches of their token means. With
    --calculate-per-token-loss it is the mean over all tokens of the global batch, whose number is
    known only at the end of the step: until then a full batch is assumed; `unscale` corrects it.
    """

    def __init__(
        self,
        world: World,
        num_micro_batches: int,
        *,
        scale: float,
        per_token: bool,
    ) -> None:
        self._per_token = per_token
        self._num_parts = num_micro_batches * world.data_parallel_size
        self._factor = scale / self._num_parts
        self._scale = scale
        self._nominal_tokens = 0
        self._masks: list[Tensor] = []

    def __call__(self, mask_BS: Tensor) -> Tensor:
        self._nominal_tokens = mask_BS.numel()
        self._masks.append(mask_BS.sum())
        tokens = float(mask_BS.numel()) if self._per_token else mask_BS.sum().clamp(min=1.0)
        return mask_BS * (self._factor / tokens)

    def num_tokens(self) -> Tensor:
        """Unmasked tokens of this rank in this step so far, a fp64 scalar."""
        return torch.stack(self._masks).double().sum()

    def unscale(self, num_tokens: float) -> float:
        """The factor from the accumulated loss and gradients to the true ones.

        `num_tokens` is the number of unmasked tokens over all ranks.
        """
        if not self._per_token:
            return 1.0 / self._scale
        return self._num_parts * self._nominal_tokens / max(num_tokens, 1.0) / self._scale
