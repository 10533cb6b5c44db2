"""Files appear complete or not at all."""

from __future__ import annotations

from pathlib import Path

from data.atomic_file import replacing


def test_the_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.parent == path.parent
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_writers_of_the_same_file_do_not_share_a_name(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    with replacing(path) as first, replacing(path) as second:
        first.write_text("first")
        second.write_text("second")
        assert first != second
    assert path.read_text() == "first"  # the one that ended last
