"""Time of a profile's steps: the sums, the picture, and files that are not traces."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import measured
from tests.helpers.refusals import refused
from tests.helpers.scripts import run_script
from tests.helpers.training import TINY
from tools.draw_profile import main, read_profile


def event(name: str, start_ms: float, end_ms: float, *, tid: int = 1) -> dict[str, Any]:
    span = {"ts": 1e3 * start_ms, "dur": 1e3 * (end_ms - start_ms)}
    return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": tid, **span}


def write_trace(path: Path, *more: dict[str, Any], rank: int = 2) -> Path:
    """Two steps of 100 ms; the first computes for 40 ms and the second for 20 ms."""
    events = [
        event("ProfilerStep#0", 1000, 1100),
        event("paro/forward-compute", 1010, 1050),
        event("paro/wait:gather", 1020, 1030),
        event("paro/wait:publish", 1022, 1028),  # inside another
        event("paro/wait:reduce", 1090, 1100),
        event("paro/lane:gather 0 intra", 1012, 1030, tid=2),
        event("ProfilerStep#1", 1100, 1200),
        event("paro/backward-compute", 1100, 1125),
        event("paro/update", 1125, 1130),
        event("paro/wait:publish", 1110, 1120),
        event("paro/lane:reduce 1 inter", 1150, 1190, tid=3),
        event("paro/lane:gather 0 intra", 1190, 1260, tid=2),  # continues after the last step
        event("paro/forward-compute", 1210, 1250),
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
    ]
    trace = {"distributedInfo": {"rank": rank}, "traceEvents": [*events, *more]}
    path.write_text(json.dumps(trace))
    return path


def test_a_step_is_computing_waits_and_the_rest(tmp_path: Path) -> None:
    told, written = measured(main, write_trace(tmp_path / "rank2.json"))
    header, row = told.splitlines()[-2:]
    assert header.endswith("gather 0 intra  reduce 1 inter")
    assert row.split() == ["2", "100.0", "25.0", "5.0", "5.0", "5.0", "0.0", "60.0", "14.0", "20.0"]
    assert written["device"] == "cpu"
    (rank,) = written["ranks"]
    assert (rank["rank"], rank["num_steps"]) == (2, 2)
    assert rank["computing_seconds"] == pytest.approx(0.05)
    assert rank["lane_seconds"] == pytest.approx({"gather 0 intra": 0.028, "reduce 1 inter": 0.04})


def test_ranks_are_drawn_below_each_other(tmp_path: Path) -> None:
    traces = [write_trace(tmp_path / f"{rank}.json", rank=rank) for rank in (1, 0)]
    picture = tmp_path / "steps.svg"
    main([*map(str, traces), "--plot", str(picture), "--title", "two ranks"])
    drawn = picture.read_text()
    assert "rank 0: compute" in drawn
    assert "rank 1: reduce 1 inter" in drawn


def drawn_of(*argv: object) -> Callable[[], int]:
    return lambda: main([*map(str, argv)])


def test_what_is_no_profile_is_refused_in_one_line(tmp_path: Path) -> None:
    whole = write_trace(tmp_path / "whole.json")
    bad = {
        "missing": (None, "No such file"),
        "binary": (b"\x89PNG", "is not UTF-8 text; give what --use-pytorch-profiler wrote"),
        "list": (b"[]", "no object with the fields traceEvents"),
        "without events": (b"{}", "traceEvents: is missing"),
        "rank": (b'{"traceEvents": [], "distributedInfo": {"rank": -1}}', "Info.rank: -1"),
        "deep": (b"[" * 10**5, "nested too deeply"),
        "idle": (b'{"traceEvents": []}', "no step of a training"),
        "no times": (b'{"traceEvents": [{"ph": "X", "name": "ProfilerStep#1"}]}', "ts: is missing"),
        "odd": (b'{"traceEvents": [{"ph": "X", "ts": 1, "dur": 1}]}', "no step of a training"),
        "backwards": (
            b'{"traceEvents": [{"ph": "X", "ts": 1, "dur": -1, "name": "ProfilerStep#1"}]}',
            "traceEvents: [0].dur: -1 is not allowed",
        ),
    }
    for name, (content, message) in bad.items():
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        refused(drawn_of(whole, path), str(path), message)
    refused(drawn_of(whole, whole), "of one rank")
    refused(drawn_of(whole, "--plot", tmp_path / "steps.txt"), "--plot")


@pytest.mark.ranks
def test_the_trainer_writes_what_is_read(tmp_path: Path) -> None:
    words = f"{TINY} --global-batch-size 4 --train-iters 4 --eval-iters 0 --paro-strategy GGG"
    profile = (
        "--profile --use-pytorch-profiler --profile-step-start 1 --profile-step-end 3 "
        f"--profile-ranks 0 1 --tensorboard-dir {tmp_path}"
    )
    command = ["pretrain_llama.py", *words.split(), *profile.split()]
    trained = run_script(command, 2)
    assert trained.returncode == 0, trained.stderr
    for rank in (0, 1):
        read = read_profile(tmp_path / f"rank{rank}.steps1-3.pt.trace.json")
        assert (read.rank, read.num_steps) == (rank, 2)
        assert read.computing() > 0.0
        parts = read.computing() + sum(map(read.waited, ("gather", "reduce", "publish")))
        assert 0.0 < parts < read.seconds
        assert list(read.lanes()) == ["gather 0 intra", "reduce 0 intra"]
        assert all(0.0 < busy < read.seconds for busy in read.lanes().values())
