"""The record next to a metrics file: every start of a run, and each evaluation once."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paro.report.config import run_record_path
from paro.report.record import Validation
from paro.report.run_record import RunRecord
from tests.helpers.refusals import refused
from tests.paro.report.test_report import FACTS

CPU = torch.device("cpu")


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def test_a_resumed_run_adds_its_start_and_repeats_no_evaluation(tmp_path: Path) -> None:
    path = run_record_path(tmp_path / "metrics.jsonl")
    assert path.name == "metrics.jsonl.run.json"
    first = RunRecord(path, start_iteration=0)
    first.start({"lr": 0.1, "save": Path("x")}, FACTS, CPU)
    for iteration in (10, 20):
        first.validation(Validation(iteration, 8 * iteration, 1.0, "all", 0.5))
    second = RunRecord(path, start_iteration=10)
    second.start({"lr": 0.2}, FACTS, CPU)
    second.validation(Validation(20, 160, math.nan, "all", math.nan))
    found = read(path)
    assert [start["iteration"] for start in found["starts"]] == [0, 10]
    assert [start["arguments"]["lr"] for start in found["starts"]] == [0.1, 0.2]
    assert [[*at.values()] for at in found["validations"]] == [
        [10, "validation", 1.0, 0.5],
        [20, "validation", None, None],
    ]
    assert found["starts"][0]["facts"]["flops_per_token"] == FACTS.flops_per_token
    assert found["starts"][0]["environment"]["torch"] == torch.__version__


def test_a_fresh_run_starts_a_record_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "m.run.json"
    path.write_text("{ damaged")
    resume = partial(RunRecord, path, start_iteration=5)
    refused(resume, "m.run.json is not valid JSON ... remove it to go on")
    RunRecord(path, start_iteration=0).start({}, FACTS, CPU)
    assert len(read(path)["starts"]) == 1
    path.write_text('{"starts": [{"iteration": "x"}]}')
    refused(resume, "m.run.json: starts[0].iteration: 'x' is of the wrong")
