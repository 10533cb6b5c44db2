"""Damaged inputs end cleanly: a sample with a fixed seed, and thousands under `make verify`."""

from __future__ import annotations

import os
from collections import Counter
from datetime import date
from pathlib import Path

import pytest

from tests.fuzz.cases import TARGETS, Case, cases, fault_of, make_inputs, run_case
from tests.helpers.scripts import run_script

SAMPLE = cases(3 * len(TARGETS), seed=1)


@pytest.mark.process
@pytest.mark.parametrize("name", TARGETS)
def test_inputs_that_are_whole_are_read(name: str, tmp_path: Path) -> None:
    place, out = make_inputs(tmp_path)
    done = run_script(TARGETS[name].command.format(set=place, out=out).split())
    assert done.returncode == 0, done.stderr


@pytest.mark.process
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_damaged_input_ends_cleanly(case: Case, tmp_path: Path) -> None:
    outcome = run_case(case, tmp_path)
    assert outcome.fault is None, f"{outcome.damage}\n{outcome.stderr[-2000:]}"


@pytest.mark.verify
@pytest.mark.timeout(3600)
def test_two_thousand_damaged_inputs_end_cleanly(tmp_path: Path) -> None:
    """With a seed of the day, or FUZZ_SEED and FUZZ_CASES."""
    seed = int(os.environ.get("FUZZ_SEED", date.today().toordinal()))
    count = int(os.environ.get("FUZZ_CASES", 2000))
    faults: Counter[str] = Counter()
    for number, case in enumerate(cases(count, seed)):
        folder = tmp_path / str(number)
        folder.mkdir()
        outcome = run_case(case, folder)
        if outcome.fault is not None:
            faults[outcome.fault] += 1
            print(f"{case}: {outcome.damage[:200]}: {outcome.fault}\n{outcome.stderr[-600:]}")
    assert not faults, f"seed {seed}: {faults}"


@pytest.mark.parametrize(
    ("status", "stderr", "told"),
    [
        (0, "", None),
        (2, "plan.py: error: m.json: what it is\n", None),
        (2, "plan.py: error: --lr what it is\n", None),
        (2, "plan.py: error: what it is\n", "neither the file nor a flag"),
        (2, "what it is\n", "no line with its name"),
        (2, 2 * "plan.py: error: m.json\n", "or several"),
        (2, "plan.py: error: m.json \x1b[2J\n", r"prints '\\x1b'"),
        (2, f"plan.py: error: m.json {3000 * 'x'}\n", "2,000 characters"),
        (1, "plan.py: error: m.json: what it is\n", "status is 1"),
        (1, "Traceback (most recent call last):\n", "traceback"),
        (-11, "", "status is -11"),
    ],
)
def test_ends_are_judged(status: int, stderr: str, told: str | None) -> None:
    fault = fault_of("tools/plan.py", status, "", stderr, ["m.json"])
    if told is None:
        assert fault is None
    else:
        assert fault is not None
        assert told in fault.replace("\\", "\\\\") or told in fault
