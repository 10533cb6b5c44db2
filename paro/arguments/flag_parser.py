"""Flags on a command line: their words, values that no flag takes, and hints for unknown flags."""

from __future__ import annotations

import difflib
import math
import os
import re
import shlex
import tomllib
from argparse import Action, ArgumentError, ArgumentParser, BooleanOptionalAction
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from paro.errors import UserError
from paro.files.object_store import PACKAGES, is_url, path_of

# The metavars by which --help shows that a flag's value is a file or folder.
PATHS = ("FILE", "DIR", "PATH", "PREFIX", "SOURCE")
# The arguments that may be URLs of an object store.
TAKE_URLS = {
    *("data_path", "train_data_path", "valid_data_path", "test_data_path"),
    *("tokenizer_model", "vocab_file", "merge_file", "load", "base", "save"),
}
_MAX_PATH_BYTES, _MAX_NAME_BYTES = 4095, 255  # limits of Linux
_MOST = 2**63 - 1  # largest whole number, as torch and numpy need


class FlagParser(ArgumentParser):
    """An argument parser that refuses paths that are empty or too long for Linux, and `--flag=--`.

    An empty path is usually an unset shell variable. Also refused: numbers that are not finite, and
    whole numbers that do not fit 64 bits.
    """

    def _get_values(self, action: Action, arg_strings: list[str]) -> Any:
        if action.option_strings and arg_strings == ["--"]:
            raise ArgumentError(action, "expected a value, and -- is none")  # argparse removes it
        if action.metavar in PATHS or action.type in (Path, path_of):
            is_text = action.type is None
            takes_urls = action.type is path_of or (is_text and action.dest in TAKE_URLS)
            for path in arg_strings:
                if not path:
                    raise ArgumentError(action, "the path is empty")
                if "://" in path and not (takes_urls and is_url(path)):
                    raise ArgumentError(action, _refused_url(path, takes_urls))
                encoded = os.fsencode(path)
                longest_name = max(map(len, encoded.split(b"/")))
                if len(encoded) > _MAX_PATH_BYTES or longest_name > _MAX_NAME_BYTES:
                    raise ArgumentError(action, f"too long: {path}")
        return super()._get_values(action, arg_strings)

    def _get_value(self, action: Action, arg_string: str) -> Any:
        try:
            value = super()._get_value(action, arg_string)
        except ArgumentError as error:
            if isinstance(error.__context__, UserError):  # argparse leaves its text out
                raise ArgumentError(action, str(error.__context__)) from error
            raise
        if isinstance(value, float) and not math.isfinite(value):
            raise ArgumentError(action, f"{arg_string.strip()} is not a finite number")
        if isinstance(value, int) and abs(value) > _MOST:
            raise ArgumentError(action, f"{arg_string[:40]} must be at most {_MOST}")
        return value


def _refused_url(path: str, takes_urls: bool) -> str:
    scheme = path.partition("://")[0]
    known = ", ".join(f"{each}://" for each in PACKAGES)
    if scheme in PACKAGES:
        return f"it takes a local path, and no URL such as {path}"
    instead = f"; URLs of object stores are {known}" if takes_urls else ""
    return f"{path} is a URL of a kind that is not read{instead}"


AddFlag = Callable[..., Action]  # `add_argument` of a parser, or of a group of its flags


def flag_group(
    title: str, description: str | None = None
) -> Callable[[Callable[[AddFlag], None]], Callable[[ArgumentParser], None]]:
    """Make a function that adds flags one that adds them to a parser, as a group of --help."""

    def of_parser(add_flags: Callable[[AddFlag], None]) -> Callable[[ArgumentParser], None]:
        return lambda parser: add_flags(parser.add_argument_group(title, description).add_argument)

    return of_parser


def set_by(action: Action, option: str) -> object:
    """Return the value that an option without values gives its argument."""
    if isinstance(action, BooleanOptionalAction):
        return not option.startswith("--no-")
    return action.const


_FLAG = re.compile(r"--|-[a-zA-Z]+$")
_WIDTH = 80


def starts_flag(word: str) -> bool:
    """Return whether a command line word is a flag; a value such as -1 is not."""
    return _FLAG.match(word) is not None


def by_flag(words: Sequence[str]) -> list[list[str]]:
    """List each flag with the words after it; words before the first flag form their own group."""
    groups: list[list[str]] = []
    for word in words:
        if not groups or starts_flag(word):
            groups.append([])
        groups[-1].append(word)
    return groups


def wrapped(groups: Iterable[Sequence[str]]) -> list[str]:
    """Format words for a shell, quoted and indented, without a line break inside a flag's group."""
    lines: list[str] = []
    for part in map(shlex.join, groups):
        if lines and len(lines[-1]) + len(part) < _WIDTH:
            lines[-1] += f" {part}"
        else:
            lines.append(f"    {part}")
    return lines


_TABLE = Path(__file__).with_name("synonyms.toml").read_text(encoding="utf-8")
# Flag name in another framework or in tools/plan.py: the advice on what to use here.
SYNONYMS = {
    name: " ".join(meaning.split())
    for names, meaning in tomllib.loads(_TABLE)["names"]
    for name in names.split()
}


def hint_for(flag: str, parser: ArgumentParser) -> str:
    """Return a hint for an unknown flag; every flag that a hint suggests exists in the parser."""
    actions = parser._option_string_actions
    plain = flag.lstrip("-").lower().replace("_", "-").rpartition(".")[2]  # without optimizer.
    meaning = SYNONYMS.get(plain)
    if meaning is not None and f"--{plain}" not in actions:
        return f"give {meaning}" if meaning.startswith("--") else meaning
    close = difflib.get_close_matches(f"--{plain}", sorted(actions), n=1, cutoff=0.7)
    return f"did you mean {close[0]}?" if close else "--help lists all flags"


def known_as(
    flag: str, values: Sequence[str], parser: ArgumentParser, given: Collection[str]
) -> list[str]:
    """Return the flags that can replace an unknown flag, if its hint consists of flags alone.

    The last flag takes the values; flags before it are switches. None if the last flag is already
    among the `given`, which a guess must not change, or does not accept the values.
    """
    sentence = re.fullmatch(
        r"(?:give|did you mean) (--[\w-]+(?: and --[\w-]+)*)\??", hint_for(flag, parser)
    )
    *switches, name = sentence[1].split(" and ") if sentence else [""]
    actions = parser._option_string_actions
    if not name or actions[name].dest in given or any(actions[s].nargs != 0 for s in switches):
        return []
    try:
        parser.parse_known_args([name, *values])
    except ArgumentError:
        return []
    return [*switches, name]
