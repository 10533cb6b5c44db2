"""What a new run finds in its place is kept, whatever else has such names."""

from __future__ import annotations

from pathlib import Path

from paro.report.earlier import earlier_file, next_number, set_aside, set_aside_in


def test_every_earlier_file_gets_a_number_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "m[1].jsonl"
    assert set_aside(path) is None
    for number in (1, 2):
        path.write_text(str(number))
        assert set_aside(path) == tmp_path / f"m[1].jsonl.earlier_{number}"
    assert [(tmp_path / f"m[1].jsonl.earlier_{n}").read_text() for n in (1, 2)] == ["1", "2"]
    assert not path.exists()


def test_numbers_follow_the_highest_that_anything_has(tmp_path: Path) -> None:
    assert next_number(tmp_path / "absent") == 1
    for name in ("a.earlier_9.run.json", "a.earlier_x", "a.earlier_", "b.earlier_20", "earlier_3"):
        (tmp_path / name).write_text("")
    assert earlier_file(tmp_path / "a").name == "a.earlier_10"
    assert next_number(tmp_path) == 4


def test_files_of_a_folder_keep_their_places_inside(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    files = [tmp_path / "x", tmp_path / "in" / "x"]
    for path in files:
        path.write_text(str(path))
    assert set_aside_in(tmp_path, []) is None
    earlier = set_aside_in(tmp_path, files)
    assert earlier == tmp_path / "earlier_1"
    assert [(earlier / path.relative_to(tmp_path)).read_text() for path in files] == [
        str(path) for path in files
    ]
