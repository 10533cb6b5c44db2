"""Process groups: one per use and axis span; trainings that take turns share them."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from paro.distributed.groups import GroupConfig, Groups, make_groups
from paro.topology import Use, make_topology
from tests.helpers.ranks import run_ranks
from tools.bench.planning.steps import SharedGroups

TOPOLOGY = make_topology(world_size=4, group_size=2, degrees=(2, 2, 4))
INTRA, INTER = ((axis,) for axis in TOPOLOGY.axes_between(1, 4))


def groups_of(rank: int, *uses: Use) -> Groups:
    return make_groups(
        TOPOLOGY,
        rank,
        dict.fromkeys(uses, frozenset({INTRA, INTER})),
        GroupConfig(timeout=timedelta(seconds=60)),
    )


def who_shares() -> tuple[list[bool], list[float]]:
    """Whether groups are the same, and a sum over each group of the second training."""
    rank = dist.get_rank()
    shared = SharedGroups()
    with shared.one_training():
        first = groups_of(rank, Use.GATHER, Use.REDUCE)
    with shared.one_training():
        second = groups_of(rank, Use.REDUCE, Use.ROTATE)
    alone = groups_of(rank, Use.GATHER)
    same = [
        second.of(Use.REDUCE, INTRA) is first.of(Use.GATHER, INTRA),
        second.of(Use.ROTATE, INTER) is first.of(Use.REDUCE, INTER),
        first.of(Use.GATHER, INTRA) is first.of(Use.REDUCE, INTRA),
        second.of(Use.REDUCE, INTRA) is second.of(Use.ROTATE, INTRA),
        alone.of(Use.GATHER, INTRA) is first.of(Use.GATHER, INTRA),
    ]
    sums = []
    for run in (INTRA, INTER):
        ranks = torch.tensor(10.0**rank)
        dist.all_reduce(ranks, group=second.of(Use.REDUCE, run))
        sums.append(ranks.item())
    return same, sums


@pytest.mark.ranks
def test_trainings_that_take_turns_share_groups() -> None:
    found = run_ranks(who_shares, 4)
    assert [same for same, _ in found] == [[True, True, False, False, False]] * 4
    assert [sums for _, sums in found] == [
        [11.0, 101.0], [11.0, 1010.0], [1100.0, 101.0], [1100.0, 1010.0],
    ]  # fmt: skip
