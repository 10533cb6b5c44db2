"""A heartbeat while the run progresses, and stacks of all threads when it hangs."""

from __future__ import annotations

import errno
import io
import json
import pickle
import re
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import pretrain_llama
from paro.launch import setup
from paro.report.report import Report
from paro.report.watchdog import WatchConfig, Watchdog
from paro.training import loop
from tests.end_to_end.test_training import RUN, run_main
from tests.helpers.ranks import run_ranks
from tests.helpers.refusals import refused
from tests.helpers.streams import Failing
from tests.helpers.warm_python import run_python

STILL = r"no progress for \d+ s"
ODD_SIZE = 7919  # of a collective that no other test has


class Stream(io.StringIO):
    """A text stream that signals writes; Python's own dumps need a real file."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)

    def fileno(self) -> int:
        return 2


def telling(stream: Any, config: WatchConfig, **settings: Any) -> Watchdog:
    """Make a watchdog that writes its stacks into `stream` in place of standard error."""
    with mock.patch.object(sys, "__stderr__", stream):
        return Watchdog(config, **settings)


def watchdog(stream: Any, *, dump: float, limit: float = 600.0, rank: int = 0) -> Watchdog:
    """Make one that shows stacks after `dump` seconds (0: never) and ends the run after `limit`."""
    config = WatchConfig(hang_dump_minutes=dump / 60)
    return telling(stream, config, rank=rank, timeout_minutes=limit / 60)


def test_a_standstill_shows_once_where_every_thread_stands() -> None:
    stream, gate = Stream(), threading.Event()
    stuck = threading.Thread(target=gate.wait, name="lane of a peer", daemon=True)
    stuck.start()
    # By default at half the limit.
    dog = telling(stream, WatchConfig(), rank=3, timeout_minutes=30.0 / 60)
    assert dog._limit == 15.0
    dog.close()
    dog = watchdog(stream, dump=0.2, rank=3)
    dog.begins("training", 7)
    assert stream.written.wait(30)
    time.sleep(0.5)
    gate.set()
    dog.close()
    text = stream.getvalue()
    assert len(re.findall(rf"\[Rank 3\] {STILL} while training, after iteration 7", text)) == 1
    assert "[Rank 3] thread lane of a peer:" in text
    assert "[Rank 3] thread MainThread:" in text
    assert "time.sleep(0.5)" in text or "stream.written.wait(30)" in text
    assert all(line.startswith("[Rank 3]") for line in text.splitlines())


def test_a_long_step_goes_on_micro_batch_by_micro_batch() -> None:
    stream = Stream()
    dog = watchdog(stream, dump=1.5)
    dog.begins("training", 7)
    for _ in range(17):
        dog.progressed()
        time.sleep(0.1)
    assert stream.getvalue() == ""
    assert stream.written.wait(30)  # no progress any more
    dog.close()
    assert "while training, after iteration 7" in stream.getvalue()


def test_the_first_rank_writes_the_heartbeat(tmp_path: Path) -> None:
    path = tmp_path / "run" / "beat.json"
    config = WatchConfig(heartbeat_file=str(path), hang_dump_minutes=0.0)
    dogs = [Watchdog(config, rank=rank, timeout_minutes=10.0) for rank in (0, 1)]
    for dog in dogs:
        dog.open_heartbeat(config)
        dog.begins("training", 12)
        dog.close()
    beat = json.loads(path.read_text())
    assert (beat["iteration"], beat["doing"]) == (12, "training")
    assert abs(beat["time"] - time.time()) < 60
    assert [child.name for child in path.parent.iterdir()] == ["beat.json"]
    config = WatchConfig(heartbeat_file=str(path / "below"))
    with Watchdog(config, rank=0, timeout_minutes=10.0) as dog:
        refused(partial(dog.open_heartbeat, config), "--heartbeat-file")
    stream = Stream()  # where it is told once that a heartbeat cannot be written
    config = WatchConfig(heartbeat_file=str(tmp_path), hang_dump_minutes=0.0)  # a folder
    dog = telling(stream, config, rank=0, timeout_minutes=10.0)
    dog.open_heartbeat(config)
    dog.begins("training", 1)
    dog.close()
    assert stream.getvalue().count("--heartbeat-file is left out from here on") == 1


@pytest.mark.parametrize("stream", [Stream(), Failing(errno.EIO)], ids=["open", "gone"])
def test_a_standstill_past_the_limit_ends_the_run_also_where_it_cannot_say_so(
    stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []

    def leave(status: int) -> None:
        left.append(status)
        dog._over.set()

    monkeypatch.setattr("paro.report.watchdog.os._exit", leave)
    dog = watchdog(stream, dump=0.0, limit=0.2)
    dog.begins("opening the data sets", 0)
    dog._thread.join(30)
    dog.close()
    assert left == [1]
    if isinstance(stream, Stream):
        text = stream.getvalue()
        assert "[Rank 0] thread MainThread:" in text
        last = text.splitlines()[-1]
        assert re.match(rf"\[Rank 0\] error: {STILL} while opening the data sets", last)
        assert "--distributed-timeout-minutes is the limit" in last


def test_bytes_that_are_written_are_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = iter(range(0, 2**40, 2**21))
    monkeypatch.setattr("paro.report.watchdog._bytes_moved", lambda: next(moved))
    stream = Stream()
    with watchdog(stream, dump=0.5) as dog:
        dog.begins("saving", 7)
        assert not stream.written.wait(1.0)


def test_a_run_is_watched_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every phase one watchdog runs; it also writes the heartbeat to the end."""
    watched: dict[str, int] = {}

    def note(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def noted(*args: Any, **named: Any) -> Any:
            watched[name] = [thread.name for thread in threading.enumerate()].count("watchdog")
            return original(*args, **named)

        monkeypatch.setattr(owner, name, noted)

    for owner, name in (
        (pretrain_llama, "parse_args"),
        (pretrain_llama, "check_source"),
        (pretrain_llama, "lock_folders"),
        (setup, "build"),
        (loop, "train_step"),
        (Report, "close"),
    ):
        note(owner, name)
    beat = tmp_path / "beat"
    flags = ["--train-iters", "2", "--save", str(tmp_path / "ckpt"), "--heartbeat-file", str(beat)]
    run_main([*RUN, *flags])
    assert watched == dict.fromkeys(watched, 1)
    assert len(watched) == 6
    assert json.loads(beat.read_text())["doing"] == "ending the run"
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]


