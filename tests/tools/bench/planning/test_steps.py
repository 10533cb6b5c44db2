"""Process groups: one per use and axis span; trainings that take turns share them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from paro.distributed.comm_stream import InlineStreams
from paro.distributed.groups import Groups, Links, make_groups
from paro.distributed.process_group import RuntimeConfig
from paro.topology import StreamKind, make_topology
from tests.helpers.ranks import run_ranks
from tools.bench.planning.steps import SharedGroups

TOPOLOGY = make_topology(world_size=4, group_size=2, degrees=(2, 2, 4))
INTRA, INTER = ((axis,) for axis in TOPOLOGY.axes_between(1, 4))


def groups_of(rank: int, *kinds: StreamKind) -> Groups:
    return make_groups(
        TOPOLOGY,
        rank,
        dict.fromkeys(kinds, frozenset({INTRA, INTER})),
        RuntimeConfig(distributed_backend="gloo"),
        Links(InlineStreams()),
    )


def who_shares() -> tuple[list[bool], list[float]]:
    """Whether groups are the same, and a sum over each group of the second training."""
    rank = dist.get_rank()
    shared = SharedGroups()
    with shared.one_training():
        first = groups_of(rank, StreamKind.GATHER, StreamKind.REDUCE)
    with shared.one_training():
        second = groups_of(rank, StreamKind.REDUCE, StreamKind.ROTATE)
    alone = groups_of(rank, StreamKind.GATHER)
    same = [
        second.of(StreamKind.REDUCE, INTRA) is first.of(StreamKind.GATHER, INTRA),
        second.of(StreamKind.ROTATE, INTER) is first.of(StreamKind.REDUCE, INTER),
        first.of(StreamKind.GATHER, INTRA) is first.of(StreamKind.REDUCE, INTRA),
        second.of(StreamKind.REDUCE, INTRA) is second.of(StreamKind.ROTATE, INTRA),
        alone.of(StreamKind.GATHER, INTRA) is first.of(StreamKind.GATHER, INTRA),
    ]
    sums = []
    for run in (INTRA, INTER):
        ranks = torch.tensor(10.0**rank)
        dist.all_reduce(ranks, group=second.of(StreamKind.REDUCE, run))
        sums.append(ranks.item())
    return same, sums


@pytest.mark.ranks
def test_trainings_that_take_turns_share_groups() -> None:
    found = run_ranks(who_shares, 4)
    assert [same for same, _ in found] == [[True, True, False, False, False]] * 4
    assert [sums for _, sums in found] == [
        [11.0, 101.0], [11.0, 1010.0], [1100.0, 101.0], [1100.0, 1010.0],
    ]  # fmt: skip
