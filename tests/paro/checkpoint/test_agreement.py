"""The ranks of a run lock --save together: one folder for all, or one for each node."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paro.checkpoint import folder_lock
from paro.checkpoint.agreement import lock_folders, ranks_that_save
from paro.checkpoint.folder_lock import FolderLock, LockHolder, LockLostError, LockWaiter
from paro.distributed.control import Control
from paro.distributed.world import World
from paro.errors import UserError
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.ranks

NODES = ((0, 1), (2, 3))


def elsewhere() -> LockHolder:
    return replace(LockHolder.this_process(), host="node7", boot_id="another boot", pid=4321)


def claims(roots: Sequence[Path], lost: int | None = None) -> tuple[object, bool, str]:
    """On this rank: the folders, whether it holds a lock, and the error, if any.

    Rank `lost` loses its lock in the block, and all check theirs.
    """
    rank = dist.get_rank()
    control = Control(World(rank=rank, size=dist.get_world_size()), torch.device("cpu"))
    said: list[str] = []
    try:
        with lock_folders(roots[rank], control, said.append) as locked:
            assert not said
            if rank == lost:
                assert folder_lock._create(roots[rank], 2, elsewhere())
            ranks = ranks_that_save(locked, control, timedelta(seconds=60))
            ranks.first_decides(ranks.check_lock, "--save")
            return locked.folders, locked.lock is not None, ""
    except (UserError, LockLostError) as error:
        return None, False, f"{type(error).__name__}: {error}"


def in_use(root: Path, monkeypatch: pytest.MonkeyPatch) -> FolderLock:
    """The lock of another run, whose heart beats."""
    monkeypatch.setattr(folder_lock, "BEAT_SECONDS", 0.05)
    held = LockWaiter(root, elsewhere()).attempt()
    assert isinstance(held, FolderLock)
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
    told = f"LockLostError: --save: rank 2: this run lost its lease of {tmp_path}/b: process 4321"
    assert error.startswith(told)
    assert released(tmp_path / "a")
    assert not released(tmp_path / "b")
