"""A mistake is one line under the program's name, for any message and command."""

from __future__ import annotations

from pathlib import Path

import pytest

from paro.arguments.parser import build_parser
from paro.errors import UserError
from tests.helpers.refusals import refused
from tools.shared.command_line import Parser, RankParser, add_trainer_flags


def test_a_mistake_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="tool.py")
    command = parser.add_subparsers().add_parser("measure")
    command.add_argument("--rounds", type=int)
    with pytest.raises(SystemExit):
        parser.error("two\n  lines")
    assert capsys.readouterr().err == "tool.py: error: two lines\n"
    refused(lambda: parser.parse_args(["measure", "--rounds", "many"]), "argument --rounds")
    refused(lambda: parser.parse_args(["measure", "--\x1b[2J"]), "\\x1b[2J")


def test_flags_are_whole_and_a_description_keeps_its_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = Parser(prog="tool.py", description="What it does.\n\n  tool.py   --rounds 3")
    parser.add_argument("--rounds", type=int)
    assert "\n  tool.py   --rounds 3\n" in parser.format_help()
    with pytest.raises(SystemExit):
        parser.parse_args(["--round", "3"])
    assert "--round" in capsys.readouterr().err


def test_a_rank_raises_a_mistake() -> None:
    with pytest.raises(UserError, match="--round"):
        RankParser().parse_args(["--round", "3"])


@pytest.fixture
def parser() -> Parser:
    """One that takes paths in every way."""
    parser = Parser(prog="tool.py")
    parser.add_argument("--file", type=Path, default=Path())
    parser.add_argument("--text", metavar="PREFIX")
    parser.add_argument("--several", nargs="+", type=Path)
    parser.add_argument("--input", nargs="+", metavar="SOURCE")
    return parser


@pytest.mark.parametrize("path", [f"a/{'x' * 256}", "a/" * 2100, f"{'ä' * 128}/b"])
@pytest.mark.parametrize("flag", ["--file", "--text", "--several"])
def test_a_path_beyond_the_systems_limits_is_refused(parser: Parser, flag: str, path: str) -> None:
    parser.parse_args([flag, f"a/{'x' * 255}"])
    refused(lambda: parser.parse_args([flag, path]), f"{flag}: too long")


@pytest.mark.parametrize(
    "words", [["--file", ""], ["--text="], ["--several", "a", ""], ["--input", "a", ""]], ids=str
)
def test_an_empty_path_is_refused(parser: Parser, words: list[str]) -> None:
    assert parser.parse_args(["--file", "."]).file == Path()
    refused(lambda: parser.parse_args(words), f"{words[0].removesuffix('=')}: the path is empty")


def test_flags_of_the_trainer_are_as_they_are_there_but_for_own_defaults() -> None:
    parser = Parser(prog="tool.py")
    add_trainer_flags(parser, "llama_preset", seq_length=128)
    given = parser.parse_args(["--llama-preset", "LLAMA3-8b"])
    assert (given.llama_preset, given.seq_length) == ("llama3-8B", 128)
    assert "as in pretrain_llama.py; default 128" in parser.format_help()
    assert build_parser().get_default("seq_length") is None, "a copy has the default"
