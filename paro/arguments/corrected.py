"""The command line that is left of one with refused flags, with what replaces them."""

from __future__ import annotations

import shlex
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence

from paro.arguments.megatron import changed_parts, replacements
from paro.arguments.needed import details_without_full
from paro.arguments.unknown import known_as
from paro.arguments.words import by_flag
from paro.arguments.yaml_flags import FLAG as YAML_FLAG

# What a flag that is added takes the place of.
_REPLACES = {
    "--paro-strategy": ("--use-distributed-optimizer",),
    "--recompute-granularity": ("--recompute-activations", "--recompute-modules"),
}
_WIDTH = 80


def corrected(
    words: Sequence[str], args: Namespace, parser: ArgumentParser, better: Mapping[str, object]
) -> str:
    """The flags to give instead of `words`, ready to paste; empty if all of them may stay.

    Flags that are refused, unknown or without effect are left out or replaced, and the arguments
    in `better`, by their names, have other values.
    """
    groups = list(_corrected(words, args, parser, better))
    left = [word for group in groups for word in group]
    if left == list(words):
        return ""
    lines = ["These flags are left; paste them after pretrain_llama.py:"]
    for part in map(shlex.join, groups):
        if len(lines) > 1 and len(lines[-1]) + len(part) < _WIDTH:
            lines[-1] += f" {part}"
        else:
            lines.append(f"    {part}")
    head, *flags = lines
    return "\n".join([*changed_parts(args), head, " \\\n".join(flags)])


def _corrected(
    words: Sequence[str], args: Namespace, parser: ArgumentParser, better: Mapping[str, object]
) -> Iterator[list[str]]:
    actions = parser._option_string_actions
    dropped = {detail.split()[0] for detail in details_without_full(args)}
    instead = replacements(args)
    kept: dict[str, list[str]] = {}
    added: list[list[list[str]]] = []
    for flag, *values in by_flag(words):
        name, equals, value = flag.partition("=")
        values = [value, *values] if equals else values
        if name in instead:
            added.append(list(by_flag(instead[name])))
            continue
        name = name if name in actions else known_as(name, parser)
        if name in dropped or name not in actions or name == YAML_FLAG:  # its flags are in words
            continue
        action = actions[name]
        has_no_value = action.dest not in args  # the one that was given is wrong
        if has_no_value or (action.dest in better and better[action.dest] is None):
            continue
        elif action.dest in better:
            kept[name] = [name, *_words(better[action.dest])]
        else:
            kept[name] = [name, *values[: _most_values(action)]]
    for groups in added:
        if groups and groups[0][0] not in kept:
            kept |= {group[0]: group for group in groups}
            for other in _REPLACES.get(groups[0][0], ()):
                kept.pop(other, None)
    yield from kept.values()


def _most_values(action: Action) -> int | None:
    """How many values a flag takes; None: any number."""
    return action.nargs if isinstance(action.nargs, int) else 1 if action.nargs is None else None


def _words(value: object) -> list[str]:
    return list(map(str, value)) if isinstance(value, list) else [str(value)]
