"""Packaging: the console command, the packages, and the source of dependencies."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

from tests.helpers.house import ROOT
from tests.helpers.warm_python import run_python

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
    told = re.findall(r"GB to download|pip install -r", done.stdout)
    assert told == ["GB to download", "pip install -r"] * len(installed)
    # What installs the larger file leaves nothing to install for the smaller one.
    both = "touch .venv/installed-for-training .venv/installed\n"
    assert (both in done.stdout) == (installed == ["requirements-dev.txt"])
