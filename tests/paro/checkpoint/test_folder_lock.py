"""The lock of a save folder: who gets it, who is refused, and what a run that lost it may do."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from paro.checkpoint import folder_lock
from paro.checkpoint.agreement import CheckpointRanks, lock_folders
from paro.checkpoint.directory import (
    begin_checkpoint,
    finish_checkpoint,
    iterations_in,
    latest_iteration,
)
from paro.checkpoint.folder_lock import (
    STILL_SECONDS,
    FolderLock,
    LockHolder,
    LockLostError,
    attempts_to_lock,
)
from paro.checkpoint.save import write_states
from paro.errors import UserError, is_storage_failure
from paro.training.saving import Saver
from tests.helpers.refusals import refused
from tests.paro.checkpoint.test_directory import names as files
from tests.paro.checkpoint.toy_run import control_here

ELSEWHERE = {"host": "node7", "boot_id": "another boot", "pid": 4321}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    return clock


@pytest.fixture(autouse=True)
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the tests beat, so that they say when."""
    monkeypatch.setattr(FolderLock, "_beat_on", lambda _self: None)


def holder(**changes: object) -> LockHolder:
    """This process outside any job, or with other fields."""
    alone = replace(LockHolder.this_process(), rendezvous_id="", slurm_job="")
    return replace(alone, **changes)  # type: ignore[arg-type]


def take(root: Path, who: LockHolder) -> FolderLock:
    lock = next(attempts_to_lock(root, who))
    assert isinstance(lock, FolderLock), lock
    return lock


def test_a_second_owner_is_refused_once_the_first_beats(tmp_path: Path) -> None:
    first = take(tmp_path, holder(**ELSEWHERE, slurm_job="77", since="2026-01-02 03:04:05+00:00"))
    second = attempts_to_lock(tmp_path, holder())
    before = files(tmp_path)
    message = "process 4321 on node7, SLURM job 77, since 2026-01-02 03:04:05+00:00"
    assert next(second) == message
    assert next(second) == message
    first.beat()
    refused(second.__next__, f"--save {tmp_path} is in use by process 4321 on node7")
    assert files(tmp_path) == before == ["lease_1.json"]
    first.check()


def test_a_heart_that_stands_still_for_a_minute_costs_the_lease(tmp_path: Path, clock: Any) -> None:
    first = take(tmp_path, holder(**ELSEWHERE))
    second = attempts_to_lock(tmp_path, holder())
    assert isinstance(next(second), str)
    clock.now += STILL_SECONDS - 0.1
    assert isinstance(next(second), str)
    clock.now += 0.2
    lock = next(second)
    assert isinstance(lock, FolderLock)
    assert files(tmp_path) == ["lease_2.json"]
    for wakes_up in (first.check, first.beat, first.check):
        refused(wakes_up, "has taken it over", status=1)
    assert first.lost
    first.release()
    lock.check()
    assert files(tmp_path) == ["lease_2.json"]


def test_after_a_long_sleep_the_file_says_whose_the_folder_is(tmp_path: Path, clock: Any) -> None:
    lock = take(tmp_path, holder(**ELSEWHERE, slurm_job="77"))
    take(tmp_path, holder(slurm_job="77")).check()  # a restart of the job takes over at once
    clock.now += STILL_SECONDS / 2
    assert lock.is_ours()  # not read at every step
    clock.now += 1.0
    assert not lock.is_ours()
    assert lock.lost
    alone = take(tmp_path / "new" / "other", holder())
    shutil.rmtree(tmp_path / "new" / "other")
    clock.now += STILL_SECONDS
    assert alone.is_ours()  # gone, but nobody else's


def test_only_a_process_of_this_very_host_is_known_to_be_dead(tmp_path: Path) -> None:
    here = holder()
    assert not here.is_dead_here()
    again = replace(here, start_ticks=here.start_ticks - 1)  # the number is another process's now
    gone = replace(here, pid=2**22 + 1)  # above the largest number of a process
    assert again.is_dead_here()
    assert gone.is_dead_here()
    for elsewhere in ({"boot_id": "before"}, {"pid_namespace": "pid:[1]"}):
        assert not replace(gone, **elsewhere).is_dead_here()
    take(tmp_path, gone)
    take(tmp_path, holder()).check()
    assert files(tmp_path) == ["lease_2.json"]


