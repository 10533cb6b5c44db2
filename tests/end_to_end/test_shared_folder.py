"""Runs that share one --save: the second is refused, and one that lost the folder stops."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from paro.checkpoint import lease
from paro.checkpoint.claim import claimed
from paro.checkpoint.directory import read_common
from paro.checkpoint.owner import Owner
from tests.end_to_end.test_checkpoint_flags import at_the_disk, iterations
from tests.end_to_end.test_training import launch
from tests.helpers.refusals import refused
from tests.paro.checkpoint.toy_run import control_here


def test_a_folder_in_use_is_refused_to_runs_that_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"--mock-data --train-iters 4 --save {tmp_path} --load {tmp_path}"
    launch(words, "--exit-interval 2")
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.1)
    with claimed(tmp_path, control_here(), print):
        before = sorted(tmp_path.rglob("*"))
        where = f"process {os.getpid()} on {socket.gethostname()}"
        told = f"--save {tmp_path} is in use by {where} ... give another --save"
        refused(lambda: launch(words), told)
        for reads in ("--dry-run --world-size 2 --ranks-per-node 2", "--skip-train --eval-iters 1"):
            launch(words, reads)
        assert sorted(tmp_path.rglob("*")) == before
    launch(words)
    assert iterations(tmp_path) == ["iter_0000002", "iter_0000004"]


@pytest.mark.parametrize("how", ["", "--async-save"])
def test_a_run_that_lost_the_folder_stops_and_changes_nothing(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run takes the folder over while this one writes iteration 4."""
    other = replace(Owner.this_process(), host="node7")
    at_the_disk(monkeypatch, 4, lambda: lease._create(tmp_path, 2, other))
    words = f"--mock-data --train-iters 8 --save {tmp_path} --save-interval 2 {how}"
    retain = "--save-retain-interval 8 --on-save-failure continue"
    told = f"this run lost its lease of {tmp_path}: process {os.getpid()} on node7"
    refused(lambda: launch(words, retain), told, status=1)
    assert iterations(tmp_path) == ["iter_0000002"]
    common = read_common(tmp_path)
    assert common["iteration"] == 2
    assert json.loads((tmp_path / "lease_2.json").read_text())["released"] is False
