"""The command line that is left of one with refused flags, with what replaces them."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Mapping, Sequence

from paro.arguments.megatron import replacements
from paro.arguments.unknown import known_as
from paro.arguments.words import by_flag, wrapped
from paro.arguments.yaml_flags import FLAG as YAML_FLAG
from paro.errors import one_line
from paro.text import listed

_LONGEST = 1000  # characters of a value that may be offered: a line is to be readable
_FRUGAL = [["--paro-strategy", "GGG"]]
# What a flag that is added takes the place of.
_REPLACES = {
    "--paro-strategy": ("--use-distributed-optimizer",),
    "--recompute-granularity": ("--recompute-activations", "--recompute-modules"),
}


def corrected(
    words: Sequence[str],
    args: Namespace,
    parser: ArgumentParser,
    *,
    better: Mapping[str, object],
    refused: Collection[str],
) -> str:
    """Return the flags to give instead of `words`, ready to paste; empty if only values are to
    change.

    Flags that are refused, unknown or without effect are left out or replaced; a guess for an
    unknown one never replaces a flag that is given. The arguments in `better`, by their names, have
    other values: they are left out if these are their defaults, and added if they are not given.
    The flags in `refused` have values that the parser did not take.
    """
    actions = parser._option_string_actions
    instead = replacements(args)
    heads = (flag.partition("=")[0] for flag, *_ in by_flag(words))
    given = {actions[name].dest for name in heads if name in actions}
    kept: dict[str, list[str]] = {}
    added: list[list[list[str]]] = []
    left_out: list[str] = []
    is_foreign = False  # whether a flag is not one of this program
    for flag, *values in by_flag(words):
        name, equals, value = flag.partition("=")
        values = [value, *values] if equals else values
        is_foreign |= name in instead or name not in actions
        if name in instead:
            added.append(list(by_flag(instead[name])))
            continue
        names = [name] if name in actions else known_as(name, values, parser, given)
        if not names or name == YAML_FLAG:  # its flags are in words
            continue
        *switches, name = names
        action = actions[name]
        other = better.get(action.dest, ...)
        any_number = isinstance(action.nargs, str)  # of values, which the flag takes
        most = None if any_number else 1 if action.nargs is None else int(action.nargs)
        is_long = max(map(len, values), default=0) > _LONGEST
        if name in refused or is_long or other == action.default:
            left_out.append(shlex.join([name, *values]))
            continue
        kept |= {switch: [switch] for switch in switches}
        if other is not ...:
            values = list(map(str, other)) if isinstance(other, list) else [str(other)]
        kept[name] = [name, *values[:most]]
    notes = [one_line(f"Left out for their values: {listed(left_out)}")] if left_out else []
    notes += _replace(kept, added)
    for action in parser._actions:
        new = better.get(action.dest)
        if action.dest not in given and new not in (None, action.default):
            kept.setdefault(action.option_strings[0], [action.option_strings[0], str(new)])
    groups = list(kept.values())
    if not is_foreign:
        return ""
    head = "These flags are left; paste them after pretrain_llama.py:"
    return "\n".join([*notes, head, " \\\n".join(wrapped(groups))])


def _replace(kept: dict[str, list[str]], added: Sequence[list[list[str]]]) -> list[str]:
    """Add flags in place of others, unless they are given; return notes about them."""
    notes = []
    for groups in added:
        if not groups or groups[0][0] in kept:
            continue
        kept |= {group[0]: group for group in groups}
        if groups == _FRUGAL:
            notes.append(
                f"{' '.join(_FRUGAL[0])} needs the least memory of all and sends the most: "
                "tools/plan.py finds the fastest strategy that fits"
            )
        for other in _REPLACES.get(groups[0][0], ()):
            kept.pop(other, None)
    return notes
