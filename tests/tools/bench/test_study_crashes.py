"""The crash study kills real ranks: one under `make test`, thirty under `make verify`."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import HANGS_AFTER
from tests.helpers.scripts import run_script
from tools.bench.study_crashes import Kill, Study, losses, make_parser, wanted_kinds

TOOL = "tools/bench/study_crashes.py"


def study(folder: Path, *flags: object, timeout: float) -> dict[str, Any]:
    out = folder / "figures.json"
    done = run_script([TOOL, "--folder", folder / "runs", "--json", out, *flags], timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    figures: dict[str, Any] = json.loads(out.read_text())
    shutil.rmtree(folder / "runs")
    return figures


@pytest.mark.verify
def test_a_killed_training_resumes_and_its_losses_are_the_undisturbed_ones(tmp_path: Path) -> None:
    few = ["--ranks", 2, "--group-size", 1, "--strategy", "NNG", "--train-iters", 9]
    figures = study(tmp_path, "--kills", 1, "--inside", 1, *few, timeout=HANGS_AFTER)
    assert figures["complaints"] == []
    assert figures["kills"] >= 1  # more if one came too late for the save
    assert figures["inside_asynchronous_saves"] >= 1


@pytest.mark.verify
@pytest.mark.ranks
def test_thirty_kills_half_of_them_inside_saves(tmp_path: Path) -> None:
    figures = study(tmp_path, "--kills", 30, "--inside", 15, timeout=3000.0)
    assert figures["kills"] >= 30
    assert figures["inside_saves"] >= 15
    assert figures["inside_asynchronous_saves"] >= 7
    assert figures["complaints"] == []
    assert figures["survivors_gone_seconds"]["most"] < 60.0  # --distributed-timeout-minutes 1


def kill(*, inside: bool, asynchronous: bool) -> Kill:
    return Kill(
        rank=0,
        inside_save=inside,
        asynchronous=asynchronous,
        survivors_gone_seconds=1.0,
        trains_again_seconds=2.0,
    )


def test_both_kinds_of_kills_are_wanted_under_both_ways_to_save() -> None:
    args: argparse.Namespace = make_parser().parse_args(
        ["--folder", "runs", "--kills", "5", "--inside", "3"]
    )
    made = Study()
    assert wanted_kinds(made, args, asynchronous=False) == [True, False]
    made.kills.append(kill(inside=True, asynchronous=False))
    assert wanted_kinds(made, args, asynchronous=False) == [False]
    made.kills.append(kill(inside=False, asynchronous=False))
    assert wanted_kinds(made, args, asynchronous=False) == []
    assert wanted_kinds(made, args, asynchronous=True) == [True, False]
    made.kills += [kill(inside=True, asynchronous=True)] * 2
    assert wanted_kinds(made, args, asynchronous=True) == [False]


def test_a_line_that_a_kill_cut_short_is_no_loss(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1, "lm_loss": 2.5}\n{"iteration": 2, "lm_')
    assert losses(path) == [(1, 2.5)]
