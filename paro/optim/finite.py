"""Checks that states are finite before they are saved, and the squared norm of ranges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor

from paro.distributed.control import Control
from paro.spec.states import FlatShard

ROW = 4096  # elements per row; a CPU computes the norms of rows in parallel


def not_finite(shards: Iterable[FlatShard], control: Control) -> str | None:
    """Name a state that holds infinity or NaN and its rank, for all ranks; None if all are finite.

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
    """Check the extremes of every shard: unlike a sum they cannot overflow, and they keep NaN."""
    held = (shard.values for shard in shards if shard.values.is_floating_point())
    extremes: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for values in held:
        if values.numel():
            extremes[values.device] += values.aminmax()
    return all(bool(torch.stack(ends).isfinite().all()) for ends in extremes.values())


def _first_not_finite(shards: Iterable[FlatShard]) -> str | None:
    """Return the first state that is not finite, by its name in checkpoints."""
    for shard in shards:
        stop = shard.start + shard.values.numel()
        for part in shard.layout.chunk_ranges(shard.start, stop):
            begin = part.offset - shard.start
            values = shard.values[begin : begin + part.high - part.low]
            if not values.isfinite().all():
                return f"{shard.state}.{part.chunk.name}"
    return None


def square_sum(ranges: Iterable[Tensor], device: torch.device) -> Tensor:
    """Compute the squared norm of all `ranges` in fp64, on a device; ranges may be on others.

    It is not finite if any element is not.
    """
    # No name here keeps a range: `ranges` may compute each, whose memory is free for the next one.
    norms = [norm.to(device) for norm in chain.from_iterable(map(_norms, ranges))]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(norms).double().square().sum()


def _norms(values: Tensor) -> Iterator[Tensor]:
    """Yield norms whose squares add up to the squared norm; on a CPU by rows, for threads."""
    if values.device.type == "cpu":
        rows = values[: values.numel() // ROW * ROW].view(-1, ROW)
        values = values[rows.numel() :]
        yield torch.linalg.vector_norm(
            torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32), dtype=torch.float32
        )
    yield torch.linalg.vector_norm(values, dtype=torch.float32)
