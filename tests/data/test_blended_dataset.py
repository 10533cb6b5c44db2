"""Blends of data sets, and what is wrong with data, before a run or while samples are read."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from unittest import mock
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from data import blended_dataset
from data.batch import BatchFetcher, Sample
from data.blend import Blend, parse_blend, read_blend, read_blend_per_split, read_phases
from data.blended_dataset import BlendIndices, blend_samples
from data.index_cache import CacheEntry, cached
from paro.errors import UserError, describe, is_storage_failure
from paro.files import waits
from paro.files.waits import LimitedWait
from tests.data.test_loader import NUM_WORKERS, Numbered, batches_of, built, samples_in
from tests.helpers.refusals import refused


def sample_by_sample(
    shares: Sequence[float], limits: Sequence[float], num_samples: int
) -> list[tuple[int, int]]:
    """The rule as a loop: the corpus of every sample, and the sample's number in the corpus."""
    counts = [0] * len(shares)
    order = []
    for sample in range(num_samples):
        lags = [
            share * max(sample, 1) - count if count < limit else -np.inf
            for share, count, limit in zip(shares, counts, limits, strict=True)
        ]
        member = lags.index(max(lags))
        order.append((member, counts[member]))
        counts[member] += 1
    return order


def as_pairs(indices: BlendIndices) -> list[tuple[int, int]]:
    return list(zip(*(index.tolist() for index in indices), strict=True))


@settings(deadline=None)
@given(
    weights=st.lists(
        st.floats(0.001, 100.0) | st.integers(1, 90).map(float), min_size=1, max_size=6
    ),
    num_samples=st.integers(0, 500),
    chunk=st.integers(1, 60),
    are_sizes=st.booleans(),
)
def test_many_lanes_give_what_one_loop_gives(
    weights: list[float], num_samples: int, chunk: int, are_sizes: bool
) -> None:
    """By weights for ever, or until all corpora of these sizes are exhausted."""
    sizes = [int(weight) for weight in weights] if are_sizes and any(map(int, weights)) else None
    shares = [float(share) for share in np.array(sizes or weights) / np.sum(sizes or weights)]
    count = sum(sizes) if sizes else num_samples
    with mock.patch.object(blended_dataset, "_LEAST_CHUNK", chunk):
        found = as_pairs(blend_samples(shares, count, sizes))
    assert found == sample_by_sample(shares, sizes or [np.inf] * len(shares), count)


def test_a_wrong_beginning_is_run_again() -> None:
    """From any initial counts of the stretches, the order is that of the loop."""
    shares = [0.5, 0.3, 0.2]

    def unlikely(_shares: object, times: np.ndarray) -> np.ndarray:
        return np.stack([np.zeros_like(times), np.zeros_like(times), times])

    with (
        mock.patch.object(blended_dataset, "_LEAST_CHUNK", 7),
        mock.patch.object(blended_dataset, "_likely_counts", unlikely),
    ):
        found = as_pairs(blend_samples(shares, 200))
    assert found == sample_by_sample(shares, [np.inf] * 3, 200)


@pytest.mark.filterwarnings("error")
def test_a_share_near_zero_is_no_overflow() -> None:
    order = blend_samples([1.0, 3e-309], 1000)
    assert np.flatnonzero(order.dataset_index).tolist() == [1]


def test_weights_that_match_no_paths_or_are_no_shares_are_refused() -> None:
    for words in ("1", "1 2", "x 1", "1 x 2", "1 x y", "x 1 y 2", "1 x y z", "1 2 x y", "x y 3"):
        refused(partial(parse_blend, words.split(), "--f"), "--f ... do not match")
    for weight in ("-0.5", "inf", "nan"):
        words = [weight, "x", "1", "y"]
        refused(partial(parse_blend, words, "--f"), "--f the weight ... is no share")