HOLDS_THE_LOCK = """
import ctypes, sys, time
from paro.report.watchdog import WatchConfig, Watchdog
dog = Watchdog(WatchConfig(hang_dump_minutes=0.2 / 60), rank=0, timeout_minutes=0.5 / 60)
dog.begins("training", 1)
time.sleep(0.1)
ctypes.PyDLL(None).usleep(30000000)  # a library that keeps the interpreter's lock
dog.close()
"""


@pytest.mark.process
def test_a_library_that_keeps_the_interpreters_lock_is_shown_and_ended() -> None:
    done = run_python(["-c", HOLDS_THE_LOCK])
    assert done.returncode == 1, done.stderr
    assert "Timeout (" in done.stderr
    assert 'File "<string>", line 7' in done.stderr


def stand_still(folder: str) -> tuple[str, list[str]]:
    """The output of a rank and its recorded collectives, while rank 0 waits for rank 1."""
    rank, stream, tensor = dist.get_rank(), Stream(), torch.ones(ODD_SIZE)
    begun = dist.all_reduce(tensor, async_op=True) if rank == 0 else None
    config = WatchConfig(hang_dump_minutes=0.2 / 60)
    dog = telling(stream, config, rank=rank, timeout_minutes=10.0, flight_dir=folder)
    dog.begins("training", 7)
    while len(list(Path(folder).glob("rank_?"))) < 2:
        time.sleep(0.02)
    dog.close()
    if begun is None:
        dist.all_reduce(tensor)
    else:
        begun.wait()
    recorded = pickle.loads(Path(folder, f"rank_{rank}").read_bytes())
    here = [entry for entry in recorded["entries"] if entry["input_sizes"] == [[ODD_SIZE]]]
    # torch's own tool looks up the ranks of a collective's group by its name.
    ranks = [recorded["pg_config"][entry["process_group"][0]]["ranks"] for entry in here]
    return stream.getvalue(), [f"{entry['profiling_name']} {ranks}" for entry in here]


@pytest.mark.ranks
def test_the_flight_recorder_shows_who_is_missing(tmp_path: Path) -> None:
    (waiting, begun), (missing, not_begun) = run_ranks(stand_still, 2, str(tmp_path))
    assert begun == ["gloo:all_reduce ['[0, 1]']"]
    assert not_begun == []
    for rank, text in enumerate((waiting, missing)):
        place = f"its last collectives are in {tmp_path}/rank_{rank}: torchfrtrace {tmp_path} "
        assert text.count(f"[Rank {rank}] {place}") == 1
