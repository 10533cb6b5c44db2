"""Checks untrusted JSON against types; a `UserError` says `FILE: field: what`, of every field."""

# Planning imports only the standard library, so this is our own; pydantic takes 0.2 s until its
# first check, this 0.06 s. A type is a dataclass (its fields and no others), a TypedDict (its
# fields, and others unchecked), an Enum, a Literal, a union, a list, tuple or dict of types, or
# `Annotated` with a range of whole numbers or `Between`. A dataclass may refuse its fields, and may
# say in `mistakes` what is wrong with those that conform, also where others do not.

from __future__ import annotations

import json
import sys
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
    NamedTuple,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from paro.errors import UserError, is_word, one_line, reading
from paro.untrusted.regular_file import MAX_BYTES, read_bytes


class Between(NamedTuple):
    """The numbers that a type allows, both ends included."""

    low: float
    high: float

    def __contains__(self, value: object) -> bool:
        return isinstance(value, (int, float)) and self.low <= value <= self.high


Count = Annotated[int, range(2**63)]  # 0 or more
Positive = Annotated[int, range(1, 2**63)]
Figure = Annotated[float, Between(-1e30, 1e30)]  # to compute with and to draw

_MAX_DEPTH = 64
_SHOWN = 60  # characters of a wrong value
_MOST = 20  # wrong fields that are named
_NESTS = (dict, list)
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
    except _WrongError as error:
        raise UserError(f"{what}: {error}") from None
    except RecursionError:
        raise UserError(f"{what} is nested too deeply") from None
    except ValueError as error:  # also a number of 5,000 digits
        raise UserError(f"{what} is not valid JSON: {str(error).split(';')[0]}") from None
    return conform(value, kind, what)


def conform(value: Any, kind: Any, what: str) -> Any:
    """Return the value as one of type `kind`; `UserError` names `what` and the wrong fields."""
    try:
        return _conform(value, kind)
    except _WrongError as error:
        raise UserError(": ".join(filter(None, (what, str(error))))) from None


class _WrongError(Exception):
    """Mistakes in a value and its members: pairs of a path, such as `.a[0]`, and a text."""

    def __init__(self, text: str, path: str = "") -> None:
        self.found = [(path, text)]

    def __str__(self) -> str:
        named = [(path.removeprefix("."), text) for path, text in self.found]
        shown = [f"{path}: {text}" if path else text for path, text in named[:_MOST]]
        more = len(named) - len(shown)
        return "; ".join([*shown, f"and {more} more"] if more else shown)


def _raise_all(wrong: list[tuple[str, str]]) -> None:
    if wrong:
        error = _WrongError("")
        error.found = wrong
        raise error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; Python would keep the last of repeated fields."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        name = next(name for name in names if names.count(name) > 1)
        raise _WrongError(f"is there {names.count(name)} times", name)
    return found


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_MAX_DEPTH):
        members = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, _NESTS))
        level = [inner for outer in members for inner in outer if isinstance(inner, _NESTS)]
        if not level:
            return
    raise RecursionError


def _conform(value: Any, kind: Any) -> Any:
    origin = get_origin(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        inner, allowed = get_args(kind)
        value = _conform(value, inner)
        if value not in allowed:
            low, high = allowed[0], allowed[-1]
            limits = f"{low} or more" if high == 2**63 - 1 else f"from {low} to {high}"
            raise _WrongError(f"{_shown(value)} is not allowed, it must be {limits}")
        return value
    if origin in (Union, UnionType):
        return _of_union(value, get_args(kind))
    if is_dataclass(kind) or is_typeddict(kind):
        return _record(value, kind)
    if origin in (list, tuple, dict):
        return _collection(value, origin, get_args(kind))
    if origin is Literal or (isinstance(kind, type) and issubclass(kind, Enum)):
        choices = get_args(kind) or [choice.value for choice in kind]
        if not isinstance(value, (str, int)) or value not in choices:
            raise _WrongError(f"{_shown(value)} is none of {', '.join(map(str, choices))}")
        return kind(value) if origin is None else value
    return _plain(value, kind)


def _plain(value: Any, kind: type) -> Any:
    is_number = kind in (int, float) and type(value) in (int, float)  # in Python true is one too
    if type(value) is not kind and not is_number:
        raise _WrongError(f"{_shown(value)} is of the wrong type, it must be {_NAMES[kind]}")
    if is_number and not abs(value) <= sys.float_info.max:  # infinite, NaN or too long
        raise _WrongError(f"{_shown(value)} is not allowed, it must be a finite number")
    if kind is int and (value != int(value) or abs(value) >= 2**63):
        raise _WrongError(f"{_shown(value)} is not allowed, it must be a whole number of 64 bits")
    if kind is str and "\0" in value:
        raise _WrongError("it holds a zero byte")
    if kind is str and not is_word(value):
        raise _WrongError(f"{_shown(value)} holds half of a character")
    return int(value) if kind is int else value


def _of_union(value: Any, kinds: tuple[Any, ...]) -> Any:
    if value is None and NoneType in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not NoneType)
    errors = []
    for kind in kinds:
        try:
            return _conform(value, kind)
        except _WrongError as error:
            errors.append(error)
    deepest = max(errors, key=lambda error: len(error.found[0][0]))
    if deepest.found[0][0] or len(kinds) == 1:
        raise deepest
    names = " or ".join(_NAMES.get(get_origin(kind) or kind, "an object") for kind in kinds)
    raise _WrongError(f"{_shown(value)} is of the wrong type, it must be {names}")


