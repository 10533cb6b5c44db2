"""Imports have no cycle, what trains imports no planner, a page shows the layers; packaging."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

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
from tests.helpers.warm_python import run_python


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
    loose = [path.name for path in (ROOT / "paro").glob("*.py") if path.name != "__init__.py"]
    assert len(loose) <= 6, loose


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


def test_an_import_of_the_planner_is_found() -> None:
    graph, step = module_graph(), "paro.training.step"
    for text, is_found in (
        ("def f():\n    from paro.planning import units", True),
        ("import paro.config.run", True),
        ("if TYPE_CHECKING:\n    from paro.planning.activations import Activations", False),
    ):
        imported = run_imports(Source(step, text, ast.parse(text)), graph)
        ways = planners_imported({**graph, step: graph[step] | imported})
        assert any(way.startswith(step) for way in ways) is is_found


def test_the_page_shows_the_layers() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert layers_text() in page, "python -m tests.helpers.layers prints them"


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.process
def test_the_console_command_is_the_script() -> None:
    (target,) = PROJECT["project"]["scripts"].values()
    module, _, function = target.partition(":")
    program = (
        f"import sys; from {module} import {function} as run; sys.argv[1:] = ['--help']; run()"
    )
    done = run_python(["-c", program])
    assert done.returncode == 0, done.stderr
    assert "--paro-strategy" in done.stdout


def test_every_package_is_installed_and_no_other() -> None:
    from setuptools import find_packages  # takes long to import, for every worker

    tool = PROJECT["tool"]["setuptools"]
    found = set(find_packages(str(ROOT), **tool["packages"]["find"]))
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in ("paro", "model", "data", "tools")
        for path in (ROOT / top).glob("**/__init__.py")
    }
    assert found == folders
    assert tool["py-modules"] == [path.stem for path in ROOT.glob("*.py")]


def test_dependencies_are_those_of_requirements() -> None:
    assert PROJECT["project"]["dynamic"] == ["dependencies"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["dependencies"] == {
        "file": ["requirements.txt"]
    }
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    names = [line.split(">=")[0] for line in lines if not line.startswith("#")]
    assert len(names) == len(set(names))


@pytest.mark.process
@pytest.mark.parametrize(
    ("there", "target", "installed"),
    [
        ([], "quickstart", ["requirements.txt"]),
        (["installed-for-training"], "quickstart", []),
        (["installed-for-training"], "lint", ["requirements-dev.txt"]),
        (["installed-for-training", "installed"], "quickstart", []),
        ([], "lint", ["requirements-dev.txt"]),
    ],
)
def test_make_installs_what_a_target_needs_once(
    tmp_path: Path, there: list[str], target: str, installed: list[str]
) -> None:
    for name in ("Makefile", "requirements.txt", "requirements-dev.txt", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / ".venv").mkdir()
    for name in there:
        (tmp_path / ".venv" / name).touch()
    done = subprocess.run(
        ["make", "--dry-run", target], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert re.findall(r"pip install -r (\S+) -c constraints.txt", done.stdout) == installed
    message = re.findall(r"GB to download|pip install -r", done.stdout)
    assert message == ["GB to download", "pip install -r"] * len(installed)
    # What installs the larger file leaves nothing to install for the smaller one.
    both = "touch .venv/installed-for-training .venv/installed\n"
    assert (both in done.stdout) == (installed == ["requirements-dev.txt"])
