"""The interface of a distributed model: sharded (gathered parameters) or rotated."""

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
    """A model that trains and evaluates this rank's batches; its units hold this rank's shards."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def context(self) -> ShardingContext: ...

    @property
    def units(self) -> Sequence[UnitShards]: ...

    @property
    def trainable_units(self) -> Sequence[UnitShards]: ...

    def begin_step(self, num_micro_batches: int) -> None:
        """Starts a step of `num_micro_batches` micro-batches."""

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
        """Waits until each unit's optimizer range holds the gradients summed over all ranks."""

    def evaluate(
        self, tokens_BS: Tensor, labels_BS: Tensor, weights_BS: Tensor, **documents: Any
    ) -> Tensor:
        """The weighted loss of a batch, computed without gradients."""

    def wait_for_updated_params(self) -> None:
        """Waits until `param_shard` of every unit holds the last update."""

    def close(self) -> None:
        """Closes comm streams and process groups; call it on every rank with no work in flight."""
