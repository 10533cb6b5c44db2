"""Imports have no cycle, what trains imports no planner, and a page shows the layers."""

from __future__ import annotations

import ast

import pytest

from tests.helpers.house import ROOT, Source, is_within
from tests.helpers.layers import (
    Graph,
    chains,
    layers,
    layers_text,
    module_graph,
    product_graph,
    run_imports,
)


@pytest.fixture(scope="module", autouse=True)
def parsed() -> None:
    """Every file of the product has been parsed."""
    product_graph()
    module_graph()


def test_imports_among_packages_have_no_cycle() -> None:
    found = layers(product_graph())
    assert found[-1] == ["tools.bench"]
    assert len(found) <= 10
    assert {"paro.topology", "model", "data"} & {*found[0]}


# What trains: a step, the loop, the building of a run, and the engine.
ENGINE = (
    *("paro.training", "paro.sharding", "paro.rotation", "paro.collectives"),
    *("paro.context_parallel", "paro.optim", "paro.distributed", "paro.checkpoint"),
)


def planners_imported(graph: Graph) -> list[str]:
    """The ways from a file that trains to a file of the planner, through all that it imports."""
    return [
        " -> ".join(chain)
        for start in sorted(graph)
        if is_within(start, ENGINE)
        for module, chain in chains(graph, start).items()
        if is_within(module, ("paro.planning",))
    ]


def test_what_trains_imports_no_planner() -> None:
    ways = planners_imported(module_graph())
    assert not ways, "\n".join(ways)


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("def f():\n    from paro.planning import units", True),
        ("import paro.config.run", True),
        ("if TYPE_CHECKING:\n    from paro.planning.activations import Activations", False),
    ],
)
def test_an_import_of_the_planner_is_found(text: str, is_found: bool) -> None:
    graph, step = module_graph(), "paro.training.step"
    imported = run_imports(Source(step, text, ast.parse(text)), graph)
    ways = planners_imported({**graph, step: graph[step] | imported})
    assert any(way.startswith(step) for way in ways) is is_found


def test_few_files_of_paro_are_loose() -> None:
    loose = [path.name for path in (ROOT / "paro").glob("*.py") if path.name != "__init__.py"]
    assert len(loose) <= 6, loose


def test_the_page_shows_the_layers() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert layers_text() in page, "python -m tests.helpers.layers prints them"
