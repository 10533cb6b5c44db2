"""Flag parsing of tools: a mistake is one line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any, NoReturn

from paro.arguments.parser import build_parser
from paro.errors import UserError
from paro.text import one_line

_PATH_KINDS = (
    "FILE",
    "DIR",
    "PATH",
    "PREFIX",
    "SOURCE",
)  # metavars of flags whose values are texts
_EMPTY = "the path is empty"
_MAX_PATH_BYTES, _MAX_NAME_BYTES = 4095, 255  # bytes, of Linux


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, with the name of the program; takes whole flags only.

    A description of several lines is shown as it is.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        if "\n" in (kwargs.get("description") or ""):
            kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **kwargs)
        self.register("type", Path, _as_path)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As the base class; no path may be empty, or so long that even a look for it fails."""
        found, rest = super().parse_known_args(args, namespace)
        for action in self._actions:
            value = getattr(found, action.dest, None)
            for path in value if isinstance(value, list) else [value]:
                is_named = isinstance(path, str) and action.metavar in _PATH_KINDS
                flag = "/".join(action.option_strings) or action.dest
                if is_named and path == "":
                    self.error(f"argument {flag}: {_EMPTY}")
                if (is_named or isinstance(path, Path)) and _is_too_long(os.fsencode(str(path))):
                    self.error(f"argument {flag}: too long: {path}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        program = self.prog.split()[0]  # without the subcommand, where there is one
        self.exit(2, f"{program}: error: {one_line(message)}\n")


class RankParser(Parser):
    """Raises `UserError` for a mistake, so that only one of several ranks reports it."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def add_trainer_flags(
    group: argparse.ArgumentParser | argparse._ArgumentGroup, *same: str, **others: object
) -> None:
    """Adds flags of pretrain_llama.py by their names, the `others` with defaults of their own."""
    known = build_parser()._option_string_actions
    for name in (*same, *others):
        action = copy(known[f"--{name.replace('_', '-')}"])
        if name in others:
            action.default = others[name]
            action.help = f"as in pretrain_llama.py; default {action.default}"
        group._add_action(action)


def _as_path(text: str) -> Path:
    """The path of a flag's value; of no text it would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError(_EMPTY)
    return Path(text)


def _is_too_long(path: bytes) -> bool:
    return len(path) > _MAX_PATH_BYTES or max(map(len, path.split(b"/"))) > _MAX_NAME_BYTES
