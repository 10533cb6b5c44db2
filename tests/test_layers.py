"""Imports between packages have no cycle, and docs/architecture.md shows their layers."""

from __future__ import annotations

import ast

import pytest

from tests.helpers.house import ROOT, Source
from tests.helpers.layers import layers, layers_text, package_graph, product_graph


def planted(**texts: str) -> list[Source]:
    """Files by module name, with __ for a dot."""
    return [Source(name.replace("__", "."), text, ast.parse(text)) for name, text in texts.items()]


@pytest.fixture(scope="module", autouse=True)
def parsed() -> None:
    """Every file of the product has been parsed."""
    product_graph()


def test_imports_among_packages_have_no_cycle() -> None:
    found = layers(product_graph())
    assert found[-1] == ["tools.bench"]
    assert {"paro.topology", "model", "data"} & {*found[0]}


def test_few_files_of_paro_are_loose() -> None:
    loose = [path.name for path in (ROOT / "paro").glob("*.py") if path.name != "__init__.py"]
    assert len(loose) <= 6, loose


def test_the_page_shows_the_layers() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert layers_text() in page, "python -m tests.helpers.layers prints them"


CYCLES = [
    {"paro__a__x": "import paro.b.y", "paro__b__y": "from paro.a import x"},
    {"paro__a__x": "def f():\n    import paro.b.y", "paro__b__y": "from paro.a.x import f"},
    {
        "paro__a__x": "from importlib import import_module\nimport_module('paro.b.y')",
        "paro__b__y": "import paro.c",
        "paro__c": "from paro.a.z import w",
        "paro__a__z": "w = 1",
    },
    {"paro__a": "from data.x import y", "data__x": "import paro.a"},
]


@pytest.mark.parametrize("texts", CYCLES)
def test_a_planted_cycle_is_found(texts: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"a cycle among .*paro\.a"):
        layers(package_graph(planted(**texts)))


def test_layers_are_as_low_as_they_can_be() -> None:
    texts = {
        "paro__a__x": "",
        "paro__a__y": "import paro.a.x",
        "paro__b__x": "from paro.a.y import z",
        "paro__c": "import paro.b.x, paro.a.x",
        "paro__d": "",
    }
    assert layers(package_graph(planted(**texts))) == [["paro.a", "paro.d"], ["paro.b"], ["paro.c"]]
