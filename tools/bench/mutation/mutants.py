"""Finds places in a file where one operator, constant or call can be changed, and changes them."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In},
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult},
    **{ast.Div: ast.Mult, ast.Mod: ast.FloorDiv},
}
_BOOLEAN: dict[type[ast.boolop], type[ast.boolop]] = {ast.And: ast.Or, ast.Or: ast.And}
KINDS = ("arithmetic", "boolean", "call", "comparison", "constant", "swap", "wait")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A change to one expression of the product, found again by its content in a moved file.

    The change is to the `nth` occurrence, from 0, of `old` in the source of a function.
    """

    kind: str
    path: str  # where it was found
    function: str  # with its class, if any
    nth: int
    old: str
    new: str
    line: str  # the first line of the changed code, for readers


def mutants_of(path: str, text: str) -> Iterator[Mutant]:
    """Yield every mutant of a file's functions; annotations, texts and kernels have none."""
    tree = ast.parse(text)
    for name, function in functions_of(tree):
        source = ast.get_source_segment(text, function)
        if source is None or any("jit" in ast.unparse(each) for each in function.decorator_list):
            continue
        for kind, node, new in _changes(function):
            old = ast.get_source_segment(text, node)
            if old is None or old == new:
                continue
            start = _offset(text, node) - _offset(text, function)
            yield Mutant(
                kind=kind,
                path=path,
                function=name,
                nth=sum(source.startswith(old, at) for at in range(start)),
                old=old,
                new=new,
                line=text.splitlines()[node.lineno - 1].strip(),
            )


def apply(mutant: Mutant, text: str, *, new: str | None = None) -> str | None:
    """Change the text, by `new` if that is given; None if it has no such code."""
    for name, function in functions_of(ast.parse(text)):
        source = ast.get_source_segment(text, function)
        if name != mutant.function or source is None:
            continue
        at = -1
        for _ in range(mutant.nth + 1):
            at = source.find(mutant.old, at + 1)
            if at < 0:
                return None
        at += len(text[: _offset(text, function)])
        changed = text[:at] + (mutant.new if new is None else new) + text[at + len(mutant.old) :]
        ast.parse(changed)
        return changed
    return None


def functions_of(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, Function]]:
    """Yield functions and methods with their names; inner functions belong to theirs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield f"{outer}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from functions_of(node, f"{outer}{node.name}.")
        elif isinstance(node, ast.If | ast.Try):
            yield from functions_of(node, outer)


def _offset(text: str, node: ast.stmt | ast.expr) -> int:
    """Return the index in the text at which a node begins; columns are of UTF-8."""
    lines = text.splitlines(keepends=True)
    line = lines[node.lineno - 1].encode()
    return sum(map(len, lines[: node.lineno - 1])) + len(line[: node.col_offset].decode())


def _changes(function: Function) -> Iterator[tuple[str, ast.expr, str]]:
    """Yield the kind, the expression and its new text of every change to a function's body."""
    to_visit: list[ast.AST] = list(function.body)
    while to_visit:
        node = to_visit.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield "wait" if _is_wait(node.value) else "call", node.value, "None"
        if isinstance(node, ast.expr):
            yield from _changed(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "args_defaults", "pattern"):
                continue
            values = value if isinstance(value, list) else [value]
            to_visit += [each for each in values if _is_code(each)]


def _is_code(node: object) -> bool:
    return isinstance(node, ast.AST) and not isinstance(
        node, ast.JoinedStr | ast.Raise | ast.arguments
    )


def _is_wait(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    return "wait" in name or name in ("synchronize", "join", "barrier")


def _changed(node: ast.expr) -> Iterator[tuple[str, ast.expr, str]]:
    changed = copy.deepcopy(node)
    match changed:
        case ast.Compare(ops=[op]) if type(op) in _COMPARISONS:
            changed.ops = [_COMPARISONS[type(op)]()]
            yield "comparison", node, ast.unparse(changed)
        case ast.BinOp(op=operator) if type(operator) in _ARITHMETIC and not _is_text(changed):
            changed.op = _ARITHMETIC[type(operator)]()
            yield "arithmetic", node, ast.unparse(changed)
        case ast.BoolOp(op=both):
            changed.op = _BOOLEAN[type(both)]()
            yield "boolean", node, ast.unparse(changed)
        case ast.Constant(value=bool() as value):
            yield "constant", node, str(not value)
        case ast.Constant(value=int() | float() as number):
            yield "constant", node, str(number + 1)
        case ast.Call(args=[first, second, *others]) if _is_swappable(changed):
            changed.args = [second, first, *others]
            yield "swap", node, ast.unparse(changed)


def _is_text(node: ast.BinOp) -> bool:
    return any(isinstance(each, ast.JoinedStr) or _is_str(each) for each in ast.walk(node))


def _is_str(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_swappable(call: ast.Call) -> bool:
    """Tell whether the first two arguments can change places; `isinstance` would never run."""
    no_type = ast.unparse(call.func) not in ("isinstance", "issubclass", "getattr", "hasattr")
    return no_type and not any(isinstance(each, ast.Starred) for each in call.args[:2])
