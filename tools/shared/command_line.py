"""Flag parsing of tools: a mistake is one line."""

from __future__ import annotations

import argparse
from copy import copy
from typing import Any, NoReturn

from paro.arguments.flag_parser import FlagParser
from paro.arguments.parser import build_parser
from paro.errors import UserError, flag_of, one_line


class Parser(FlagParser):
    """A parser of whole flags that reports a mistake in one line, with the program's name.

    A description of several lines is shown as it is.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        if "\n" in (kwargs.get("description") or ""):
            kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        program = self.prog.split()[0]  # without the subcommand, where there is one
        self.exit(2, f"{program}: error: {one_line(message)}\n")


class RankParser(Parser):
    """A parser that raises `UserError`, so that only one of several ranks reports a mistake."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def add_trainer_flags(
    group: argparse.ArgumentParser | argparse._ArgumentGroup, *same: str, **others: object
) -> None:
    """Add flags of pretrain_llama.py by their names, the `others` with defaults of their own."""
    known = build_parser()._option_string_actions
    for name in (*same, *others):
        action = copy(known[flag_of(name)])
        if name in others:
            action.default = others[name]
            action.help = f"as in pretrain_llama.py; default {action.default}"
        group._add_action(action)
