"""Suggestions for an unknown flag: a name in another program, or a typing error."""

from __future__ import annotations

import difflib
import re
import tomllib
from argparse import ArgumentError, ArgumentParser
from collections.abc import Collection, Sequence
from pathlib import Path

_TABLE = Path(__file__).with_name("synonyms.toml").read_text(encoding="utf-8")
# By the name in another framework or in tools/plan.py: what to use here.
SYNONYMS = {
    name: " ".join(meaning.split())
    for names, meaning in tomllib.loads(_TABLE)["names"]
    for name in names.split()
}


def hint_for(flag: str, parser: ArgumentParser) -> str:
    """Return one hint; it never suggests a flag that the parser does not have."""
    known = parser._option_string_actions
    plain = flag.lstrip("-").lower().replace("_", "-").rpartition(".")[2]  # as in optimizer.lr
    meaning = SYNONYMS.get(plain)
    if meaning is not None and f"--{plain}" not in known:
        return f"give {meaning}" if meaning.startswith("--") else meaning
    close = difflib.get_close_matches(f"--{plain}", sorted(known), n=1, cutoff=0.7)
    return f"did you mean {close[0]}?" if close else "--help lists all flags"


def known_as(
    flag: str, values: Sequence[str], parser: ArgumentParser, given: Collection[str]
) -> list[str]:
    """Return the flags that the hint for an unknown one names, if they are all that the hint says.

    The last takes the values; those before it are switches. None where its argument is among the
    `given`, which a guess must not change, or does not take these values.
    """
    found = re.fullmatch(
        r"(?:give|did you mean) (--[\w-]+(?: and --[\w-]+)*)\??", hint_for(flag, parser)
    )
    *switches, name = found[1].split(" and ") if found else [""]
    known = parser._option_string_actions
    if not name or known[name].dest in given or any(known[each].nargs != 0 for each in switches):
        return []
    try:
        parser.parse_known_args([name, *values])
    except ArgumentError:
        return []
    return [*switches, name]
