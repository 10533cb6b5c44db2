"""The layers of the product, computed from its imports; run it to print them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from functools import cache

from tests.helpers.house import PRODUCT, Source, as_run, imports_of, nodes_of, sources

Graph = Mapping[str, frozenset[str]]


def package_of(module: str) -> str:
    """The node of a module: its package, or the module itself if it is a single file of paro/."""
    parts = module.split(".")
    if parts[0] in ("model", "data"):
        return parts[0]
    if parts[0] == "tools":
        return "tools.bench" if parts[1:2] == ["bench"] else "tools"
    folder = ".".join(parts[:-1])
    return module if folder in ("", "paro") else folder


def modules_named(source: Source, modules: Iterable[str]) -> set[str]:
    """The modules a file imports: at the top, inside functions, or by name in a string."""
    known = set(modules)
    found = set()
    for imported in imports_of(source):
        parts = imported.name.split(".")
        names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        found |= {next(filter(known.__contains__, names), "")}
    found |= known & {each.value for each in nodes_of(source, ast.Constant)}
    return found - {"", source.module}


@cache
def module_graph() -> Graph:
    """The modules that each file of the product imports when it runs."""
    files = list(sources(*PRODUCT))
    names = {source.module for source in files}
    return {source.module: run_imports(source, names) for source in files}


def run_imports(source: Source, modules: Iterable[str]) -> frozenset[str]:
    """The modules that a file imports when it runs: without those of `if TYPE_CHECKING`."""
    return frozenset(modules_named(as_run(source), modules))


def chains(graph: Graph, start: str) -> dict[str, tuple[str, ...]]:
    """The modules that a module imports, also through others; with each the way to it."""
    found: dict[str, tuple[str, ...]] = {start: (start,)}
    to_visit = [start]
    for module in to_visit:
        for imported in sorted(graph[module] - found.keys()):
            found[imported] = (*found[module], imported)
            to_visit.append(imported)
    return found


@cache
def product_graph() -> Graph:
    """The imports of each package and single file of the product and its tools."""
    files = list(sources(*PRODUCT))
    packages = {source.module.rpartition(".")[0] for source in files}
    files = [source for source in files if source.module not in packages]  # an __init__.py is empty
    names = [source.module for source in files]
    graph: dict[str, set[str]] = {package_of(name): set() for name in names}
    for source in files:
        own = package_of(source.module)
        graph[own] |= {package_of(name) for name in modules_named(source, names)} - {own}
    return {package: frozenset(imported) for package, imported in graph.items()}


def layers(graph: Graph) -> list[list[str]]:
    """Layers from the bottom up; each imports only lower ones. `ValueError` names a cycle."""
    height: dict[str, int] = {}
    left = dict(graph)
    while left:
        ready = [package for package, imported in left.items() if not imported & left.keys()]
        if not ready:
            raise ValueError(f"a cycle among {', '.join(sorted(left))}")
        level = 1 + max(height.values(), default=-1)
        for package in ready:
            height[package] = level
            del left[package]
    return [
        sorted(package for package, own in height.items() if own == level)
        for level in range(1 + max(height.values(), default=-1))
    ]


def layers_text() -> str:
    """The table of layers for docs/architecture.md, highest first."""
    found = layers(product_graph())
    lines = []
    for number, packages in reversed([*enumerate(found)]):
        names = ", ".join(f"`{package}`" for package in packages)
        lines.append(f"| {number} | {names} |")
    return "\n".join(["| layer | packages and loose files |", "|---|---|", *lines]) + "\n"


if __name__ == "__main__":
    print(layers_text(), end="")
