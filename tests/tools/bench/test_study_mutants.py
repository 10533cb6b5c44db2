"""Mutants change one thing, and apply after a move."""

from __future__ import annotations

import pytest

from tools.bench.mutation.mutants import apply, mutants_of

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
