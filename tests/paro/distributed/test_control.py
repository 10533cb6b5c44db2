"""What all ranks raise where some of them failed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paro.checkpoint.manifest import DamagedError
from paro.distributed.control import Control
from paro.distributed.world import World
from paro.errors import PeerError, StorageError, UserError


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


def test_nothing_is_raised_where_nothing_failed() -> None:
    with Pretended(None, None).raise_on_all_ranks("--save ckpt", name_rank=True):
        pass
