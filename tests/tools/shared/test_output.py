"""What tools print as JSON, and that they overwrite no results."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.helpers.refusals import refused
from tools.shared.output import print_json, write_json, write_text


def test_json_is_whole_and_acts_upon_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"\x1b[2J\x7f\u202e": ["x" * 10**5, 1.5]}
    print_json(value)
    printed = capsys.readouterr().out
    assert printed.removesuffix("\n").isascii()
    assert printed.removesuffix("\n").isprintable()
    assert json.loads(printed) == value


def test_other_figures_of_an_earlier_call_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    for value, is_update in ((1, False), (2, False), (2, False), (3, True), (4, False)):
        write_json(path, value, is_update=is_update)
    kept = [path, *(Path(f"{path}.earlier_{number}") for number in (1, 2))]
    assert [json.loads(each.read_text()) for each in kept] == [4, 1, 3]
    assert sorted(tmp_path.iterdir()) == kept
    told = capsys.readouterr()
    assert told.out == ""  # may be read by a program
    assert [str(each) in told.err for each in kept[1:]] == [True, True]


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        refused(lambda path=path: write_json(path, 1), f"{path} cannot be written")  # type: ignore[misc]
    assert pipe.is_fifo()


def test_a_text_with_a_name_that_is_no_utf8_is_written(tmp_path: Path) -> None:
    write_text(tmp_path / "page", f"of {os.fsdecode(bytes([0x80]))}")
    assert (tmp_path / "page").read_text(encoding="utf-8") == r"of \udc80"
