"""A mistake is one line under the program's name, for any message and command."""

from __future__ import annotations

import pytest

from tools.shared.command_line import Parser


def test_a_mistake_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="tool.py")
    command = parser.add_subparsers().add_parser("measure")
    command.add_argument("--rounds", type=int)
    with pytest.raises(SystemExit) as end:
        parser.error("two\n  lines")
    assert (end.value.code, capsys.readouterr().err) == (2, "tool.py: error: two lines\n")
    with pytest.raises(SystemExit) as end:
        parser.parse_args(["measure", "--rounds", "many"])
    told = capsys.readouterr().err
    assert (end.value.code, told.count("\n")) == (2, 1)
    assert told.startswith("tool.py: error: argument --rounds")
