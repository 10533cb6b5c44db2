"""JSON and files of unknown origin: types are checked and errors name fields; their checksums."""

from __future__ import annotations

import importlib
import os
import random
import sys
import zlib
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest

from paro.errors import UserError
from paro.files import checksum
from paro.files.regular_file import read_bytes, read_text
from paro.files.schema import Count, Figure, conform, parse_json, read_json
from tests.helpers.refusals import refused


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    size: Count
    colour: Colour = Colour.RED
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.size == 13:
            raise UserError("size: 13 is too odd")


class Open(TypedDict):
    name: str
    kind: NotRequired[Literal["a", "b"] | None]
    parts: NotRequired[list[Closed]]
    rate: NotRequired[float]
    pair: NotRequired[tuple[str, int]]
    level: NotRequired[Annotated[int, range(1, 9)]]
    by_id: NotRequired[dict[int, bool]]
    either: NotRequired[str | list[int]]


def test_json_becomes_the_types() -> None:
    text = """{"name": "x", "kind": null, "parts": [{"size": 2e3, "colour": "blue", "shape": [1]}],
               "rate": 1, "pair": ["a", 2], "level": 8, "by_id": {"7": true}, "either": [1],
               "other": {"anything": [1]}}"""
    assert parse_json(text, Open, "F") == {
        "name": "x",
        "kind": None,
        "parts": [Closed(size=2000, colour=Colour.BLUE, shape=(1,))],
        "rate": 1,
        "pair": ("a", 2),
        "level": 8,
        "by_id": {7: True},
        "either": [1],
        "other": {"anything": [1]},
    }


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ('"name": 5', "name: 5 is of the wrong type, it must be text"),
        ('"name": "a\\u0000b"', "name: ... holds a zero byte"),
        ('"name": "a\\ud800"', "name: 'a\\ud800' holds ... half of a character"),
        ('"kind": "c"', "kind: 'c' is none of a, b"),
        ('"parts": [{"size": 1}, 3]', "parts[1]: 3 is no object with the fields size, colour"),
        ('"parts": [{}]', "parts[0].size: is missing"),
        ('"parts": [{"size": -1}]', "parts[0].size: -1 is not allowed, it must be 0 or more"),
        ('"parts": [{"size": true}]', "parts[0].size: True is of the wrong type"),
        ('"parts": [{"size": 1.5}]', "parts[0].size: 1.5 is not allowed, it must be a whole"),
        ('"parts": [{"size": 1, "x": 1}]', "parts[0].x: is unknown; the fields are size"),
        ('"parts": [{"size": 13}]', "parts[0].size: 13 is too odd"),
        ('"rate": NaN', "rate: nan is not allowed, it must be a finite number"),
        ('"rate": 1e999', "rate: inf is not allowed, it must be a finite number"),
        (f'"rate": {10**400}', f"rate: 1{'0' * 59}... a finite number"),
        ('"pair": ["a"]', "pair: ['a'] is not allowed, it must have 2 items"),
        ('"level": 9', "level: 9 is not allowed, it must be from 1 to 8"),
        ('"by_id": {"x": true}', "by_id.x: is no number"),
        ('"either": 1', "either: 1 is of the wrong type, it must be text or a list"),
        ('"either": ["x"]', "either[0]: 'x' is of the wrong type"),
        ('"level": ' + "9" * 5000, "is not valid JSON: Exceeds the limit"),
        ('"x": ' + "[" * 99 + "]" * 99, "is nested too deeply"),
        ('"name": "\x1b[31m", "level": "\\u001b[31m"', "is not valid JSON: Invalid control"),
        ('"level": "\\u001b[31m\\u202e"', r"level: '\x1b[31m\u202e' is of the wrong type"),
        ('"level": "' + "x" * 10**5 + '"', f"level: '{'x' * 59}... a whole number"),
    ],
)
def test_the_wrong_field_is_named(more: str, message: str) -> None:
    name = "" if more.startswith('"name"') else '"name": "x", '
    line = refused(lambda: parse_json(f"{{{name}{more}}}", Open, "F"), "F", message)
    assert len(line) < 300
    assert line.isprintable()


def test_all_wrong_fields_are_named() -> None:
    text = """{"kind": "c", "parts": [{"size": 13}, {"a": 1, "b": 2}], "rate": 1, "level": 0}"""
    refused(
        lambda: parse_json(text, Open, "F"),
        "F: name: ... kind: 'c' ... a, b; parts[0].size: 13 ... parts[1].size: ... parts[1].a: ... "
        "parts[1].b: ... size, colour, shape; level: 0 ... from 1 to 8",
    )
    with pytest.raises(UserError, match=r"^F: \[0\]: N.*; \[19\]: N[^;]*; and 80 more$"):
        conform([None] * 100, list[bool], "F")
    twice = partial(parse_json, '{"a": {"size": 1, "size": 2}}', Any, "F", repeats=False)
    refused(twice, "F: size: is there 2 times")
    refused(lambda: conform({}, Closed, ""), "size: is missing")


@pytest.mark.parametrize("value", [1e308, -1e31, 10**31, "1"])
def test_a_figure_can_be_computed_with(value: Any) -> None:
    assert conform([1, -2.5, 1e30], list[Figure], "F") == [1, -2.5, 1e30]
    refused(lambda: conform([value], list[Figure], "F"), "F: [0]:")


def test_a_file_that_is_not_read(tmp_path: Path) -> None:
    """A pipe and a device without waiting for their content."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * 101)
    (tmp_path / "binary").write_bytes(b"\xff")
    for path, message in (
        (tmp_path / "pipe", "is no regular file: give a file"),
        (Path("/dev/zero"), "is no regular file: give a file"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / "absent", "cannot be read: No such file"),
        (tmp_path / "large", "has 101 bytes, more than the 100 that may be read"),
        (tmp_path / "binary", "is not UTF-8 text"),
    ):
        refused(partial(read_text, path, max_bytes=100), f"{path} {message}")
        refused(partial(read_json, path, Open, "--flag x"), "--flag")
    (tmp_path / "x").write_bytes(b"a\r\nb")
    assert read_bytes(tmp_path / "x", max_bytes=4) == b"a\r\nb"
    assert read_text(tmp_path / "x") == "a\nb"


def test_sums_are_those_of_zlib_piece_by_piece() -> None:
    assert "isal" in checksum.crc32.__module__
    content = random.Random(0).randbytes(100_003)
    for cuts in ((), (1,), (7, 4096, 65_536)):
        total = 0
        for begin, end in zip((0, *cuts), (*cuts, len(content)), strict=True):
            total = checksum.crc32(memoryview(content)[begin:end], total)
        assert total == zlib.crc32(content)
    assert checksum.crc32(b"") == zlib.crc32(b"")


def test_without_isal_zlib_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "isal.isal_zlib", None)
        assert importlib.reload(checksum).crc32 is zlib.crc32
    assert importlib.reload(checksum).crc32 is not zlib.crc32