def _collection(value: Any, origin: type, kinds: tuple[Any, ...]) -> Any:
    _plain(value, dict if origin is dict else list)
    if origin is dict:
        if kinds[0] is int:
            for name in value:
                if not (name.isascii() and name.isdigit() and len(name) < 19):
                    raise _WrongError("is no number", f".{name}")
        members = _members((f".{name}", item, kinds[1]) for name, item in value.items())
        return dict(zip(map(kinds[0], value), members, strict=True))
    if origin is tuple and kinds[-1] is not Ellipsis:
        if len(value) != len(kinds):
            raise _WrongError(f"{_shown(value)} is not allowed, it must have {len(kinds)} items")
    else:
        kinds = (kinds[0],) * len(value)
    places = enumerate(zip(value, kinds, strict=True))
    return origin(_members((f"[{index}]", item, kind) for index, (item, kind) in places))


def _members(members: Iterable[tuple[str, Any, Any]]) -> list[Any]:
    """Return the values of members (path, value, type)."""
    found, wrong = _conforming(members)
    _raise_all(wrong)
    return [*found.values()]


def _conforming(
    members: Iterable[tuple[str, Any, Any]],
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return the values of the members that conform, by path, and what is wrong with the others."""
    found, wrong = {}, []
    for name, value, kind in members:
        try:
            found[name] = _conform(value, kind)
        except _WrongError as error:
            wrong += [(f"{name}{path}", text) for path, text in error.found]
    return found, wrong


@cache
def _hints(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the types of a record's fields, and the fields that it must have."""
    hints = get_type_hints(kind, include_extras=True)
    if is_dataclass(kind):
        own = fields(kind)
        needed = {f.name for f in own if f.default is MISSING and f.default_factory is MISSING}
        return {f.name: hints[f.name] for f in own if f.init}, frozenset(needed)
    needed = {name for name, hint in hints.items() if get_origin(hint) is not NotRequired}
    types = {n: hint if n in needed else get_args(hint)[0] for n, hint in hints.items()}
    return types, frozenset(needed) if kind.__total__ else frozenset()


def _record(value: Any, kind: Any) -> Any:
    types, needed = _hints(kind)
    if not isinstance(value, dict):
        raise _WrongError(f"{_shown(value)} is no object with the fields {', '.join(types)}")
    wrong = [(f".{name}", "is missing") for name in types if name in needed and name not in value]
    if not is_typeddict(kind):
        unknown = [name for name in value if name not in types]
        known = f"is unknown; the fields are {', '.join(types)}"
        wrong += [(f".{n}", known if n == unknown[-1] else "is unknown") for n in unknown]
    members = ((f".{name}", item, types[name]) for name, item in value.items() if name in types)
    conforming, more = _conforming(members)
    found = {path[1:]: item for path, item in conforming.items()}
    own = getattr(kind, "mistakes", None)
    _raise_all([*wrong, *more, *_of_fields(own(found) if own else (), types)])
    if is_typeddict(kind):
        return {**value, **found}
    try:
        return kind(**found)
    except UserError as error:
        _raise_all(_of_fields(error.args, types))


def _of_fields(texts: Iterable[str], types: dict[str, Any]) -> list[tuple[str, str]]:
    """Split the texts of a record's own checks into the path of a field and the rest."""
    parts = [text.partition(": ") for text in texts]
    return [
        (f".{name}", rest) if name in types else ("", f"{name}{colon}{rest}")
        for name, colon, rest in parts
    ]


def _shown(value: Any) -> str:
    text = one_line(repr(value))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
