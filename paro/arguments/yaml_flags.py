"""Turns a YAML file of flags into command line words, so that one parser checks both."""

from __future__ import annotations

from argparse import Action, ArgumentError, ArgumentParser
from collections import Counter
from collections.abc import Iterable

import yaml

from paro.arguments.megatron import rule_of
from paro.arguments.unknown import hint_for
from paro.errors import UserError
from paro.untrusted.regular_file import read_text

FLAG = "--yaml-cfg"
MOST_BYTES = 2**16  # a second of reading; long blends have --data-args-path
MOST_DEPTH = 8  # flags need 2, and a value that is too deep is shown in its own line


def read_flags(path: str, parser: ArgumentParser) -> tuple[list[str], list[str]]:
    """The flags in the file as command line words, and one line per wrong key.

    `UserError` if the file cannot be read.

    Keys are flags with dashes or underscores. `true` sets a switch, `false` and `null` leave a
    flag out, and a list gives a flag several values.
    """
    actions = {
        _spell(option): action for action in parser._actions for option in action.option_strings
    }
    words: list[str] = []
    mistakes: list[str] = []
    for key, value in _read_mapping(path, most_keys=len(actions)):
        action = actions.get(key)
        if (action is None and rule_of(f"--{key}") is None) or key in ("h", "help", _spell(FLAG)):
            mistakes.append(f"{FLAG} {path}: --{key} is unknown: {hint_for(key, parser)}")
            continue
        try:
            flag_words = _words(f"--{key}", action, value)
            if action is not None:
                parser.parse_args(flag_words)
        except (UserError, ArgumentError) as error:
            mistakes.append(f"{FLAG} {path}: --{key}: {error}")
        else:
            words += flag_words
    return words, mistakes


def _spell(option: object) -> str:
    return str(option).lstrip("-").replace("_", "-")


def _read_mapping(path: str, most_keys: int) -> Iterable[tuple[str, object]]:
    text = read_text(path, f"{FLAG} {path}", max_bytes=MOST_BYTES)
    try:
        _refuse_what_grows(text, path)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except UserError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date of month 13
        raise UserError(f"{FLAG} {path} is no YAML: {error}") from error
    if values is None:
        return []
    if not isinstance(values, dict):
        raise UserError(f"{FLAG} {path} must hold one level of `flag: value`")
    assert isinstance(root, yaml.MappingNode), f"{values!r} came from {root}"
    # YAML would silently use the last of two equal keys.
    counts = Counter(_spell(key.value) for key, _ in root.value)
    for key, count in counts.items():
        if count > 1:
            raise UserError(f"{FLAG} {path}: {key} is given more than once")
    if len(counts) > most_keys:
        raise UserError(f"{FLAG} {path} has {len(counts)} keys, and there are {most_keys} flags")
    return [(_spell(key), value) for key, value in values.items()]


def _refuse_what_grows(text: str, path: str) -> None:
    """`UserError` for an alias, which a few bytes can repeat billions of times, or deep nesting."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            where = f"{FLAG} {path}: line {_line(event)}"
            raise UserError(f"{where}: anchors and aliases are not for flags")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_DEPTH:
            raise UserError(f"{FLAG} {path}: line {_line(event)}: is nested too deeply for flags")


def _line(event: yaml.Event) -> int:
    assert event.start_mark is not None, "it was read from a text"
    return event.start_mark.line + 1


def _words(flag: str, action: Action | None, value: object) -> list[str]:
    """The words for a flag; without an action it takes anything: it is ignored or refused."""
    if value is None:
        return []
    if isinstance(value, bool) if action is None else action.nargs == 0:
        if not isinstance(value, bool):
            raise UserError(f"a switch is true or false, not {value!r}")
        return [flag] if value else []
    values = value if isinstance(value, list) else [value]
    if any(isinstance(item, bool | dict | list) or item is None for item in values):
        raise UserError(f"needs a plain value, not {value!r}")
    if action is not None and action.nargs is None:
        if isinstance(value, list):
            raise UserError(f"takes one value, not {value!r}")
        return [f"{flag}={value}"]
    return [flag, *(str(item) for item in values)]
