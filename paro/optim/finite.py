"""Finds states that are not finite, before they are saved."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from paro.distributed.control import Control
from paro.sharding.buffers import FlatShard


def not_finite(shards: Iterable[FlatShard], control: Control) -> str | None:
    """Which state of which rank holds infinity or NaN, the same on all ranks; None: all are finite.

    Collective, and cheap: it reads every shard once and synchronizes once.
    """
    mine = list(shards)
    (num_wrong,) = control.sum([float(not _all_finite(mine))])
    if not num_wrong:
        return None
    everyone = control.gather(_first_not_finite(mine))
    rank, name = next((rank, name) for rank, name in enumerate(everyone) if name is not None)
    where = f"{name} on rank {rank}"
    return where if num_wrong == 1 else f"{where}, the first of {num_wrong:.0f} ranks"


@torch.no_grad()
def _all_finite(shards: Iterable[FlatShard]) -> bool:
    """By the extremes of every shard: unlike a sum they cannot overflow, and they pass NaN on."""
    held = (shard.values for shard in shards if shard.values.is_floating_point())
    extremes = [end for values in held if values.numel() for end in values.aminmax()]
    return not extremes or bool(torch.stack(extremes).isfinite().all())


def _first_not_finite(shards: Iterable[FlatShard]) -> str | None:
    """The first state that is not finite, under the name that it has in a checkpoint."""
    for shard in shards:
        stop = shard.start + shard.values.numel()
        for piece in shard.layout.pieces(shard.start, stop):
            begin = piece.offset - shard.start
            values = shard.values[begin : begin + piece.high - piece.low]
            if not values.isfinite().all():
                return f"{shard.state}.{piece.box.name}"
    return None