@pytest.mark.parametrize(
    ("content", "prefixes", "weights"),
    [
        ("x", "x", None),
        ("x y z", "xyz", None),
        ("30 x 70 y", "xy", (30.0, 70.0)),
        ("1 x 0 y 3 z", "xz", (1.0, 3.0)),
        (["x", "y"], "xy", None),
        ([1, "x", 3, "y"], "xy", (1.0, 3.0)),
        ([2, [1, "x", 3, "y"], 6, "z"], "xyz", (0.5, 1.5, 6.0)),
        ([2, [1, [1, "w", 1, "x"], 3, "y"], 6, "z"], "wxyz", (0.25, 0.25, 1.5, 6.0)),
        (["x", ["y", ["z"]]], "xyz", None),
        ([2, [0, "x", 3, "y"], 6, "z"], "yz", (2.0, 6.0)),
    ],
)
def test_weights_come_before_their_paths_or_lists_and_zero_is_no_corpus(
    tmp_path: Path, content: str | list[object], prefixes: str, weights: tuple[float, ...] | None
) -> None:
    """Words after a flag or in a file, or nested lists in a file."""
    path = tmp_path / "blend"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    blend = read_blend(str(path), "--f")
    assert (blend.prefixes, blend.weights, blend.flag) == (tuple(prefixes), weights, f"--f {path}:")
    if isinstance(content, str):
        given = Blend(flag="--f", prefixes=tuple(prefixes), weights=weights)
        assert parse_blend(content.split(), "--f") == given


def test_a_senseless_file_is_refused(tmp_path: Path) -> None:
    for read, content, message in (
        (read_blend, '[1, ["x", "y"], 2, "z"]', "a list inside a list has weights where"),
        (read_blend, '[1, {"x": 2}]', "is neither a path nor a weight"),
        (read_blend, '["x"', "is not valid JSON"),
        (read_blend, "[]", "names no corpus"),
        (read_blend, "1 x 2", "do not match"),
        (read_blend, "0 x", "all weights are 0"),
        *((read_blend, f'["{path}"]', "") for path in (r"a\u0000b", r"\ud83d")),
        *(
            (read_blend_per_split, content, 'give ... "train":')
            for content in ('["x"]', '{"training": ["x"]}', "3", '{"train": 3}')
        ),
    ):
        path = tmp_path / "blend"
        refused(partial(read, str(path), "--f"), f"--f {path}")
        path.write_text(content)
        refused(partial(read, str(path), "--f"), f"--f {path} ... {message}")


def test_senseless_phases_are_refused(tmp_path: Path) -> None:
    for content, message in (
        ("[]", "has no phase"),
        ('{"name": "a"}', 'give [{"name": "web"'),
        ('[{"name": "a", "data": ["x"], "tokens": 5}]', "tokens"),
        ('[{"name": "a", "data": ["x"]}, {"name": "b", "data": ["y"]}]', "phase 1 ... samples"),
        ('[{"name": "a", "data": ["x"], "samples": 0}]', "phase 1 ... 0 samples"),
        ('[{"name": "a", "data": [1, "x", "y"]}]', ", a: ... do not match"),
        ('[{"name": "", "data": ["x"]}]', "phase 1 ... ''"),
        ('[{"name": "a | b", "data": ["x"]}]', "phase 1 ... 'a | b'"),
        ('[{"name": "a", "data": [1, "x", 1, [1e308, "y", 1e308, "z"]]}]', ", a: ... too large"),
        ('[{"name": "a", "data": "x", "samples": 1}, {"name": "a", "data": "x"}]', "1 ... 'a'"),
    ):
        path = tmp_path / "phases.json"
        path.write_text(content)
        refused(partial(read_phases, str(path)), f"--data-phases {path} ... {message}")


