"""The crash study kills thirty ranks; a line of metrics that a kill cut short is no loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.scripts import run_script
from tools.bench.study_crashes import losses


@pytest.mark.verify
@pytest.mark.ranks
def test_thirty_kills_half_of_them_inside_saves(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    flags = ["--folder", tmp_path / "runs", "--json", out, "--kills", 30, "--inside", 15]
    done = run_script(["tools/bench/study_crashes.py", *flags], timeout=3000.0)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())
    assert figures["kills"] >= 30
    assert figures["inside_saves"] >= 15
    assert figures["inside_asynchronous_saves"] >= 7
    assert figures["complaints"] == []
    assert figures["survivors_gone_seconds"]["most"] < 60.0  # --distributed-timeout-minutes 1


def test_a_line_that_a_kill_cut_short_is_no_loss(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1, "lm_loss": 2.5}\n{"iteration": 2, "lm_')
    assert losses(path) == [(1, 2.5)]
