"""Evaluation: the mean loss of the model on held-out data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from data.batch import Batch
from paro.distributed.timers import Timers
from paro.training.micro_batches import TimedBatches
from paro.training.step import Training


class Evaluation(NamedTuple):
    """The losses of a model on held-out data."""

    loss: float | None  # mean loss in nats per token; None: every token is masked
    bits_per_byte: float | None  # loss in bits per byte of text; None: token bytes are unknown


def evaluate(
    training: Training, micro_batches: Iterator[Batch], num_micro_batches: int
) -> Evaluation:
    """Compute the mean loss over the unmasked tokens of held-out data.

    All tokens of all ranks have equal weight, also without --calculate-per-token-loss. The bytes
    that an evaluation sends are not counted.
    """
    model, num_sharing = training.model, training.num_sharing
    model.wait_for_updated_params()
    own_nats = torch.zeros((), dtype=torch.float64, device=training.device)
    own_tokens = own_bytes = 0.0
    batches = TimedBatches(micro_batches, training.device, Timers())
    with training.traffic.paused(), training.optimizer.agreed_parameters():
        for _ in range(num_micro_batches):
            batch = next(batches)
            own_nats += model.evaluate(
                batch.tokens_BS, batch.labels_BS, batch.loss_mask_BS, **batch.documents()
            )
            own_tokens += batch.mask_sum / num_sharing
            own_bytes += batch.text_bytes / num_sharing
            training.exposure.take()  # waits of an evaluation belong to no step
    nats, num_tokens, text_bytes = training.control.sum([float(own_nats), own_tokens, own_bytes])
    training.exposure.take()  # the rest: the GPU has finished by now
    return Evaluation(
        loss=nats / num_tokens if num_tokens > 0.0 else None,
        bits_per_byte=nats / math.log(2.0) / text_bytes if text_bytes > 0.0 else None,
    )
