"""The GPU check: its parts' course on a CPU, what it refuses, and what it keeps of earlier runs."""

from __future__ import annotations

import json
import tarfile
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.helpers.refusals import refused
from tests.helpers.warm_python import run_python
from tools.bench.check_gpu import PARTS, TorchMachine, check_machine, make_parser, parts_of
from tools.bench.gpu_check import running, suites
from tools.bench.gpu_check.measures import memory_failure
from tools.bench.gpu_check.page import ARCHIVE, PAGE, RESULTS, read_results, write_results
from tools.bench.gpu_check.running import Ended, Outcome, Runner


def runner(folder: Path, *, rehearse: bool = False, seconds: float = 60.0) -> Runner:
    return Runner(folder=folder, rehearse=rehearse, num_gpus=1, seconds=seconds)


@pytest.mark.process
@pytest.mark.parametrize(
    "letters",
    # Parts b and c are tests that `make verify` runs too; others differ from e in their shapes.
    ["n", pytest.param("abcdefgjkmnpqrst", marks=pytest.mark.verify)],
)
def test_a_rehearsal_runs_parts_and_keeps_earlier_results(tmp_path: Path, letters: str) -> None:
    folder = tmp_path / "gpu"
    write_results(folder, {"h": {**EARLIER, "title": "collectives"}}, rehearsal=True)
    flags = ["--rehearse", "--out", folder, "--parts", ",".join(letters)]
    done = run_python(["tools/bench/check_gpu.py", *flags])
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((folder / RESULTS).read_text())
    assert list(results) == sorted(f"{letters}h")
    assert all(results[letter]["passed"] for letter in letters)
    assert all("SM clock 1000 MHz" in results[letter]["lines"][-1] for letter in letters)
    assert results["h"]["lines"] == EARLIER["lines"]
    assert (folder / PAGE).read_text().startswith("# Rehearsal")
    assert not (folder / "checkpoint").exists()
    with tarfile.open(folder / ARCHIVE) as whole:
        names = {name.removeprefix("./") for name in whole.getnames()}
    assert names > {PAGE, RESULTS, "clocks.csv"}


@pytest.mark.verify
@pytest.mark.process
def test_a_quick_rehearsal_runs_its_course_and_the_second_what_is_left(tmp_path: Path) -> None:
    flags = ["tools/bench/check_gpu.py", "--rehearse", "--out", tmp_path]
    for number, letters in ((1, "abcfknpqr"), (2, "abcfkmnpqrst")):
        done = run_python([*flags, "--quick", str(number)])
        assert done.returncode == 0, done.stdout + done.stderr
        results = read_results(tmp_path)
        assert list(results) == sorted(letters)
        assert all(part["passed"] for part in results.values())
    assert results["a"]["date"] <= results["s"]["date"]


EARLIER = {
    **{"title": "speed", "passed": False, "seconds": 12.3, "machine": "1 x GPU", "figures": {}},
    **{"date": "2026-01-02", "commit": "abc", "lines": ["slow"], "pictures": ["speed.png"]},
}


@pytest.mark.parametrize("content", ["{", "[1]", '{"a": 3}', '{"a": {}}'])
def test_damaged_results_are_not_overwritten(tmp_path: Path, content: str) -> None:
    (tmp_path / RESULTS).write_text(content)
    refused(lambda: read_results(tmp_path), "--out ... is damaged, give another folder:")


def test_parts_that_are_chosen() -> None:
    chosen = {"": "eabcdfgjkmnpqrst", "--gpus 2": "eabcdfgjkmnpqrsthil"}
    for flags, letters in (chosen | {"--parts a,e": "ea", "--parts h --gpus 2": "h"}).items():
        assert parts_of(make_parser().parse_args(flags.split())) == list(letters)
        assert set(letters) <= set(PARTS)


def test_a_machine_without_a_gpu_or_with_an_old_one_is_refused() -> None:
    args = make_parser().parse_args([])
    told = "sees 0 GPUs; run it with a Python whose torch has CUDA, or give --rehearse"
    refused(lambda: check_machine(TorchMachine(torch="2.13", gpus=0), args), told)
    found = TorchMachine(torch="2.11.0", gpus=1, name="Tesla V100", bytes=2**34, capability=(7, 0))
    refused(lambda: check_machine(found, args), "Tesla V100 ... 7.0: 8.0 is needed")
    check_machine(
        TorchMachine(torch="2.11.0", gpus=1, name="A100", bytes=2**35, capability=(8, 0)), args
    )


REPORT = """<testsuites><testsuite>
<testcase classname="tests.m" name="good">
<properties><property name="note" value="ranks are threads"/></properties></testcase>
<testcase classname="tests.m" name="bad">
<failure message="assert 1 == 2&#10;more">long</failure></testcase>
<testcase classname="tests.m" name="fp8">
<skipped message="needs fp8: compute capability 8.9"/></testcase>
{more}
</testsuite></testsuites>"""
SKIPPED = '<testcase classname="tests.m" name="x"><skipped message="needs wandb"/></testcase>'


def outcome(text: str, status: int, *, rehearse: bool = False) -> Outcome:
    ended, report = Ended(status=status, output="", seconds=1.0), ElementTree.fromstring(text)
    return suites.outcome_of(runner(Path(), rehearse=rehearse), ended, report)


def test_failures_and_skips_of_a_suite_are_lines() -> None:
    found = outcome(REPORT.format(more=""), 1)
    assert not found.passed
    assert found.lines == (
        "1 passed, 1 failed, 1 skipped",
        "1 skipped: needs fp8: compute capability 8.9",
        "ranks are threads",
        "failed: tests.m::bad: assert 1 == 2",
    )
    as_written = json.loads(json.dumps(asdict(found)))
    assert as_written["figures"]["skipped"] == {"needs fp8: compute capability 8.9": 1}


def test_only_missing_hardware_excuses_a_skip() -> None:
    for more, rehearse, passed in (
        ("", False, True),
        (SKIPPED, False, False),
        (SKIPPED, True, True),
    ):
        text = REPORT.format(more=more).replace("failure", "properties")
        assert outcome(text, 0, rehearse=rehearse).passed is passed


@pytest.mark.verify
@pytest.mark.process
def test_a_command_over_its_limit_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that does not stop when it is asked to; and then no other begins."""
    monkeypatch.setattr(running, "GRACE_SECONDS", 0.5)
    child = "import time; time.sleep(60)"
    deaf = "import signal, subprocess, sys; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    parent = f"{deaf}; print(1, flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    of_part = runner(tmp_path, seconds=5.0)  # to start on a busy machine
    ended = of_part.run("sleeper", ["-c", parent])
    assert ended.timed_out
    assert ended.output == "1\n"
    assert "the part's time was over" in ended.failure
    assert of_part.run("next", ["-c", "print(2)"]).timed_out
    assert not (tmp_path / "logs" / "next.log").exists()


def test_memory_that_contradicts_its_prediction() -> None:
    for allocated, reserved, told in (
        (97, 100, None),
        (101, 105, None),  # library workspaces and rounding are in the share for fragmentation
        (101, 106, "more is reserved than the "),
        (90, 100, None),
        (89, 100, "more than 10% below the prediction"),
    ):
        predicted = {"predicted peak": 100, "predicted reserved": 105}
        found = memory_failure({**predicted, "max allocated": allocated, "max reserved": reserved})
        assert (found is None) is (told is None)
        assert (found or "").startswith(told or "")
    assert memory_failure({"max resident": 300, "predicted peak": 100}) is None, "of a CPU"
