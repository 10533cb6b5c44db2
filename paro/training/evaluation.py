"""Evaluation: the mean loss on held-out data, of the model and of its averaged weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice, tee
from typing import NamedTuple

import torch
from torch import Tensor

from data.batch import Batch
from paro.distributed.timers import Timers
from paro.sharding.shards import UnitShards
from paro.training.micro_batches import TimedBatches
from paro.training.step import Training

_AT_ONCE = 64  # micro-batches that are kept, to evaluate averaged weights on them too


class Evaluation(NamedTuple):
    """The losses of a model on held-out data."""

    loss: float | None  # mean loss in nats per token; None: every token is masked
    bits_per_byte: float | None  # loss in bits per byte of text; None: token bytes are unknown
    ema_loss: float | None = None  # mean loss of averaged weights; None: there are none


def evaluate(
    training: Training, micro_batches: Iterator[Batch], num_micro_batches: int
) -> Evaluation:
    """Compute the mean loss over the unmasked tokens of held-out data.

    All tokens of all ranks have equal weight, also without --calculate-per-token-loss. The bytes
    that an evaluation sends are not counted.
    """
    optimizer, control = training.optimizer, training.control
    averages = optimizer.config.eval_ema and optimizer.num_averaged > 0
    at_once = _AT_ONCE if averages else num_micro_batches
    training.model.wait_for_updated_params()
    sums = torch.zeros(4, dtype=torch.float64)  # nats, tokens, bytes, nats of averaged weights
    for begin in range(0, num_micro_batches, at_once):
        part = islice(micro_batches, min(at_once, num_micro_batches - begin))
        batches, *again = tee(part) if averages else (part,)
        with _exchanged(training, optimizer.outer.exchange):
            sums[:3] += _sums(training, batches)
        for of_averages in again:
            with _exchanged(training, optimizer.exchange_averages):
                sums[3] += _sums(training, of_averages)[0]
    nats, num_tokens, text_bytes, nats_of_ema = control.sum(sums.tolist())
    training.exposed_timer.take()  # the rest: the GPU has finished by now
    has_tokens = num_tokens > 0.0
    return Evaluation(
        loss=nats / num_tokens if has_tokens else None,
        bits_per_byte=nats / math.log(2.0) / text_bytes if text_bytes > 0.0 else None,
        ema_loss=nats_of_ema / num_tokens if averages and has_tokens else None,
    )


def _sums(training: Training, micro_batches: Iterator[Batch]) -> Tensor:
    """Sum this rank's loss, its share of unmasked tokens and that of the bytes of their text."""
    nats = torch.zeros((), dtype=torch.float64, device=training.device)
    tokens = text_bytes = 0.0
    with training.traffic.paused():
        for batch in TimedBatches(micro_batches, training.device, Timers()):
            nats += training.model.evaluate(
                batch.tokens_BS, batch.labels_BS, batch.loss_mask_BS, **batch.documents()
            )
            tokens += batch.mask_sum / training.context_parallel_size
            text_bytes += batch.text_bytes / training.context_parallel_size
            training.exposed_timer.take()  # waits of an evaluation belong to no step
    return torch.tensor([float(nats), tokens, text_bytes], dtype=torch.float64)


@contextmanager
def _exchanged(training: Training, exchange: Callable[[], Iterable[UnitShards]]) -> Iterator[None]:
    """Give the block the parameters that an exchange brings to masters, then the own, bit for bit.

    `exchange` yields every unit whose masters it has exchanged; its second call reverses the first.
    """
    model, optimizer = training.model, training.optimizer
    with training.traffic.paused(), torch.no_grad():
        moved = [*exchange()]
        quantized = (unit for unit in moved if unit.quantized_update is not None)
        # Where updates are quantized, parameters are not the rounded masters.
        sent = {unit: unit.optim_param.clone() for unit in quantized}
        optimizer.write_moved(moved)
        try:
            yield
        finally:
            model.wait_for_updated_params()
            optimizer.write_moved(exchange(), sent)
            model.wait_for_updated_params()
