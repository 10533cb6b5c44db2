"""The waits of the product: finds each by its syntax, and removes one from running code.

Also changes any other text of running code.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = (
    *("collectives", "context_parallel", "distributed"),
    *("optim", "rotation", "sharding", "training"),
)
_NAMES = ("wait", "_await", "synchronize")
_BEGINNINGS = ("wait_", "synchronize_")


@dataclass(frozen=True, slots=True)
class Wait:
    """A call that waits, or an `after=` of a call; `text` is its source, numbered if repeated."""

    module: str
    function: str  # qualified within the module; nested functions belong to the outermost
    text: str

    @property
    def name(self) -> str:
        return f"{self.module.removeprefix('paro.')} {self.function}: {self.text}"

    @contextmanager
    def removed(self) -> Iterator[None]:
        """The function runs without it: a call becomes True, `after` becomes empty."""
        tree = ast.parse(_path(self.module).read_text(encoding="utf-8"))
        (node,) = [node for wait, node in _waits_in(self.module, tree) if wait == self]
        _empty(tree, node)
        with _running(self.module, self.function, ast.fix_missing_locations(tree)):
            yield


@contextmanager
def changed(module: str, function: str, old: str, new: str) -> Iterator[None]:
    """The function, qualified within its module, runs with a text of its source replaced."""
    source = _path(module).read_text(encoding="utf-8")
    (node,) = [body for name, body in _functions(ast.parse(source)) if name == function]
    own = ast.get_source_segment(source, node, padded=True)
    assert own is not None, f"{function} has no source"
    assert own.count(old) == 1, f"{module} {function}: found {own.count(old)} times: {old}"
    tree = ast.parse(source.replace(own, own.replace(old, new)))
    with _running(module, function, tree):
        yield


@contextmanager
def _running(module: str, function: str, tree: ast.Module) -> Iterator[None]:
    """The function runs as this tree of its module has it."""
    code = compile(tree, str(_path(module)), "exec")
    owner: Any = importlib.import_module(module)
    for part in function.split("."):
        owner = inspect.getattr_static(owner, part)
    own = inspect.unwrap(owner)
    assert isinstance(own, FunctionType), f"{module} {function} is no function"
    before = own.__code__
    own.__code__ = _code_of(code, function)
    try:
        yield
    finally:
        own.__code__ = before


def all_waits() -> list[Wait]:
    """Every wait of the packages that communicate or wait for those that do."""
    found = []
    for path in sorted(path for name in _FOLDERS for path in (ROOT / "paro" / name).rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found += [wait for wait, _ in _waits_in(module, ast.parse(path.read_text("utf-8")))]
    return found


def _path(module: str) -> Path:
    return ROOT / Path(*module.split(".")).with_suffix(".py")


def _waits_in(module: str, tree: ast.Module) -> Iterator[tuple[Wait, ast.AST]]:
    for function, body in _functions(tree):
        repeated: Counter[str] = Counter()
        for node in sorted(filter(_is_wait, ast.walk(body)), key=_place):
            text = ast.unparse(node)
            repeated[text] += 1
            number = f" #{repeated[text]}" if repeated[text] > 1 else ""
            yield Wait(module, function, text + number), node


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    yield f"{node.name}.{method.name}", method


def _place(node: ast.AST) -> tuple[int, int]:
    assert isinstance(node, ast.expr | ast.keyword)
    return node.lineno, node.col_offset


def _is_wait(node: ast.AST) -> bool:
    if isinstance(node, ast.keyword):
        return node.arg == "after" and not isinstance(node.value, ast.Constant)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    name = node.func.attr
    return name in _NAMES or name.startswith(_BEGINNINGS)


def _empty(tree: ast.Module, node: ast.AST) -> None:
    if isinstance(node, ast.keyword):
        node.value = ast.Constant(None)
        return
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if value is node:
                setattr(parent, field, ast.Constant(True))
            elif isinstance(value, list) and node in value:
                value[value.index(node)] = ast.Constant(True)


def _code_of(code: CodeType, function: str) -> CodeType:
    todo = [code]
    while todo:
        one = todo.pop()
        if one.co_qualname == function:
            return one
        todo += [const for const in one.co_consts if isinstance(const, CodeType)]
    raise AssertionError(f"{function} was not compiled")
