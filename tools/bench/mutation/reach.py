"""Finds the tests that execute each mutant's code, in all their processes, by one run of the tests.

The code of every mutant calls a probe, which notes the test that runs. A Python environment of its
own makes the probe known to every process that a test starts.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.bench.mutation.mutants import Mutant, apply

_PROBE = """import builtins, os
_seen = set()
def _reach(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if (number, test) not in _seen:
        _seen.add((number, test))
        file = os.open({notes!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, f"{{number}}\\t{{test}}\\n".encode())
        os.close(file)
builtins.__reach__ = _reach
"""


def make_environment(folder: Path, notes: Path) -> Path:
    """Make a Python environment with this one's packages and the probe; return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (packages / "reach_probe.py").write_text(_PROBE.format(notes=str(notes)))
    (packages / "base.pth").write_text(f"{sysconfig.get_path('purelib')}\nimport reach_probe\n")
    return python


def add_probes(tree: Path, mutants: Sequence[Mutant]) -> None:
    """Let the code of every mutant in a copy of the repository call the probe with its number."""
    by_path: dict[str, list[int]] = defaultdict(list)
    for number, mutant in enumerate(mutants):
        by_path[mutant.path].append(number)
    for path, numbers in by_path.items():
        text = (tree / path).read_text(encoding="utf-8")
        # Later places first, outer expressions before those inside them would move these.
        for number in sorted(numbers, key=lambda each: -_position(mutants[each], text)):
            mutant = mutants[number]
            probed = apply(mutant, text, new=f"(__reach__({number}) or ({mutant.old}))")
            assert probed is not None, f"{path}: {mutant.line}"
            text = probed
        (tree / path).write_text(text, encoding="utf-8")


def _position(mutant: Mutant, text: str) -> int:
    mark = "(__reach__)"
    changed = apply(mutant, text, new=mark)
    assert changed is not None
    return changed.index(mark)


def read_notes(notes: Path, num_mutants: int) -> list[list[str]]:
    """Return the tests that reached each mutant."""
    reached: list[set[str]] = [set() for _ in range(num_mutants)]
    for line in notes.read_text(encoding="utf-8").splitlines():
        number, _, test = line.partition("\t")
        reached[int(number)].add(test)
    return [sorted(tests - {""}) for tests in reached]


def durations(report: Path) -> Mapping[str, float]:
    """Return the seconds of every test of a JUnit report, by pytest's name of it."""
    seconds = {}
    for case in ET.parse(report).iter("testcase"):
        module, name = case.attrib["classname"].replace(".", "/") + ".py", case.attrib["name"]
        seconds[f"{module}::{name}"] = float(case.attrib["time"])
    return seconds
