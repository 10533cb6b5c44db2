"""Imports between packages have no cycle, and docs/architecture.md shows their layers."""

from __future__ import annotations

import pytest

from tests.helpers.house import ROOT
from tests.helpers.layers import layers, layers_text, product_graph


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
