"""The points at which faults strike are functions that exist, where their callers look them up."""

from __future__ import annotations

import ast
from importlib import import_module
from inspect import getsource
from operator import attrgetter

from tests.faults.points import Point


def test_the_points_are_functions_that_are_called() -> None:
    for point in Point:
        path, _, name = point.partition(":")
        module = import_module(path)
        assert callable(attrgetter(name)(module))
        nodes = ast.walk(ast.parse(getsource(module)))
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        assert "." in name or name in used, f"{point}: its callers have it from another module"
