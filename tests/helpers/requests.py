"""Collectives one by one, as tests ask for them, and the chunks that their schedules send."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paro.collectives.interface import CollectiveRequest, Collectives
from paro.collectives.schedule import Op, Schedule
from paro.distributed.comm_stream import Event
from paro.topology import AxisSpan


def all_gather(collectives: Collectives, whole: Tensor, span: AxisSpan, **more: Any) -> Event:
    """Fills `whole`; `more` are fields of the request."""
    return collectives.run(CollectiveRequest(Op.ALL_GATHER, whole, span, whole.dtype, **more))


def reduce_scatter(
    collectives: Collectives, whole: Tensor, span: AxisSpan, dtype: torch.dtype, **more: Any
) -> Event:
    """Writes the sum to this rank's shard of `whole`; `more` are fields of the request."""
    return collectives.run(CollectiveRequest(Op.REDUCE_SCATTER, whole, span, dtype, **more))


def all_reduce(
    collectives: Collectives, whole: Tensor, span: AxisSpan, dtype: torch.dtype
) -> Event:
    """Writes the sum to all of `whole`."""
    return collectives.run(CollectiveRequest(Op.ALL_REDUCE, whole, span, dtype))


def sent_fraction(schedule: Schedule, num_places: int, num_chunks: int, level: int) -> float:
    """The part of the whole buffer that a position sends over `level`."""
    sent = sum(len(schedule.steps[index].send.chunks) for index in schedule.of_level[level])
    return sent / (num_places * num_chunks)
