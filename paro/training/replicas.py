"""Checks that replicas of a range of model states are equal bit for bit on all their ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from hashlib import sha256

import torch
from torch import Tensor

from paro.errors import RunError
from paro.training.step import Training

_COLUMNS = 1024
_PRIME = 1_099_511_628_211

Holders = tuple[int, int, int]  # the first and the last of the ranks with a range, their number
Hashes = dict[tuple[str, Holders], int]  # of a rank's ranges of states, by name and holders


def check_replicas(training: Training, *, iteration: int) -> None:
    """Raise `RunError` on all ranks if a replica differs from the others; collective."""
    training.model.wait_for_updated_params()
    training.optimizer.outer.wait()
    mine = _hashes(training)
    by_replicas: defaultdict[Holders, list[int]] = defaultdict(list)
    for (_, holders), value in mine.items():
        by_replicas[holders].append(value)
    # Gather one digest per set of ranks first: gathering the hashes of all units takes long.
    digests = {key: sha256(repr(hashes).encode()).digest() for key, hashes in by_replicas.items()}
    everyone: list[dict[Holders, bytes]] = training.control.gather(digests)
    different = {pair for theirs in everyone for pair in theirs.items()}
    if len(different) == len(dict(different)):  # one digest for each set of ranks
        return
    what = first_difference(training.control.gather(mine))
    raise RunError(
        f"after iteration {iteration} {what}, and --check-weight-hash-across-dp-replicas-interval "
        "says to stop there: a device or the memory of that node may be faulty; nothing was saved "
        "since"
    )


def first_difference(everyone: Sequence[Hashes]) -> str:
    """Name the first range that differs and the deviating ranks; all ranks without a majority."""
    ranges: defaultdict[tuple[str, Holders], dict[int, int]] = defaultdict(dict)
    for rank, of_rank in enumerate(everyone):
        for held, value in of_rank.items():
            ranges[held][rank] = value
    name, hashes = next(
        (name, hashes) for (name, _), hashes in ranges.items() if len(set(hashes.values())) > 1
    )
    (usual, most), *_ = Counter(hashes.values()).most_common(1)
    odd = [rank for rank, value in hashes.items() if value != usual]
    if 2 * most <= len(hashes):
        return f"{name} differs between ranks {', '.join(map(str, hashes))}"
    ranks = f"rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))}"
    return f"{name} on {ranks} differs from its {most} other replicas"


def _hashes(training: Training) -> Hashes:
    """Compute hashes of this rank's replicated ranges of parameters and optimizer states."""
    context = training.model.context
    held: list[tuple[str, Sequence[int], Tensor]] = []  # name, ranks with replicas, values
    for unit in training.model.units:
        degrees = context.strategy.params, unit.step_spec.sum_degree
        replicas = context.topology.members(context.topology.axes_between(*degrees), context.rank)
        held.append((f"the parameters of {unit.name}", replicas, unit.param_shard))
    for shard in training.optimizer.flat_shards():
        name = f"{shard.state} of {shard.layout.chunks[0].chunk.name}"
        held.append((name, shard.replicas, shard.values))
    return {
        (name, (ranks[0], ranks[-1], len(ranks))): hash_of(values)
        for name, ranks, values in held
        if len(ranks) > 1
    }


@torch.no_grad()
def hash_of(values: Tensor) -> int:
    """Compute a 64-bit hash of a tensor's bits, which a single flipped bit always changes.

    The words form a table with `_COLUMNS` columns. The hash is sum_c factor_c * (sum of column c),
    with sums that wrap around: one fast reduction, without a copy of the tensor.
    """
    octets = values.detach().view(torch.uint8)
    whole = octets.numel() - octets.numel() % (8 * _COLUMNS)
    words = torch.zeros(_COLUMNS, dtype=torch.int64, device=values.device)
    words += octets[:whole].view(torch.int64).view(-1, _COLUMNS).sum(0)
    rest = torch.zeros(8 * _COLUMNS, dtype=torch.uint8, device=values.device)
    rest[: octets.numel() - whole] = octets[whole:]
    words += rest.view(torch.int64) * _PRIME
    odd = torch.arange(1, 2 * _COLUMNS, 2, device=values.device)
    return int((words * odd).sum())
