"""Ranks save, load and lock a folder together: what fails on one fails on all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from paro.checkpoint import folder_lock
from paro.checkpoint.agreement import lock_folders, ranks_that_save
from paro.checkpoint.directory import latest_iteration
from paro.checkpoint.folder_lock import FolderLock, LockLostError, attempts_to_lock
from paro.checkpoint.load import LoadRequest
from paro.errors import StorageError, UserError
from tests.helpers.ranks import run_ranks
from tests.paro.checkpoint.test_folder_lock import ELSEWHERE, holder
from tests.paro.checkpoint.test_storage import small_files
from tests.paro.checkpoint.toy_run import (
    IIG,
    ONE,
    assert_true,
    control_here,
    load_checkpoint,
    make_shards,
    save_checkpoint,
)

pytestmark = pytest.mark.ranks


def fails_alike(root: Path, *, failing: int) -> tuple[str, str]:
    """On this rank: a save that `failing` cannot write, and a load of another model."""
    rank = dist.get_rank()
    shards = make_shards(IIG, rank, filled=True)
    limit = small_files(3000) if rank == failing else nullcontext()
    with limit, pytest.raises(StorageError) as unwritten:
        save_checkpoint(root, 200, shards, {})
    with pytest.raises(UserError) as unread:
        load_checkpoint(root, shards, request=LoadRequest(model={"hidden_size": 1}))
    assert_true(shards)
    return str(unwritten.value), str(unread.value)


def meets_a_bug(root: Path, *, failing: int) -> tuple[str, str]:
    """What this rank raises where the code of one rank fails while all load."""
    rank = dist.get_rank()

    def fail(*_: object) -> None:
        if rank == failing:
            list(zip([1], [], strict=True))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paro.checkpoint.load._check_model", fail)
        try:
            load_checkpoint(root, make_shards(IIG, rank, filled=False))
        except Exception as error:
            return type(error).__name__, str(error)
    return "none", ""


def loads_what_is_cut_short(root: Path) -> tuple[list[str], str]:
    """The lines of a save of all ranks, and the error of a load after a file was cut short."""
    rank, lines = dist.get_rank(), list[str]()
    save_checkpoint(root, 100, make_shards(IIG, rank, filled=True), {}, log=lines.append)
    if rank == 0:
        path = root / "iter_0000100" / "__3_0.distcp"
        path.write_bytes(path.read_bytes()[:-1])
    dist.barrier()
    shards = make_shards(IIG, rank, filled=False)
    with pytest.raises(UserError) as caught:
        load_checkpoint(root, shards)
    assert not any(shard.values.any() for shard in shards)
    return lines, str(caught.value)


def claims(root: Path, folders: str, *, lost: int | None = None) -> tuple[object, bool, str]:
    """On this rank: the folders, whether it holds a lock, and the error, if any.

    Every rank has the folder of its letter. Rank `lost` loses its lock, and all check theirs.
    """
    control, said = control_here(), list[str]()
    own = root / folders[control.world.rank]
    try:
        with lock_folders(own, control, said.append, lambda: None) as locked:
            assert not said
            if control.world.rank == lost:
                assert folder_lock._create(own, 2, holder(**ELSEWHERE))
            ranks = ranks_that_save(locked, control, timedelta(seconds=60))
            ranks.first_decides(ranks.check_lock, "--save")
            return locked.folders, locked.lock is not None, ""
    except (UserError, LockLostError) as error:
        return None, False, f"{type(error).__name__}: {error}"


IN_USE = ("aaaa", "aabb", "bbaa")  # folder a is another run's
CASES: Mapping[str, Callable[[Path], Any]] = {
    "a bug on rank 2": partial(meets_a_bug, failing=2),
    "a failure on rank 0": partial(fails_alike, failing=0),
    "a failure on rank 2": partial(fails_alike, failing=2),
    "cut short": loads_what_is_cut_short,
    "one folder": partial(claims, folders="aaaa"),
    "two folders": partial(claims, folders="aabb"),
    "lost": partial(claims, folders="aabb", lost=2),
    **{f"{folders} in use": partial(claims, folders=folders) for folders in IN_USE},
}


def each(root: Path) -> dict[str, Any]:
    return {name: case(root / name) for name, case in CASES.items()}


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(root: Path) -> dict[str, list[Any]]:
    for name in CASES:
        (root / name).mkdir()
        if "on rank" in name:
            shards = make_shards(ONE, 0, filled=True)
            save_checkpoint(root / name, 100, shards, {"model": {"hidden_size": 2}})
    before = [contents(root / name) for name in CASES if "a failure" in name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder_lock, "BEAT_SECONDS", 0.05)
        held = [
            next(attempts_to_lock(root / f"{each} in use/a", holder(**ELSEWHERE)))
            for each in IN_USE
        ]
        of_ranks = run_ranks(each, 4, root)
        for lock in held:
            assert isinstance(lock, FolderLock)
            lock.check()
            lock.release()
    assert [contents(root / name) for name in CASES if "a failure" in name] == before
    return {name: [of_rank[name] for of_rank in of_ranks] for name in CASES}


Found = dict[str, list[Any]]


def released(folder: Path) -> bool:
    (path,) = folder.glob("lease_*.json")
    return json.loads(path.read_text())["released"] is True


def test_a_bug_on_one_rank_is_no_damage(found: Found) -> None:
    own = ("ValueError", "zip() argument 2 is shorter than argument 1")
    others = ("PeerError", f"rank 2 failed: ValueError: {own[1]}")
    assert found["a bug on rank 2"] == [others, others, own, others]


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failure_on_one_rank_is_told_by_all(found: Found, root: Path, failing: int) -> None:
    folder = root / f"a failure on rank {failing}"
    unwritten = f"--save {folder}: rank {failing}: File too large"
    unread = (
        f"--load {folder}: the checkpoint does not match the model: "
        "hidden_size is 2 there and 1 here"
    )
    assert found[folder.name] == [(unwritten, unread)] * 4
    assert latest_iteration(folder) == 100
    assert sorted(path.name for path in folder.iterdir())[0] == "iter_0000100"
    assert len(list(folder.iterdir())) == 2


def test_a_file_that_one_rank_needs_stops_all_before_they_read(found: Found, root: Path) -> None:
    assert [len(lines) for lines, _ in found["cut short"]] == [2, 0, 0, 0]
    (text,) = {text for _, text in found["cut short"]}
    folder = root / "cut short"
    path = folder / "iter_0000100" / "__3_0.distcp"
    assert text.startswith(f"--load {folder}: rank 0: {path} is truncated: ")


def test_the_first_rank_of_every_folder_holds_its_lease(found: Found, root: Path) -> None:
    every = ((0, 1, 2, 3),)
    assert found["one folder"] == [(every, rank == 0, "") for rank in range(4)]
    assert found["two folders"] == [(((0, 1), (2, 3)), rank in (0, 2), "") for rank in range(4)]
    folders = ("one folder/a", "two folders/a", "two folders/b")
    assert all(released(root / folder) for folder in folders)


@pytest.mark.parametrize("folders", IN_USE)
def test_a_folder_in_use_on_one_node_ends_all_ranks(found: Found, root: Path, folders: str) -> None:
    ((_, _, error),) = set(found[f"{folders} in use"])
    used = root / f"{folders} in use/a"
    assert error.startswith(f"UserError: --save {used} is in use by process 4321 on node7, since ")
    assert folders == "aaaa" or released(used.with_name("b"))


def test_a_lease_that_one_node_loses_ends_all_ranks(found: Found, root: Path) -> None:
    ((_, _, error),) = set(found["lost"])
    lost = root / "lost/b"
    message = f"LockLostError: --save: rank 2: this run lost its lease of {lost}: process 4321"
    assert error.startswith(message)
    assert released(root / "lost/a")
    assert not released(lost)