def test_a_released_lease_is_free_and_its_number_is_not_used_again(tmp_path: Path) -> None:
    first = take(tmp_path, holder(**ELSEWHERE))
    first.release()
    refused(first.check, "this run has ended", status=1)
    assert json.loads((tmp_path / "lease_1.json").read_text())["released"] is True
    take(tmp_path, holder())
    assert files(tmp_path) == ["lease_2.json"]


def test_of_several_at_once_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one is later still: its number was used and removed again."""
    take(tmp_path, holder(**ELSEWHERE)).release()
    old, late = folder_lock._newest(tmp_path), attempts_to_lock(tmp_path, holder())
    for number in (2, 3):
        winner = take(tmp_path, holder())
        with monkeypatch.context() as patch:
            patch.setattr(folder_lock, "_newest", lambda _root: old)  # what it read just before
            assert next(late) == "another run, which starts at this moment"
        winner.check()
        assert files(tmp_path) == [f"lease_{number}.json"]
        winner.release()


def test_a_folder_that_was_removed_gets_its_lease_back(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    lock = take(root, holder())
    shutil.rmtree(root)
    with pytest.raises(FileNotFoundError):
        lock.check()
    root.mkdir()
    lock.check()
    assert files(root) == ["lease_1.json"]
    (root / "lease_1.json").unlink()
    lock._device += 1  # the folder is the one below a mount that is gone
    with pytest.raises(OSError, match=r"another file system .* is it still mounted\?") as gone:
        lock.check()
    assert is_storage_failure(gone.value)
    assert files(root) == []
    lock._device -= 1
    take(root, holder())
    with pytest.raises(LockLostError):
        lock.check()


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 5000, b"[]", b'{"token": 5}', b"\xff" * 99])
def test_a_damaged_lease_is_watched_too(tmp_path: Path, content: bytes, clock: Any) -> None:
    (tmp_path / "lease_9.json").write_bytes(content)
    waiter = attempts_to_lock(tmp_path, holder())
    assert next(waiter) == "an unknown run (lease_9.json is damaged)"
    clock.now += STILL_SECONDS
    assert isinstance(next(waiter), FolderLock)
    assert files(tmp_path) == ["lease_10.json"]


def test_an_owner_that_lives_repairs_its_damaged_lease_in_printable_text(tmp_path: Path) -> None:
    first = take(tmp_path, holder(**ELSEWHERE | {"host": "\x1b[2J"}))
    (tmp_path / "lease_1.json").write_bytes(b"{")
    second = attempts_to_lock(tmp_path, holder())
    assert isinstance(next(second), str)
    first.beat()
    refused(second.__next__, "is in use by process 4321 on ?[2J")
    first.check()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir])
def test_only_a_regular_file_is_read(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "lease_1.json")
    attempts = attempts_to_lock(tmp_path, holder())
    refused(attempts.__next__, "lease_1.json is no regular file: remove it")


def test_a_folder_that_cannot_be_listed_is_not_taken_for_one_without_a_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, Mock(side_effect=PermissionError))
    with pytest.raises(PermissionError):
        next(attempts_to_lock(tmp_path, holder()))
    assert not (tmp_path / "lease_1.json").exists()


def test_of_two_leases_the_last_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open
    first = take(tmp_path, holder(rendezvous_id="a"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda path, flags, mode=0: real(path, flags & ~os.O_EXCL, mode))
        patch.setattr(folder_lock, "_newest", lambda _root: None)  # what it read just before
        second = take(tmp_path, holder(rendezvous_id="b"))
    refused(first.check, "torchrun's job b ... has taken it over", status=1)
    first.release()
    second.check()


def test_a_lease_is_never_left_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take(tmp_path, holder()).check()
    assert not folder_lock._create(tmp_path, 1, holder())
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="No space left"):
        folder_lock._create(tmp_path, 2, holder())
    assert files(tmp_path) == ["lease_1.json"]


def alone(lock: FolderLock) -> CheckpointRanks:
    return CheckpointRanks(control_here(), control_here(), range(1), lock)


@pytest.mark.parametrize("when", range(5), ids=["begin", "common", "manifest", "folder", "tracker"])
def test_a_run_without_its_lease_renames_and_removes_nothing(
    tmp_path: Path, when: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is lost before one check after the other of the save."""
    finish_checkpoint(begin_checkpoint(tmp_path, 10), 10, {})
    ours = take(tmp_path, holder(rendezvous_id="a"))
    check = ours.check
    checks: list[list[str]] = []

    def lose(_self: FolderLock) -> None:
        checks.append(files(tmp_path))
        if len(checks) == when + 1:
            take(tmp_path, holder(rendezvous_id="a"))  # a restart of the same job, for example
        check()

    monkeypatch.setattr(FolderLock, "check", lose)
    with pytest.raises(LockLostError, match="has taken it over"):
        write_states(tmp_path, 20, {}, {}, ranks=alone(ours), log=lambda _line: None)
    assert len(checks) == when + 1, "it stops at the first check that fails"
    done = {"iter_0000010"} | ({"iter_0000020"} if when > 3 else set())
    assert {name for name in files(tmp_path) if name.startswith("iter_")} == done
    assert latest_iteration(tmp_path) == 10


