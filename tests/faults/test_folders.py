"""Faults of files: the folder of --save, a corpus cut short, and bits that flip in memory."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.conftest import Scenario
from tests.faults.job import LIMIT_SECONDS, Point, Run, fill, other_host, print_into, small_disk
from tests.helpers.corpora import write_corpus
from tests.helpers.scripts import run_script

pytestmark = [pytest.mark.verify, pytest.mark.ranks]

HOW = pytest.mark.parametrize("how", ["", "--async-save"], ids=["sync", "async"])


@HOW
@pytest.mark.root
def test_disk_full_in_a_save(scenario: Scenario, how: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "ckpt") as disk:
        job = scenario.paused(Point.WRITE_FILES, 2, *how.split())
        filler = fill(disk)
        scenario.run.release()
        scenario.ends(job, [1], "No space left on device", within=30.0)
        filler.unlink()
        scenario.resumes(3)


@pytest.mark.root
def test_disk_full_for_one_save_only(scenario: Scenario, tmp_path: Path) -> None:
    with small_disk(tmp_path / "ckpt") as disk:
        job = scenario.paused(Point.WRITE_FILES, 2, "--on-save-failure", "continue")
        filler = fill(disk)
        scenario.run.release()
        job.wait_for(lambda: "training continues (--on-save-failure" in job.text())
        filler.unlink()
        scenario.ends(job, [0], within=30.0)
        scenario.is_whole()


@pytest.mark.root
@pytest.mark.parametrize("flag", ["--metrics-file", "--heartbeat-file"])
def test_disk_full_for_a_record(scenario: Scenario, flag: str, tmp_path: Path) -> None:
    """It is left out from there on, with a line."""
    with small_disk(tmp_path / "small", "256k") as disk:
        job = scenario.paused(Point.STEP, 5, flag, disk / "record")
        fill(disk)
        scenario.run.release()
        scenario.ends(job, [0], within=30.0)
        assert f"{flag} is left out from here on: No space left" in job.text()
    scenario.is_saved_whole()


@pytest.mark.root
def test_disk_full_for_the_log(scenario: Scenario, tmp_path: Path) -> None:
    """From there on the log goes to standard error."""
    with small_disk(tmp_path / "small", "256k") as disk:
        job = scenario.paused(Point.STEP, 5, before=[partial(print_into, disk / "log")])
        fill(disk)
        scenario.run.release()
        scenario.ends(job, [0], within=30.0)
        assert "standard output cannot be written: No space left" in job.text()
    scenario.is_whole()


@pytest.mark.root
def test_disk_full_in_preprocessing(scenario: Scenario, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "1 2 3 4 5 6 7 8 9"}\n' * 200_000)
    flags = ["--input", text, "--tokenizer-type", "NullTokenizer", "--vocab-size", "128"]
    with small_disk(tmp_path / "small", "1m") as disk:
        command = [*flags, "--output-prefix", disk / "x", "--workers", "2"]
        scenario.strikes()
        done = run_script(["tools/preprocess_data.py", *command])
        scenario.ended("status 1")
        assert done.returncode == 1, done.stderr
        (line,) = [text for text in done.stderr.splitlines() if not text.startswith("Processed")]
        assert line.startswith("preprocess_data.py: error: ")
        assert "No space left on device" in line
        assert list(disk.iterdir()) == []


@HOW
def test_folder_removed(scenario: Scenario, how: str) -> None:
    """The run creates it again and saves what it has."""
    job = scenario.paused(Point.STEP, 5, *how.split())
    job.wait_for(lambda: "successfully saved checkpoint" in job.text())
    shutil.rmtree(scenario.run.save)
    scenario.run.release()
    scenario.ends(job, [0], within=30.0)
    scenario.is_whole()


def test_folder_removed_in_a_save(scenario: Scenario) -> None:
    job = scenario.paused(Point.READ_BACK, 2, at=1)
    shutil.rmtree(scenario.run.save)
    scenario.run.release()
    scenario.ends(job, [1], "iteration 6 is not saved: --save ", within=30.0)
    scenario.resumes(0)


@pytest.mark.root
def test_mount_gone(scenario: Scenario, tmp_path: Path) -> None:
    """Nothing is written into the folder that the mount has hidden."""
    with small_disk(tmp_path / "disk") as disk, small_disk(tmp_path / "ckpt") as mount:
        subprocess.run(["mount", "--bind", disk, mount], check=True)
        job = scenario.paused(Point.STEP, 5)
        subprocess.run(["umount", "-l", mount], check=True)
        scenario.run.release()
        scenario.ends(job, [1], "is it still mounted?", within=30.0)
        assert list(mount.iterdir()) == []
        subprocess.run(["mount", "--bind", disk, mount], check=True)
        scenario.resumes(3)


@pytest.mark.root
def test_mount_read_only(scenario: Scenario, tmp_path: Path) -> None:
    with small_disk(tmp_path / "ckpt") as mount:
        job = scenario.paused(Point.STEP, 5)
        subprocess.run(["mount", "-o", "remount,ro", mount], check=True)
        scenario.run.release()
        scenario.ends(job, [1], "Read-only file system", within=30.0)
        subprocess.run(["mount", "-o", "remount,rw", mount], check=True)
        scenario.resumes(3)


def test_two_jobs(scenario: Scenario) -> None:
    """The second is refused and changes nothing; the first ends as if it had been alone."""
    job = scenario.paused(Point.READ_BACK, 2, at=1)
    before = sorted(scenario.run.save.rglob("*"))
    second = scenario.start()
    scenario.ends(second, [1], f"--save {scenario.run.save} is in use by process ", within=30.0)
    assert sorted(scenario.run.save.rglob("*")) == before
    scenario.run.release()
    assert job.end(30.0) == [0]
    scenario.is_whole()


@pytest.mark.root
def test_owner_killed_on_another_host(scenario: Scenario) -> None:
    """Its heartbeat is watched for a minute, as its process cannot be seen."""
    scenario.ranks, scenario.plain = 1, True
    first = scenario.paused(Point.STEP, 5, before=[other_host])
    first.kill()
    second = scenario.start()
    scenario.continues(second, 3, within=90.0)
    assert "waiting for a heartbeat" in second.text()


@pytest.mark.root
def test_owner_stopped_for_longer_than_a_minute(scenario: Scenario) -> None:
    """It is replaced; when it is woken it ends and leaves everything to its successor."""
    scenario.ranks, scenario.plain = 1, True
    first = scenario.paused(Point.READ_BACK, 2, before=[other_host])
    message = f"this run lost its lease of {scenario.run.save}"
    scenario.is_replaced(first, message, started=90.0, ended=15.0)


@pytest.fixture
def corpus(scenario: Scenario, tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "corpus", [[list(range(100)) * 100]])
    scenario.ranks, scenario.plain = 1, True
    scenario.flags = ("--data-path", prefix, "--split", "8,1,1")


@pytest.mark.usefixtures("corpus")
@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_truncated_data(scenario: Scenario, suffix: str, tmp_path: Path) -> None:
    assert scenario.start("--exit-interval", 4).end(60.0) == [0]
    path = tmp_path / f"corpus{suffix}"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 5])
    scenario.strikes()
    scenario.ends(scenario.start(), [2], f"corpus{suffix}", within=30.0)
    path.write_bytes(whole)
    scenario.resumes(4)


@pytest.mark.usefixtures("corpus")
@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_data_cut_short_in_a_step(scenario: Scenario, suffix: str, tmp_path: Path) -> None:
    """While it is open. The order in the cache is built again by the next start."""
    job = scenario.paused(Point.READ_SAMPLE, 60)
    paths = list(tmp_path.rglob(f"*{suffix}"))
    contents = [path.read_bytes() for path in paths]
    for path in paths:
        os.truncate(path, 100)
    scenario.run.release()
    scenario.ends(job, [2], "another program has shortened it", within=30.0)
    if suffix == ".bin":
        paths[0].write_bytes(contents[0])
    scenario.resumes(6)


@pytest.mark.usefixtures("corpus")
def test_a_stuck_builder_of_indices(scenario: Scenario, tmp_path: Path) -> None:
    """Another run holds the lock of the corpus."""
    builder, first = scenario.paused(Point.BUILD_INDEX, 1), scenario.run
    scenario.run = Run(tmp_path / "other")
    waiting = scenario.start()
    message = f"for process {builder.pids()[0]} of this machine, which builds indices and holds the"
    scenario.ends(waiting, [1], message, within=LIMIT_SECONDS + 20)
    first.release()
    assert builder.end(30.0) == [0]
    scenario.resumes(0)
    assert first.final_sums() == scenario.run.final_sums()


@dataclass(frozen=True, slots=True)
class FlippedBit:
    """For `before`: after a step, a bit of rank 1's memory has flipped."""

    step: int
    state: str

    def __call__(self) -> None:
        from paro.training import loop

        train_step = loop.train_step

        def stepped(training: Any, state: Any, *args: Any, **named: Any) -> Any:
            result = train_step(training, state, *args, **named)
            if os.environ["RANK"] == "1" and state.iteration == self.step:
                self._flip(training)
            return result

        loop.train_step = stepped

    def _flip(self, training: Any) -> None:
        training.model.wait_for_updated_params()
        values = training.model.units[1].param_shard
        if self.state != "params":
            states = training.optimizer.flat_shards()
            values = next(shard.values for shard in states if shard.state == self.state)
        values.view(torch.uint8)[1234] ^= 4


@pytest.mark.parametrize(
    ("strategy", "state", "message"),
    [
        ("NNG", "params", "the parameters of blocks.0 differs between ranks 0, 1"),
        ("NNN", "param", "the parameters of embedding differs between ranks 0, 1"),
        ("NNN", "exp_avg", "exp_avg of embedding.weight differs between ranks 0, 1"),
    ],
)
def test_a_flipped_bit(scenario: Scenario, strategy: str, state: str, message: str) -> None:
    """Replicas are compared every third step, before each save."""
    flags = ["--check-weight-hash-across-dp-replicas-interval", 3, "--paro-strategy", strategy]
    scenario.strikes()
    job = scenario.start(*flags, before=[FlippedBit(6, state)])
    scenario.ends(job, [1], f"after iteration 6 {message}", within=30.0)
    assert scenario.run.saved() == 3
    if strategy == "NNG":
        scenario.resumes(3)
