"""What all ranks raise where some of them failed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from paro.checkpoint.manifest import DamagedError
from paro.distributed import control
from paro.distributed.control import Control
from paro.distributed.world import World
from paro.errors import PeerError, StorageError, UserError
from tests.helpers.ranks import run_ranks


class Pretended(Control):
    """Rank 0 of several, with what the others tell it."""

    def __init__(self, *others: Exception | None) -> None:
        super().__init__(World(size=1 + len(others)), torch.device("cpu"))
        self.others = others

    def gather(self, value: object) -> list[Any]:
        return [value, *self.others]


def raised(own: Exception | None, *others: Exception | None, name_rank: bool) -> Exception:
    try:
        with Pretended(*others).raise_on_all_ranks("--save ckpt", name_rank=name_rank):
            if own is not None:
                raise own
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("own", "other", "kind", "line"),
    [
        (DamagedError("bad"), DamagedError("bad"), DamagedError, "--save ckpt: bad"),
        (DamagedError("bad"), DamagedError("worse"), DamagedError, "--save ckpt: rank 0: bad"),
        (DamagedError("bad"), UserError("wrong"), UserError, "--save ckpt: rank 0: bad"),
        (DamagedError("bad"), None, DamagedError, "--save ckpt: rank 0: bad"),
        (None, StorageError("full"), StorageError, "--save ckpt: rank 1: full"),
        (None, PeerError("rank 1 failed: a bug"), PeerError, "rank 1 failed: a bug"),
        (KeyError("a bug"), UserError("wrong"), KeyError, "'a bug'"),
    ],
)
def test_the_lowest_rank_that_failed_is_named_unless_all_failed_alike(
    own: Exception | None, other: Exception | None, kind: type[Exception], line: str
) -> None:
    error = raised(own, other, name_rank=True)
    assert (type(error), str(error)) == (kind, line)


def test_where_ranks_need_no_name_the_line_is_the_error_s_own() -> None:
    error = raised(None, None, UserError("wrong"), name_rank=False)
    assert str(error) == "--save ckpt: wrong"
    several = UserError("one", "two", example="do this")
    with pytest.raises(UserError) as caught, Pretended(several).raise_on_all_ranks():
        pass
    assert caught.value is several
    with Pretended(None, None).raise_on_all_ranks("--save ckpt", name_rank=True):
        pass  # nothing is raised where nothing failed


def sums() -> list[list[list[float]]]:
    """Sums of all ranks, and of each half of them, by a tree and in a ring."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = Control(World(rank=rank, size=size), torch.device("cpu"))
    halves = [[*range(size // 2)], [*range(size // 2, size)]]
    groups = [dist.new_group(ranks) for ranks in halves]
    half = whole.over(groups[rank >= size // 2], halves[rank >= size // 2])
    found = []
    for most_in_ring in (1, 4):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(control, "_MOST_IN_RING", most_in_ring)
            found.append([each.sum([0.1 * rank, 1.0, float(rank)]) for each in (whole, half)])
    return found


@pytest.mark.ranks
def test_many_ranks_sum_by_a_tree() -> None:
    by_tree, in_ring = zip(*run_ranks(sums, 4), strict=True)
    for rank, (whole, half) in enumerate(by_tree):
        assert whole == [pytest.approx(0.6), 4.0, 6.0]
        assert half[1:] == [2.0, 1.0 if rank < 2 else 5.0]
        assert whole == by_tree[0][0], "ranks have different bits"
    assert in_ring[0][0][1:] == [4.0, 6.0]
