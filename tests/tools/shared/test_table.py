"""Columns of text."""

from __future__ import annotations

from tools.shared.table import align


def test_columns_are_as_wide_as_their_widest() -> None:
    rows = [["a", "bb", "c"], ["ccc", "d", ""]]
    assert align(rows) == "a    bb  c\nccc   d"
    assert align(rows, left=(1, -1)) == "  a  bb  c\nccc  d"
