"""The page of faults has those that `make verify` recorded; faults strike at functions in use."""

from __future__ import annotations

import ast
import json
from collections import Counter
from importlib import import_module
from inspect import getsource
from operator import attrgetter

from tests.faults.job import Point
from tests.helpers.ranks import ROOT


def test_the_page_has_the_faults_of_the_record() -> None:
    record = (ROOT / "examples/measured/verify.jsonl").read_text(encoding="utf-8")
    page = (ROOT / "docs/faults.md").read_text(encoding="utf-8")
    rows = [json.loads(line)["properties"] for line in record.splitlines()]
    tried = Counter(row["fault"]["fault"] for row in rows if "fault" in row)
    assert f"{tried.total()} faults" in page
    for fault, count in tried.items():
        assert f"| {fault} | {count} | " in page


def test_the_points_are_functions_that_are_called() -> None:
    for point in Point:
        path, _, name = point.partition(":")
        module = import_module(path)
        assert callable(attrgetter(name)(module))
        nodes = ast.walk(ast.parse(getsource(module)))
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        assert "." in name or name in used, f"{point}: its callers have it from another module"
