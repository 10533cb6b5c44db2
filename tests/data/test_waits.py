"""Waits say what they wait for, and end past the limit: locks, and processes that read ahead."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from data import waits
from data.index_cache import CacheEntry, cached
from data.waits import Wait
from paro.errors import describe, is_storage_failure
from tests.data.test_loader import Numbered, batches_of


class Index(NamedTuple):
    """An index of one array."""

    index: NDArray[np.int64]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wait, "limit_seconds", 0.4)
    monkeypatch.setattr(waits, "NOTICE_AFTER_SECONDS", 0.1)


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

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        if index >= 2:
            self.path.read_bytes()
        return super().__getitem__(index)


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
    # It wakes, so that the loader can stop it.
    os.close(os.open(tmp_path / "fifo", os.O_WRONLY))