def test_a_blend_for_each_split(tmp_path: Path) -> None:
    path = tmp_path / "splits.json"
    path.write_text(json.dumps({"train": "1 x 3 y", "valid": ["v"], "test": []}))
    blends = read_blend_per_split(str(path), "--f")
    assert set(blends) == {"train", "valid"}
    assert blends["train"].shares() == [0.25, 0.75]
    assert blends["valid"].flag == f"--f {path}, valid:"


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
    ("error", "message"),
    [
        (UserError("sample 3 is broken"), "sample 3 is broken"),
        (OSError(errno.EIO, DISK), DISK),
        (EMFILE, "ulimit -n"),
    ],
)
def test_an_error_in_the_data_stays_one_line(
    error: Exception, message: str, num_workers: int
) -> None:
    broken = Numbered(broken_at=3, error=error)
    batches = batches_of(broken, micro_batch_size=2, num_workers=num_workers)
    next(batches)
    with pytest.raises(type(error)) as caught:
        next(batches)
    found = caught.value.with_traceback(None)
    del caught
    assert message in describe(found)
    assert describe(found).splitlines() == [describe(found)]
    assert is_storage_failure(found) or message is not DISK


def test_an_error_of_the_system_that_is_no_disks_keeps_its_traceback() -> None:
    broken = Numbered(broken_at=0, error=OSError(errno.EBADF, "Bad file descriptor"))
    with pytest.raises(OSError, match="Bad file descriptor"):
        BatchFetcher(broken, None)[range(1)]


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
    ("place", "error", "message"),
    [
        ("utils.data.dataloader.DataLoader.__iter__", OSError(errno.EROFS, "Read-only"), NO_SHM),
        ("Tensor.share_memory_", RuntimeError("no shared memory(shm): full (28)"), NO_SHM),
        ("utils.data.dataloader.DataLoader.__iter__", EMFILE, "ulimit -n"),
        ("Tensor.share_memory_", RuntimeError(f"no shared memory: {EMFILE} (24)"), "ulimit -n"),
    ],
)
def test_processes_are_told_which_resource_they_lack(
    place: str, error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"torch.{place}", Mock(side_effect=error))
    line = refused(lambda: next(batches_of(num_workers=1)), message)
    assert ("/dev/shm" in line) == (message is NO_SHM)
    assert (str(error) in line) == (message is NO_SHM)


class Index(NamedTuple):
    index: NDArray[np.int64]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedWait, "limit_seconds", 0.4)
    monkeypatch.setattr(waits, "NOTICE_AFTER_SECONDS", 0.0)


@pytest.mark.usefixtures("short")
def test_a_stuck_builder_is_named_and_waited_for_no_longer_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    entry = CacheEntry(folder=tmp_path / "cache", split_name="train", facts={"class": "one"})
    message = ""

    def builds_forever() -> Index:
        nonlocal message
        with pytest.raises(TimeoutError) as stuck:  # a second start, while this one builds
            cached(entry, Index, lambda: Index(np.arange(3)))
        message = describe(stuck.value)
        assert is_storage_failure(stuck.value)
        return Index(np.arange(2))

    built, _ = cached(entry, Index, builds_forever)
    assert built.index[:].tolist() == [0, 1]
    held = f"process {os.getpid()} of this machine, which builds indices and holds the lock"
    assert f"for {held} {tmp_path}/llama-paro-" in message
    assert message.endswith("--distributed-timeout-minutes is the limit")
    assert capsys.readouterr().err.startswith(f"waiting for {held}")


class DeadFiles(Numbered):
    """Samples on a file system that has stopped answering: a FIFO that nobody writes."""

    path: Path

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
    samples = DeadFiles()
    samples.path = tmp_path / "fifo"
    os.mkfifo(samples.path)
    batches = batches_of(samples, num_workers=1)
    monkeypatch.setattr(LimitedWait, "limit_seconds", 30.0)  # a worker starts
    next(batches), next(batches)
    monkeypatch.setattr(LimitedWait, "limit_seconds", 0.4)
    with pytest.raises(TimeoutError, match="for a batch from 1 processes that read") as caught:
        next(batches)
    assert caught.value.errno == errno.ETIMEDOUT
    # It wakes, and finds a file for the batches ahead, so that the loader can stop it.
    dead = (tmp_path / "fifo").rename(tmp_path / "dead")
    (tmp_path / "fifo").touch()
    os.close(os.open(dead, os.O_WRONLY))
