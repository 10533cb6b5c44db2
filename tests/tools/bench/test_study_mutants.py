"""Mutants change one thing, apply after a move, and are matched with the tests that run them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.bench.mutation.mutants import Mutant, apply, mutants_of
from tools.bench.mutation.reach import add_probes, make_environment, read_notes

BEFORE = """
class Ring:
    def size(self, a: int = 3) -> int:
        # a < a
        assert a < a, "a < a"
        return BODY
"""


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("comparison", "a < 4", "a <= 4"),
        ("comparison", "a is a", "a is not a"),
        ("arithmetic", "a + a", "a - a"),
        ("arithmetic", "a * a", "a // a"),
        ("boolean", "a and b", "a or b"),
        ("constant", "7", "8"),
        ("constant", "True", "False"),
        ("swap", "f(a, b)", "f(b, a)"),
    ],
)
def test_one_thing_changes_and_also_after_a_move(kind: str, old: str, new: str) -> None:
    text = BEFORE.replace("BODY", f"g({old})")
    found = [each for each in mutants_of("paro/ring.py", text) if each.old == old]
    assert [(each.kind, each.new) for each in found] == [(kind, new)]
    moved = text.replace("class", "import os\n\nx = 'é'\nclass")
    assert apply(found[0], moved) == moved.replace(f"g({old})", f"g({new})")
    assert apply(found[0], text.replace("size", "length")) is None


@pytest.mark.parametrize(("call", "kind"), [("work.wait()", "wait"), ("self.close()", "call")])
def test_calls_are_removed(call: str, kind: str) -> None:
    text = f"def f():\n    {call}\n    {call}\n"
    first, second = sorted(mutants_of("f.py", text), key=lambda each: each.nth)
    assert first.kind == second.kind == kind
    assert apply(second, text) == f"def f():\n    {call}\n    None\n"


def test_texts_types_and_annotations_have_no_mutants() -> None:
    texts = ('raise ValueError(f"{1 + 1}")', 'return f"{a + 1}"', 'return "a" + b')
    for body in (*texts, "return isinstance(a, b)", "a: Literal[1]"):
        assert not list(mutants_of("f.py", f"def f(a: int = 3):\n    {body}\n")), body


MUTANT = Mutant(
    kind="arithmetic", path="paro/a.py", function="f", nth=0, old="1 + 1", new="", line=""
)


@pytest.mark.process
def test_a_probe_notes_the_test_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "paro").mkdir()
    (tmp_path / "paro/a.py").write_text("def f():\n    return 1 + 1\n")
    add_probes(tmp_path, [MUTANT])
    notes = tmp_path / "notes.txt"
    python = make_environment(tmp_path / "python", notes)
    run = "import os, paro.a; os.fork(); print(paro.a.f(), flush=True)"
    name = "tests/test_a.py::test[1 x] (call)"
    command, environment = [python, "-c", run], {"PYTEST_CURRENT_TEST": name}
    printed = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
    assert printed.split() == ["2", "2"]
    assert read_notes(notes, 2) == [["tests/test_a.py::test[1 x]"], []]
