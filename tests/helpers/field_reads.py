"""Records the functions that read a configuration's fields while product code runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from types import FrameType
from typing import Any, get_args, get_type_hints

import pytest

# For each field by its path (`train.seed`), its readers, such as `paro.training.step.train_step`.
Reads = dict[str, set[str]]


def config_types(
    root: type, leaves: tuple[type, ...], path: str = ""
) -> Iterator[tuple[type, str]]:
    """A dataclass and all dataclasses in its fields, each with the path prefix of its fields."""
    yield root, path
    for name, hint in get_type_hints(root).items():
        for inner in (hint, *get_args(hint)):
            if isinstance(inner, type) and is_dataclass(inner) and inner not in leaves:
                yield from config_types(inner, leaves, f"{path}{name}.")


@contextmanager
def field_reads(root: type, *, leaves: tuple[type, ...] = ()) -> Iterator[Reads]:
    """Records the readers of each field of `root` and its dataclasses; `leaves` stay whole."""
    reads: Reads = {}
    with pytest.MonkeyPatch.context() as patch:
        for owner, path in config_types(root, leaves):
            paths = {field.name: f"{path}{field.name}" for field in fields(owner)}
            reads |= {name: set() for name in paths.values()}
            patch.setattr(owner, "__getattribute__", _recording(owner, paths, reads))
        yield reads


def _recording(owner: type, paths: dict[str, str], reads: Reads) -> Callable[[object, str], Any]:
    def get(self: object, name: str) -> Any:
        if name in paths:
            reader = _reader(sys._getframe(1), owner, get)
            reads[paths[name]] |= {reader} - {""}
        return object.__getattribute__(self, name)

    return get


def _reader(frame: FrameType | None, owner: type, get: Any) -> str:
    """The first calling function that is not a method of the owner, since methods read for others.

    Empty for generated or generic reads (checks at construction, comparison, hash, repr), and for
    a method that only describes the values.
    """
    while frame is not None:
        code, module = frame.f_code, frame.f_globals["__name__"]
        is_own = module == owner.__module__ and code.co_qualname.startswith(
            owner.__qualname__ + "."
        )
        if code.co_filename == "<string>" or (is_own and code.co_name == "describe"):
            return ""  # dataclasses compile their methods from strings
        if not is_own and module != "functools" and code is not get.__code__:
            return f"{module}.{code.co_qualname.partition('.<locals>')[0]}"
        frame = frame.f_back
    return ""
