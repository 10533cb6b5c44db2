"""Parts that are tests of this repository: those for GPUs, ranks on one GPU, races."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence

from tools.bench.gpu_check.running import Ended, Outcome, Runner
from tools.bench.shared.turns import ROOT

_NEEDED = ("pytest", "hypothesis")
# Skips that no machine of today's kind can avoid; the reasons that tests give.
_MAY_SKIP = ("needs fp8",)
_MOST_FAILURES = 10  # on the page; the log has all


def gpu_tests(runner: Runner) -> Outcome:
    """Run every test that needs a GPU and is of no other part; in a rehearsal, one file."""
    files = gpu_test_files()[: 1 if runner.rehearse else None]
    return _pytest(runner, "gpu-tests", files, rehearsed="gpu")


def gpu_test_files() -> list[str]:
    """Find the files with tests that need a GPU; others may import absent packages."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [
        str(file.relative_to(ROOT))
        for file in files
        if file.parent.name != "gpu" and "mark.gpu" in file.read_text(encoding="utf-8")
    ]


def tests_in(runner: Runner, name: str) -> Outcome:
    """Return the tests of a file for this check alone."""
    return _pytest(runner, name, [f"tests/gpu/{name}.py"], rehearsed="verify")


def _pytest(runner: Runner, name: str, files: Sequence[str], *, rehearsed: str) -> Outcome:
    """Run the files' tests for a GPU; in a rehearsal, tests with the mark `rehearsed`."""
    marks = ["-m", rehearsed] if runner.rehearse else ["-m", "gpu", "--must-run", "gpu"]
    missing = [module for module in _NEEDED if importlib.util.find_spec(module) is None]
    if missing:
        names = " ".join(missing)
        return Outcome(passed=False, lines=(f"needs {names}: pip install {names}",))
    report = runner.folder / "logs" / f"{name}.xml"
    report.unlink(missing_ok=True)
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=--strict-markers"]
    words = [*options, "--junit-xml", report, *marks, *files]
    ended = runner.run(name, words, alone=True)
    if not report.exists():
        return Outcome(passed=False, lines=(ended.failure or "pytest wrote no report",))
    return outcome_of(runner, ended, ElementTree.parse(report).getroot())


def outcome_of(runner: Runner, ended: Ended, report: ElementTree.Element) -> Outcome:
    """Read pytest's JUnit report; a skip is a failure unless hardware is missing."""
    failed: list[str] = []
    skipped: Counter[str] = Counter()
    cases = list(report.iter("testcase"))[: -1 if ended.timed_out else None]  # it was stopped there
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        for tag in (*case.findall("failure"), *case.findall("error")):
            message = (tag.get("message") or "").strip().splitlines() or [""]
            failed.append(f"{name}: {message[0]}")
        skipped.update(tag.get("message") or "" for tag in case.findall("skipped"))
    has_all = runner.rehearse or all(reason.startswith(_MAY_SKIP) for reason in skipped)
    num_passed = len(cases) - len(failed) - skipped.total()
    lines = [f"{num_passed} passed, {len(failed)} failed, {skipped.total()} skipped"]
    lines += [f"{count} skipped: {reason}" for reason, count in skipped.items()]
    notes = [tag.get("value") or "" for tag in report.iter("property") if tag.get("name") == "note"]
    lines += notes
    lines += [f"failed: {line}" for line in failed[:_MOST_FAILURES]]
    if ended.timed_out:
        lines.append(ended.failure or "")
    figures = {"passed": num_passed, "failed": failed, "skipped": dict(skipped), "notes": notes}
    passed = not (failed or ended.timed_out) and has_all and ended.status == 0 and bool(cases)
    return Outcome(passed=passed, lines=tuple(lines), figures=figures)
