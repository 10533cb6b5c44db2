"""What tools print as JSON."""

from __future__ import annotations

import json

import pytest

from tools.shared.output import print_json


def test_json_is_whole_and_acts_upon_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"\x1b[2J\x7f\u202e": ["x" * 10**5, 1.5]}
    print_json(value)
    printed = capsys.readouterr().out
    assert printed.removesuffix("\n").isascii()
    assert printed.removesuffix("\n").isprintable()
    assert json.loads(printed) == value
