"""Ranks save and load together; a failure on one fails on all; the old checkpoint stays."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch.distributed as dist

from paro.checkpoint.directory import latest_iteration
from paro.checkpoint.load import LoadRequest
from paro.errors import StorageError, UserError
from tests.helpers.ranks import run_ranks
from tests.paro.checkpoint.test_storage import small_files
from tests.paro.checkpoint.toy_run import (
    IIG,
    ONE,
    assert_true,
    load_checkpoint,
    make_shards,
    save_checkpoint,
)

pytestmark = pytest.mark.ranks


def save(root: Path) -> list[str]:
    lines: list[str] = []
    save_checkpoint(root, 100, make_shards(IIG, dist.get_rank(), filled=True), {}, log=lines.append)
    return lines


def fails_alike(root: Path, *, failing: int) -> tuple[str, str]:
    """On this rank: a save that `failing` cannot write, and a load of another model."""
    rank = dist.get_rank()
    shards = make_shards(IIG, rank, filled=True)
    limit = small_files(3000) if rank == failing else nullcontext()
    with limit, pytest.raises(StorageError) as unwritten:
        save_checkpoint(root, 200, shards, {})
    with pytest.raises(UserError) as unread:
        load_checkpoint(root, shards, wanted=LoadRequest(model={"hidden_size": 1}))
    assert_true(shards)
    return str(unwritten.value), str(unread.value)


def meet_a_bug(root: Path, *, failing: int) -> tuple[str, str]:
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


def read_fails_alike(root: Path) -> str:
    shards = make_shards(IIG, dist.get_rank(), filled=False)
    with pytest.raises(UserError) as caught:
        load_checkpoint(root, shards)
    assert not any(shard.values.any() for shard in shards)
    return str(caught.value)


def test_a_bug_on_one_rank_is_no_damage(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 100, make_shards(ONE, 0, filled=True), {"model": {"hidden_size": 2}})
    own = ("ValueError", "zip() argument 2 is shorter than argument 1")
    others = ("PeerError", f"rank 2 failed: ValueError: {own[1]}")
    assert run_ranks(meet_a_bug, 4, tmp_path, failing=2) == [others, others, own, others]


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failure_on_one_rank_is_told_by_all(tmp_path: Path, failing: int) -> None:
    save_checkpoint(tmp_path, 100, make_shards(ONE, 0, filled=True), {"model": {"hidden_size": 2}})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    unwritten = f"--save {tmp_path}: rank {failing}: File too large"
    unread = (
        f"--load {tmp_path}: the checkpoint does not match the model: "
        "hidden_size is 2 there and 1 here"
    )
    assert run_ranks(fails_alike, 4, tmp_path, failing=failing) == [(unwritten, unread)] * 4
    assert latest_iteration(tmp_path) == 100
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in tmp_path.iterdir())[0] == "iter_0000100"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_that_one_rank_needs_stops_all_before_they_read(tmp_path: Path) -> None:
    assert [len(of_rank) for of_rank in run_ranks(save, 4, tmp_path)] == [2, 0, 0, 0]
    path = tmp_path / "iter_0000100" / "__3_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    (text,) = set(run_ranks(read_fails_alike, 4, tmp_path))
    assert text.startswith(f"--load {tmp_path}: rank 0: {path} is truncated: ")
