"""What a model is whose states are spread over ranks, however its parameters get to their use."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

from torch import Tensor, nn

from paro.sharding.shards import ShardingContext, UnitShards


class Phase(Enum):
    """What the training thread is doing to the model."""

    IDLE = 0
    EVALUATION = 1
    FORWARD = 2
    BACKWARD = 3


class DistributedModel(Protocol):
    """Trains and evaluates this rank's batches; its units hold this rank's shards."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def context(self) -> ShardingContext: ...

    @property
    def units(self) -> Sequence[UnitShards]: ...

    @property
    def trainable_units(self) -> Sequence[UnitShards]: ...

    def begin_step(self, num_micro_batches: int) -> None:
        """Says how many micro-batches make the step that starts now."""

    def forward_backward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor,
        weights_BS: Tensor,
        *,
        last: bool,
        **documents: Any,
    ) -> Tensor:
        """Accumulates the gradients of one micro-batch and returns its weighted loss."""

    def finish_gradients(self) -> None:
        """Waits until every gradient is summed in the optimizer's range of its unit."""

    def evaluate(
        self, tokens_BS: Tensor, labels_BS: Tensor, weights_BS: Tensor, **documents: Any
    ) -> Tensor:
        """The weighted loss of a batch; keeps no gradient."""

    def wait_for_updated_params(self) -> None:
        """Waits until every rank's `param_shard` holds the last update."""

    def close(self) -> None:
        """Ends the lanes and groups; every rank calls it when nothing is under way."""
