"""House rules for source code: allowed imports, owners of operations, size limits."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("paro", "model", "data", "tools", "pretrain_llama")

# These start in milliseconds and plan for thousands of ranks without torch installed.
PURE = (
    *("paro.errors", "paro.layout", "paro.precision", "paro.step", "paro.text"),
    "paro.strategy",
    "paro.topology",
    "paro.files",
    *(f"paro.collectives.{name}" for name in ("choice", "hops", "pipeline", "schedule")),
    *("paro.schedule", "paro.spec"),
    *("paro.machine", "paro.planning"),
    "paro.quantization.formats",
    *("model.config", "model.mup", "model.trainable", "model.units", "model.yarn"),
)

# The only imports apart from Python's standard library; of paro/, model/ and data/ have errors and
# text.
ALLOWED: dict[tuple[str, ...], tuple[str, ...]] = {
    ("paro.errors",): (),
    ("paro.text",): ("paro.errors",),
    ("paro.files",): ("aiohttp", "fsspec", "isal", "paro.errors", "paro.text", "paro.files"),
    # Imported where an object store is used.
    PURE: (*PURE, "aiohttp", "fsspec", "isal"),
    ("model",): ("model", "paro.errors", "paro.text", "paro.files", "torch", "triton"),
    ("data",): (
        *("data", "paro.errors", "paro.text", "paro.files"),
        "numpy",
        "torch",
        *("sentencepiece", "tiktoken", "tokenizers", "transformers"),
        *("datasets", "pyarrow"),
    ),
}

# With what a docstring may not open: words that point elsewhere, and in functions also a noun's.
POINTING = {
    *("what", "how", "which", "where", "who", "whose", "when", "why", "of", "as"),
    *("this", "that", "these", "those", "it", "its", "they", "their"),
}
DETERMINERS = {"the", "a", "an", "all", "each", "every", "one", "whether", "for"}

# Operations that only some modules may use.
OWNERS: dict[str, tuple[str, ...]] = {
    r"os\.(environb?|getenv|putenv)": ("paro.distributed", "tools"),
    r"torch\.distributed\.new_\w*group\w*": (
        "paro.distributed.groups",
        "tools.bench.planning.steps",
    ),
    r"torch\.distributed\.(\w*(gather|reduce|scatter|broadcast|barrier|all_to_all|send|recv)\w*"
    r"|P2POp|nn|_functional_collectives)": (
        "paro.collectives",
        "paro.distributed.control",
        "paro.checkpoint",
    ),
}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_CAUGHT_STATEMENTS = 6
SHAPELESS = {"utils", "util", "common", "helpers", "helper", "misc"}

# Single-letter classes keep this line from matching itself.
MACHINE = re.compile(
    r"(?<![\w./~}*$-])/(?:work|tmp|root|home|Users|workspace)\b"
    r"|find[-]links|index[-]url|python[h]osted|pypi[.]org"
)


@dataclass(frozen=True, slots=True)
class Source:
    """A Python file, read from disk or made by a test."""

    module: str
    text: str
    tree: ast.Module


class Imported(NamedTuple):
    """One imported name: its full name, its local name, and the part that the local name binds."""

    line: int
    name: str
    local: str
    bound: str


Function = ast.FunctionDef | ast.AsyncFunctionDef
Rule = Callable[[Source], Iterator[str]]


def is_within(name: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a dotted name is one of `prefixes` or is inside one."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


@cache
def _nodes(tree: ast.Module) -> dict[type[ast.AST], list[Any]]:
    """All nodes of a file by their type: a file is searched once for all rules."""
    found: dict[type[ast.AST], list[Any]] = {}
    for node in ast.walk(tree):
        found.setdefault(type(node), []).append(node)
    return found


def nodes_of(source: Source, *kinds: type[ast.AST]) -> Iterator[Any]:
    """The nodes of a file of some types, at any depth."""
    return chain.from_iterable(_nodes(source.tree).get(kind, ()) for kind in kinds)


def imports_of(source: Source) -> Iterator[Imported]:
    """All imports of a file, at any depth."""
    for node in nodes_of(source, ast.Import):
        for alias in node.names:
            top = alias.name.partition(".")[0]
            bound = alias.name if alias.asname else top
            yield Imported(node.lineno, alias.name, alias.asname or top, bound)
    for node in nodes_of(source, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        for alias in node.names:
            name = f"{module}.{alias.name}"
            yield Imported(node.lineno, name, alias.asname or alias.name, name)


def as_run(source: Source) -> Source:
    """A file without its blocks of `if TYPE_CHECKING`."""
    if "TYPE_CHECKING" not in source.text:
        return source
    kept = [
        node
        for node in source.tree.body
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return replace(source, tree=ast.Module(kept, []))


def uses_of(source: Source) -> Iterator[tuple[int, str]]:
    """The imports of a file and every `a.b.c` that begins with an imported name, in full."""
    bound = {}
    for imported in imports_of(source):
        bound[imported.local] = imported.bound
        yield imported.line, imported.name
    for node in nodes_of(source, ast.Attribute):
        first, rest = node, []
        while isinstance(first, ast.Attribute):
            rest.append(first.attr)
            first = first.value
        if isinstance(first, ast.Name) and first.id in bound:
            yield node.lineno, ".".join([bound[first.id], *reversed(rest)])


def imports_no_tests(source: Source) -> Iterator[str]:
    """The product does not import tests; the layers (layers.py) say which packages import which."""
    for line, name, _, _ in imports_of(source):
        if is_within(name, ("tests",)):
            yield f"{line}: the product imports {name}"


def imports_are_allowed(source: Source) -> Iterator[str]:
    """Pure files, model/ and data/ import only what is allowed when they run."""
    for line, name, _, _ in imports_of(as_run(source)):
        if name.partition(".")[0] in sys.stdlib_module_names:
            continue
        for modules, allowed in ALLOWED.items():
            if is_within(source.module, modules) and not is_within(name, allowed):
                yield f"{line}: {source.module} may not import {name}"


def uses_are_allowed(source: Source) -> Iterator[str]:
    """Only their owners use the environment, process groups and communication."""
    offences = dict.fromkeys(
        f"{line}: {match[0]} belongs to {' and '.join(owners)}"
        for line, use in uses_of(source)
        for pattern, owners in OWNERS.items()
        if (match := re.match(rf"{pattern}\b", use)) and not is_within(source.module, owners)
    )
    yield from offences


def starts_with_its_docstring(source: Source) -> Iterator[str]:
    """A file's docstring is on its first line, after a shebang if any."""
    if not re.match(r'(#!.*\n)?"""', source.text):
        yield "1: the first line is no docstring"


