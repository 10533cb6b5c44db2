"""Checks untrusted JSON against types; a `UserError` says `FILE: field: what`, of every field."""

# Planning imports only the standard library, so this is our own; pydantic takes 0.2 s until its
# first check, this 0.06 s. A type is a dataclass (its fields and no others), a TypedDict (its
# fields, and others unchecked), an Enum, a Literal, a union, a list, tuple or dict of types, or
# `Annotated` with a range of whole numbers, or with the least and the largest number. A dataclass
# may refuse its fields, and may say in `mistakes` what is wrong with those that conform, also where
# others do not.

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from paro.errors import UserError, is_word, one_line, reading
from paro.files.object_cache import MAX_BYTES
from paro.files.regular_file import read_bytes

Count = Annotated[int, range(2**63)]  # 0 or more
Positive = Annotated[int, range(1, 2**63)]
Figure = Annotated[float, (-1e30, 1e30)]  # to compute with and to draw

_MAX_DEPTH = 64
_SHOWN = 60  # characters of a wrong value
_MOST = 20  # wrong fields that are named
_NESTS = (dict, list)
_Wrong = list[tuple[str, str]]  # mistakes: the path of a value, such as `.a[0]`, and a text
_NAMES: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
}


def read_json(path: Path, kind: Any, what: str = "", *, max_bytes: int = MAX_BYTES) -> Any:
    """Return the JSON in a regular file as a value of type `kind`."""
    what = what or str(path)
    return parse_json(read_bytes(path, what, max_bytes=max_bytes), kind, what)


def parse_json(text: str | bytes, kind: Any, what: str, *, repeats: bool = True) -> Any:
    """Parse JSON as a value of type `kind`; without `repeats` no field may be there twice."""
    if isinstance(text, bytes):
        with reading(what):
            text = text.decode("utf-8-sig")
    try:
        value = json.loads(text, object_pairs_hook=None if repeats else _without_repeats)
        _check_depth(value)
    except UserError as error:
        raise UserError(f"{what}: {error}") from None
    except RecursionError:
        raise UserError(f"{what} is nested too deeply") from None
    except ValueError as error:  # also a number of 5,000 digits
        raise UserError(f"{what} is not valid JSON: {str(error).split(';')[0]}") from None
    return conform(value, kind, what)


