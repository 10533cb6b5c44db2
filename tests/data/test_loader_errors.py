"""Errors and waits while micro-batches are read: one line each, with and without processes."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

from data.batch import Fetch, Sample
from data.index_cache import CacheEntry, cached
from paro.errors import UserError, describe, is_storage_failure
from paro.files import waits
from paro.files.waits import Wait
from tests.data.test_loader import NUM_WORKERS, Numbered, batches_of, built, samples_in
from tests.helpers.refusals import refused

EMFILE = OSError(errno.EMFILE, "Too many open files")


@pytest.mark.process
def test_a_killed_worker_is_one_line() -> None:
    batches = batches_of(num_workers=1)
    before = set(multiprocessing.active_children())
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - before
    os.kill(worker.pid or 0, signal.SIGKILL)
    refused(lambda: list(islice(batches, 10)), "reads data ahead ... --num-workers")


@pytest.mark.parametrize("num_workers", NUM_WORKERS)
def test_the_end_of_the_data_is_an_error_and_not_a_second_round(num_workers: int) -> None:
    two = {"data_parallel_size": 2, "micro_batch_size": 2}
    batches = batches_of(Numbered(10), **two, num_workers=num_workers)
    assert [samples_in(batch) for batch in islice(batches, 3)] == [[0, 1], [4, 5], [8, 9]]
    refused(lambda: next(batches), "ends after 10 samples and sample 13 is asked for")


DISK = "x.bin cannot be read: Input/output error"


@pytest.mark.parametrize("num_workers", NUM_WORKERS)
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (UserError("sample 3 is broken"), "sample 3 is broken"),
        (OSError(errno.EIO, DISK), DISK),
        (EMFILE, "ulimit -n"),
    ],
)
def test_an_error_in_the_data_stays_one_line(error: Exception, told: str, num_workers: int) -> None:
    broken = Numbered(broken_at=3, error=error)
    batches = batches_of(broken, micro_batch_size=2, num_workers=num_workers)
    next(batches)
    with pytest.raises(type(error)) as caught:
        next(batches)
    found = caught.value.with_traceback(None)
    del caught
    assert told in describe(found)
    assert describe(found).splitlines() == [describe(found)]
    assert is_storage_failure(found) or told is not DISK


def test_an_error_of_the_system_that_is_no_disks_keeps_its_traceback() -> None:
    broken = Numbered(broken_at=0, error=OSError(errno.EBADF, "Bad file descriptor"))
    fetch = Fetch(broken, None)
    with pytest.raises(OSError, match="Bad file descriptor"):
        fetch[range(1)]


def test_a_blend_may_have_more_files_than_the_limit(prefix: str) -> None:
    words = []
    for number in range(20):
        for suffix in (".bin", ".idx", ".bin.crc"):
            shutil.copy(f"{prefix}{suffix}", f"{prefix}{number}{suffix}")
        words += ["1", f"{prefix}{number}"]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, before[1]))
    try:
        for corpus in built(*words, split="1,0,0", counts=(200,)).corpora()["train"]:
            assert corpus.source.startswith("indices written to")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


NO_SHM = "--num-workers 1 needs /dev/shm"


@pytest.mark.process
@pytest.mark.parametrize(
    ("place", "error", "told"),
    [
        ("utils.data.dataloader.DataLoader.__iter__", OSError(errno.EROFS, "Read-only"), NO_SHM),
        ("Tensor.share_memory_", RuntimeError("no shared memory(shm): full (28)"), NO_SHM),
        ("utils.data.dataloader.DataLoader.__iter__", EMFILE, "ulimit -n"),
        ("Tensor.share_memory_", RuntimeError(f"no shared memory: {EMFILE} (24)"), "ulimit -n"),
    ],
)
def test_processes_are_told_which_resource_they_lack(
    place: str, error: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"torch.{place}", Mock(side_effect=error))
    line = refused(lambda: next(batches_of(num_workers=1)), told)
    assert ("/dev/shm" in line) == (told is NO_SHM)
    assert (str(error) in line) == (told is NO_SHM)


class Index(NamedTuple):
    """An index of one array."""

    index: NDArray[np.int64]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wait, "limit_seconds", 0.4)
    monkeypatch.setattr(waits, "NOTICE_AFTER_SECONDS", 0.1)


@pytest.mark.usefixtures("short")
def test_a_stuck_builder_is_named_and_waited_for_no_longer_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    entry = CacheEntry(folder=tmp_path / "cache", split_name="train", facts={"class": "one"})
    told = ""

    def builds_forever() -> Index:
        nonlocal told
        with pytest.raises(TimeoutError) as stuck:  # a second start, while this one builds
            cached(entry, Index, lambda: Index(np.arange(3)))
        told = describe(stuck.value)
        assert is_storage_failure(stuck.value)
        return Index(np.arange(2))

    built, _ = cached(entry, Index, builds_forever)
    assert built.index[:].tolist() == [0, 1]
    held = f"process {os.getpid()} of this machine, which builds indices and holds the lock"
    assert f"for {held} {tmp_path}/llama-paro-" in told
    assert told.endswith("--distributed-timeout-minutes is the limit")
    assert capsys.readouterr().err.startswith(f"waiting for {held}")


class DeadFiles(Numbered):
    """Samples on a file system that has stopped answering: a FIFO that nobody writes."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        os.mkfifo(path)

    def __getitem__(self, index: int) -> Sample:
        if index >= 2:
            self.path.read_bytes()
        return super().__getitem__(index)


@pytest.mark.usefixtures("short")
@pytest.mark.process
def test_a_worker_on_a_dead_file_system_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.loader._POLL_SECONDS", 0.1)
    batches = batches_of(DeadFiles(tmp_path / "fifo"), num_workers=1)
    monkeypatch.setattr(Wait, "limit_seconds", 30.0)  # a worker starts
    next(batches), next(batches)
    monkeypatch.setattr(Wait, "limit_seconds", 0.4)
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="for a batch from 1 processes that read") as caught:
        next(batches)
    assert caught.value.errno == errno.ETIMEDOUT
    assert time.monotonic() - begin < 10.0
    # It wakes, and finds a file for the batches ahead, so that the loader can stop it.
    dead = (tmp_path / "fifo").rename(tmp_path / "dead")
    (tmp_path / "fifo").touch()
    os.close(os.open(dead, os.O_WRONLY))