def test_a_save_that_fails_once_the_lease_is_lost_blames_the_new_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose start may have removed what this run wrote."""
    ours = take(tmp_path, holder(rendezvous_id="a"))

    def fail(*_: object) -> None:
        take(tmp_path, holder(rendezvous_id="a"))
        raise UserError("a file is gone")

    monkeypatch.setattr("paro.checkpoint.save.write_files", fail)
    with pytest.raises(LockLostError, match="has taken it over"):
        write_states(tmp_path, 20, {}, {}, ranks=alone(ours), log=lambda _line: None)


def test_a_run_without_its_lease_retires_nothing(tmp_path: Path) -> None:
    for iteration in (10, 20):
        finish_checkpoint(begin_checkpoint(tmp_path, iteration), iteration, {})
    ours = alone(take(tmp_path, holder(rendezvous_id="a")))
    checkpoint = SimpleNamespace(save_retain_interval=100)
    saver: Any = SimpleNamespace(
        _root=tmp_path, _ranks=ours, config=SimpleNamespace(checkpoint=checkpoint)
    )
    take(tmp_path, holder(rendezvous_id="a"))
    with pytest.raises(LockLostError, match="has taken it over"):
        Saver._write(saver, 20, 30, ours.check_lock)
    assert iterations_in(tmp_path) == {10, 20}


def test_two_owners_never_write_into_one_partial_folder(tmp_path: Path) -> None:
    ours = begin_checkpoint(tmp_path, 20, token="ours")
    theirs = begin_checkpoint(tmp_path, 20, token="theirs")
    assert not ours.exists()
    assert theirs.name == "iter_0000020.theirs.partial"
    with pytest.raises(FileNotFoundError):
        finish_checkpoint(ours, 20, {})
    finish_checkpoint(theirs, 20, {})
    assert latest_iteration(tmp_path) == 20


def test_the_start_says_why_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = take(tmp_path, holder(**ELSEWHERE))
    said: list[str] = []
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr("time.sleep", lambda _seconds: first.beat())
    locked = lock_folders(tmp_path, control_here(), said.append, lambda: None)
    refused(locked.__enter__, f"--save {tmp_path} is in use by process 4321 on node7")
    (line,) = said
    assert line.startswith(f"--save {tmp_path} belongs to process 4321 on node7, since ")
    assert line.endswith("after 60 s without one this run takes it over")
    first.check()