def conform(value: Any, kind: Any, what: str) -> Any:
    """Return the value as one of type `kind`; `UserError` names `what` and the wrong fields."""
    wrong: _Wrong = []
    conformed = _conform(value, kind, "", wrong)
    if not wrong:
        return conformed
    named = [(path.removeprefix("."), text) for path, text in wrong[:_MOST]]
    texts = [f"{path}: {text}" if path else text for path, text in named]
    if len(wrong) > _MOST:
        texts.append(f"and {len(wrong) - _MOST} more")
    raise UserError(": ".join(filter(None, (what, "; ".join(texts)))))


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; Python would keep the last of repeated fields."""
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise UserError(f"{name}: is there {count} times")
    return dict(pairs)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_MAX_DEPTH):
        members = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, _NESTS))
        level = [inner for outer in members for inner in outer if isinstance(inner, _NESTS)]
        if not level:
            return
    raise RecursionError


def _conform(value: Any, kind: Any, path: str, wrong: _Wrong) -> Any:
    """Return the value at `path` as one of type `kind`; add the mistakes in it to `wrong`."""
    origin = get_origin(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        return _of_union(value, get_args(kind), path, wrong)
    if is_dataclass(kind) or is_typeddict(kind):
        return _record(value, kind, path, wrong)
    if origin in (list, tuple, dict):
        return _collection(value, kind, path, wrong)
    if origin is Annotated:
        inner, allowed = get_args(kind)
        fault, kind = _fault(value, inner), inner
        low, high = allowed[0], allowed[-1]
        if not fault and not low <= value <= high:
            limits = f"{low} or more" if high == 2**63 - 1 else f"from {low} to {high}"
            fault = f"{_shown(value)} is not allowed, it must be {limits}"
    elif origin is Literal or (isinstance(kind, type) and issubclass(kind, Enum)):
        choices, fault = get_args(kind) or [choice.value for choice in kind], ""
        if not isinstance(value, (str, int)) or value not in choices:
            fault = f"{_shown(value)} is none of {', '.join(map(str, choices))}"
    else:
        fault = _fault(value, kind)
    if fault:
        wrong.append((path, fault))
        return value
    is_choice = origin is None and issubclass(kind, Enum)
    return kind(value) if kind is int or is_choice else value


def _fault(value: Any, kind: type) -> str:
    """Say why a value is not a plain one of type `kind`; empty if it is."""
    is_number = kind in (int, float) and type(value) in (int, float)  # in Python true is one too
    if type(value) is not kind and not is_number:
        return f"{_shown(value)} is of the wrong type, it must be {_NAMES[kind]}"
    if is_number and not abs(value) <= sys.float_info.max:  # infinite, NaN or too long
        return f"{_shown(value)} is not allowed, it must be a finite number"
    if kind is int and (value != int(value) or abs(value) >= 2**63):
        return f"{_shown(value)} is not allowed, it must be a whole number of 64 bits"
    if kind is str and not is_word(value):
        return f"{_shown(value)} holds a zero byte or half of a character"
    return ""


def _of_union(value: Any, kinds: tuple[Any, ...], path: str, wrong: _Wrong) -> Any:
    if value is None and NoneType in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not NoneType)
    tried: list[_Wrong] = []
    for kind in kinds:
        tried.append([])
        conformed = _conform(value, kind, path, tried[-1])
        if not tried[-1]:
            return conformed
    deepest = max(tried, key=lambda mistakes: len(mistakes[0][0]))
    if deepest[0][0] == path and len(kinds) > 1:
        names = " or ".join(_NAMES.get(get_origin(kind) or kind, "an object") for kind in kinds)
        deepest = [(path, f"{_shown(value)} is of the wrong type, it must be {names}")]
    wrong += deepest
    return value


def _collection(value: Any, kind: Any, path: str, wrong: _Wrong) -> Any:
    origin, kinds = get_origin(kind), get_args(kind)
    if fault := _fault(value, dict if origin is dict else list):
        wrong.append((path, fault))
        return value
    if origin is dict:
        for name in value if kinds[0] is int else ():
            if not (name.isascii() and name.isdigit() and len(name) < 19):
                wrong.append((f"{path}.{name}", "is no number"))
                return value
        return {
            kinds[0](name): _conform(item, kinds[1], f"{path}.{name}", wrong)
            for name, item in value.items()
        }
    if origin is not tuple or kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(value) != len(kinds):
        fault = f"{_shown(value)} is not allowed, it must have {len(kinds)} items"
        wrong.append((path, fault))
        return value
    return origin(
        _conform(item, kind, f"{path}[{index}]", wrong)
        for index, (item, kind) in enumerate(zip(value, kinds, strict=True))
    )


@cache
def _hints(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the types of a record's fields, and the fields that it must have."""
    hints = get_type_hints(kind, include_extras=True)
    if is_dataclass(kind):
        items = fields(kind)
        required = {f.name for f in items if f.default is MISSING and f.default_factory is MISSING}
        return {f.name: hints[f.name] for f in items if f.init}, frozenset(required)
    required = {name for name, hint in hints.items() if get_origin(hint) is not NotRequired}
    types = {n: hint if n in required else get_args(hint)[0] for n, hint in hints.items()}
    return types, frozenset(required) if kind.__total__ else frozenset()


def _record(value: Any, kind: Any, path: str, wrong: _Wrong) -> Any:
    types, required = _hints(kind)
    if not isinstance(value, dict):
        wrong.append((path, f"{_shown(value)} is no object with the fields {', '.join(types)}"))
        return value
    num_wrong = len(wrong)
    wrong += [(f"{path}.{name}", "is missing") for name in types if name in required - value.keys()]
    if not is_typeddict(kind):
        unknown = [name for name in value if name not in types]
        reason = f"is unknown; the fields are {', '.join(types)}"
        wrong += [(f"{path}.{n}", reason if n == unknown[-1] else "is unknown") for n in unknown]
    items = {}
    for name in filter(types.__contains__, value):
        mistakes: _Wrong = []
        item = _conform(value[name], types[name], f"{path}.{name}", mistakes)
        wrong += mistakes
        if not mistakes:
            items[name] = item
    mistaken: Iterable[str] = kind.mistakes(items) if hasattr(kind, "mistakes") else ()
    if not mistaken and num_wrong == len(wrong):
        if is_typeddict(kind):
            return {**value, **items}
        try:
            return kind(**items)
        except UserError as error:
            mistaken = error.args
    for text in mistaken:  # a field and what is wrong with it, or only a text
        name, _, reason = text.partition(": ")
        wrong.append((f"{path}.{name}", reason) if name in types else (path, text))
    return value


def _shown(value: Any) -> str:
    text = one_line(repr(value))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
