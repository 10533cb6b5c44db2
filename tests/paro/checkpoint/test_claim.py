"""Several ranks claim --save together: one folder for all, or one for each node."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paro.checkpoint import lease
from paro.checkpoint.agreement import with_claim
from paro.checkpoint.claim import claimed
from paro.checkpoint.lease import Contender, Lease, LeaseLostError
from paro.checkpoint.owner import Owner
from paro.distributed.control import Control
from paro.distributed.world import World
from paro.errors import UserError
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.ranks

NODES = ((0, 1), (2, 3))


def elsewhere() -> Owner:
    return replace(Owner.this_process(), host="node7", boot_id="another boot", pid=4321)


def claims(roots: Sequence[Path], lost: int | None = None) -> tuple[object, bool, str]:
    """On this rank: the folders, whether it holds a lease, and the error, if any.

    Rank `lost` loses its lease in the block, and all check theirs.
    """
    rank = dist.get_rank()
    control = Control(World(rank=rank, size=dist.get_world_size()), torch.device("cpu"))
    said: list[str] = []
    try:
        with claimed(roots[rank], control, said.append) as claim:
            assert not said
            if rank == lost:
                assert lease._create(roots[rank], 2, elsewhere())
            ranks = with_claim(claim, control, timedelta(seconds=60))
            ranks.first_decides(ranks.check_lease, "--save")
            return claim.folders, claim.lease is not None, ""
    except (UserError, LeaseLostError) as error:
        return None, False, f"{type(error).__name__}: {error}"


def in_use(root: Path, monkeypatch: pytest.MonkeyPatch) -> Lease:
    """The lease of another run, whose heart beats."""
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.05)
    held = Contender(root, elsewhere()).attempt()
    assert isinstance(held, Lease)
    return held


def released(root: Path) -> bool:
    (path,) = root.glob("lease_*.json")
    return json.loads(path.read_text())["released"] is True


def test_the_first_rank_of_every_folder_holds_its_lease(tmp_path: Path) -> None:
    one = [tmp_path / "shared"] * 4
    every = ((0, 1, 2, 3),)
    assert run_ranks(claims, 4, one) == [(every, rank == 0, "") for rank in range(4)]
    two = [tmp_path / "a", tmp_path / "a", tmp_path / "b", tmp_path / "b"]
    assert run_ranks(claims, 4, two) == [(NODES, rank in (0, 2), "") for rank in range(4)]
    assert all(map(released, {*one, *two}))


@pytest.mark.parametrize("folders", ["aaaa", "aabb", "bbaa"])
def test_a_folder_in_use_on_one_node_ends_all_ranks(
    tmp_path: Path, folders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = in_use(tmp_path / "a", monkeypatch)
    everywhere = run_ranks(claims, 4, [tmp_path / folder for folder in folders])
    ((_, _, error),) = set(everywhere)
    told = f"UserError: --save {tmp_path}/a is in use by process 4321 on node7, since "
    assert error.startswith(told)
    other.check()
    other.release()
    assert folders == "aaaa" or released(tmp_path / "b")


def test_a_lease_that_one_node_loses_ends_all_ranks(tmp_path: Path) -> None:
    two = [tmp_path / "a", tmp_path / "a", tmp_path / "b", tmp_path / "b"]
    ((_, _, error),) = set(run_ranks(claims, 4, two, 2))
    told = f"LeaseLostError: --save: rank 2: this run lost its lease of {tmp_path}/b: process 4321"
    assert error.startswith(told)
    assert released(tmp_path / "a")
    assert not released(tmp_path / "b")