def docstrings_stand_alone(source: Source) -> Iterator[str]:
    """Docstrings open with a verb in functions, a noun elsewhere: read alone, they are clear."""
    for node in nodes_of(source, ast.FunctionDef, ast.ClassDef):
        docstring = ast.get_docstring(node) or ""
        if pointer := re.search(r"Note: |; see ", docstring):
            yield f"{node.lineno}: the docstring of {node.name} points elsewhere: {pointer[0]}"
        first = docstring.split(" ")[0].strip(",.:").lower()
        is_noun = isinstance(node, ast.ClassDef) or any(
            re.search(r"property|fixture", ast.unparse(each)) for each in node.decorator_list
        )
        if first in POINTING or (not is_noun and first in DETERMINERS):
            yield f"{node.lineno}: the docstring of {node.name} opens with {first}"


def sizes_are_small(source: Source) -> Iterator[str]:
    """Files and functions are within their limits."""
    num_lines = source.text.count("\n")
    if num_lines > MAX_FILE_LINES:
        yield f"1: {num_lines} lines, {MAX_FILE_LINES} allowed"
    for function in functions_of(source):
        num_lines = (function.end_lineno or 0) - function.lineno + 1
        if num_lines > MAX_FUNCTION_LINES:
            yield f"{function.lineno}: {function.name} has {num_lines} lines"


def catches_are_narrow(source: Source) -> Iterator[str]:
    """A library's `ValueError` is caught around the call that raises it: else it may be a bug."""
    for function in functions_of(source) if "ValueError" in source.text else ():
        for node in ast.walk(function):
            if not isinstance(node, ast.Try):
                continue
            caught = {
                name.id
                for handler in node.handlers
                for name in ast.walk(handler.type or ast.Name("BaseException"))
                if isinstance(name, ast.Name)
            }
            inside = [child for statement in node.body for child in ast.walk(statement)]
            num_statements = sum(isinstance(child, ast.stmt) for child in inside)
            broad = num_statements > MAX_CAUGHT_STATEMENTS or any(
                isinstance(child, ast.Yield | ast.YieldFrom) for child in inside
            )
            if "ValueError" in caught and (broad or function.name == "main"):
                what = f"catches ValueError from {num_statements} statements"
                yield f"{node.lineno}: {function.name} {what}"


def is_named_for_its_subject(source: Source) -> Iterator[str]:
    """No module has a name without a subject, such as utils."""
    for part in SHAPELESS.intersection(source.module.split(".")):
        yield f"1: {part} names no subject"


def functions_of(source: Source) -> Iterator[Function]:
    return nodes_of(source, ast.FunctionDef, ast.AsyncFunctionDef)


def sources(*names: str) -> Iterator[Source]:
    """The Python files below the root with these names or inside folders with these names."""
    for name in names:
        for path in (*ROOT.glob(f"{name}.py"), *sorted(ROOT.glob(f"{name}/**/*.py"))):
            yield _source(path)


@cache
def _source(path: Path) -> Source:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    text = path.read_text(encoding="utf-8")
    return Source(module.removesuffix(".__init__"), text, ast.parse(text))


def text_files() -> Iterator[Path]:
    """All text files that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() and b"\0" not in (ROOT / name).read_bytes():
            yield ROOT / name


EVERYWHERE: tuple[Rule, ...] = (starts_with_its_docstring, sizes_are_small)
IN_PRODUCT: tuple[Rule, ...] = (
    docstrings_stand_alone,
    imports_no_tests,
    imports_are_allowed,
    uses_are_allowed,
    catches_are_narrow,
    is_named_for_its_subject,
)
