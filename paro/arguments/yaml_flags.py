"""Turns a YAML file of flags into command line words, so that one parser checks both."""

from __future__ import annotations

from argparse import Action, ArgumentError, ArgumentParser
from collections import Counter

import yaml

from paro.arguments.flag_parser import hint_for, set_by, starts_flag
from paro.arguments.megatron import rule_of
from paro.errors import UserError, is_word
from paro.files.regular_file import read_text

FLAG = "--yaml-cfg"
MOST_BYTES = 2**16  # largest file; parsing takes a second. Long blends have --data-args-path
MOST_DEPTH = 8  # deepest nesting that is parsed; flags need 2 levels, and errors can show 8


def read_flags(path: str, parser: ArgumentParser) -> tuple[list[str], list[str]]:
    """Return the flags in the file as command line words, and one line per wrong key.

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


def _read_mapping(path: str, most_keys: int) -> list[tuple[str, yaml.Node]]:
    """Read the keys, spelled like flags, and their values as texts with a type.

    Values stay text: the flag's own argparse type converts them, as on a command line.
    """
    text = read_text(path, f"{FLAG} {path}", max_bytes=MOST_BYTES)
    try:
        _refuse_what_no_flag_is(text, path)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{FLAG} {path} is no YAML: {error}") from error
    if root is None or (isinstance(root, yaml.ScalarNode) and _kind(root) == "null"):
        return []
    if not isinstance(root, yaml.MappingNode) or not all(
        isinstance(key, yaml.ScalarNode) for key, _ in root.value
    ):
        raise UserError(f"{FLAG} {path} must hold one level of `flag: value`")
    # YAML would silently use the last of two equal keys.
    counts = Counter(_spell(key.value) for key, _ in root.value)
    for key, count in counts.items():
        if count > 1:
            raise UserError(f"{FLAG} {path}: {key} is given more than once")
    if len(counts) > most_keys:
        raise UserError(f"{FLAG} {path} has {len(counts)} keys, and there are {most_keys} flags")
    return [(_spell(key.value), value) for key, value in root.value]


def _refuse_what_no_flag_is(text: str, path: str) -> None:
    """Raise `UserError` for aliases, which may expand endlessly, tags and deep nesting.

    Also refused: text that cannot be a command line word.
    """
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        assert event.start_mark is not None, "it was read from a text"
        where = f"{FLAG} {path}: line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise UserError(f"{where}: anchors and aliases are not for flags")
        if (tag := getattr(event, "tag", None)) is not None:
            raise UserError(
                f"{where}: {tag} is a tag, which is not for flags: give the plain value"
            )
        if isinstance(event, yaml.ScalarEvent) and not is_word(event.value):
            raise UserError(f"{where}: a value has a character that no word of a shell can have")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_DEPTH:
            raise UserError(f"{where}: is nested too deeply for flags")


def _kind(node: yaml.Node) -> str:
    """Return the type that a value looks like, such as "bool" or "null"."""
    return str(node.tag).removeprefix("tag:yaml.org,2002:")


def _words(flag: str, action: Action | None, value: yaml.Node) -> list[str]:
    """Return the command line words of a flag; an unknown flag (no action) takes any value."""
    kind = _kind(value)
    if kind == "null":
        return []
    if kind == "bool" if action is None else action.nargs == 0:
        if kind != "bool":
            raise UserError(f"a switch is true or false, not {_shown(value)}")
        if yaml.SafeLoader.bool_values[value.value.lower()]:
            return [flag]
        if action is None:
            return []
        on, options = set_by(action, flag), action.option_strings
        return [option for option in options if set_by(action, option) != on][:1]
    values = value.value if isinstance(value, yaml.SequenceNode) else [value]
    if any(
        not isinstance(item, yaml.ScalarNode) or _kind(item) in ("bool", "null") for item in values
    ):
        raise UserError(f"needs a plain value, not {_shown(value)}")
    if action is not None and action.nargs is None:
        if isinstance(value, yaml.SequenceNode):
            raise UserError(f"takes one value, not {_shown(value)}")
        return [f"{flag}={value.value}"]
    words = [item.value for item in values]
    if any(map(starts_flag, words)):
        raise UserError(f"needs values, of which none is a flag itself, not {_shown(value)}")
    return [flag, *words]


def _shown(value: yaml.Node) -> str:
    """Format a value as the YAML file spells it."""
    begin, end = value.start_mark, value.end_mark
    assert begin is not None, "it was read from a text"
    assert end is not None
    return (begin.buffer or "")[begin.pointer : end.pointer].rstrip()
