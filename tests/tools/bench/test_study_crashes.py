"""The crash study kills thirty ranks; a line of metrics that a kill cut short is no loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.scripts import run_script


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
