"""What must be the same on all ranks: world size, versions, code and flags."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import torch

import data
import model
import paro
from data.blend import number_in
from paro.arguments.flag_parser import PATHS
from paro.arguments.parser import build_parser
from paro.config.record import recorded_arguments
from paro.config.run import RunConfig

_HASH_DIGITS = 12


def settings_of(config: RunConfig) -> dict[str, str]:
    """Return the settings of this rank, by the name that a message gives them.

    Paths may differ from node to node, so only their number and the weights between them are in.
    """
    given = {name: value for name, value in config.given.items() if name != "ranks_per_node"}
    paths = path_flags()
    found = {
        "WORLD_SIZE": str(given["world_size"]),
        "torch": torch.__version__,
        "the code (a hash of paro, model and data)": code_version(),
    }
    for name, value in given.items():
        found[_flag(name)] = _without_paths(value) if name in paths else _text(value)
    machine = config.sharding.machine
    digest = sha256(repr(machine).encode()).hexdigest()
    found["the content of --paro-machine"] = "none" if machine is None else digest[:_HASH_DIGITS]
    for name, value in recorded_arguments(config).items():
        if name not in paths and value != given.get(name):
            found[f"{_flag(name)} in use"] = _text(value)
    return found


def path_flags() -> set[str]:
    """Return the arguments whose values are paths."""
    actions = build_parser()._actions
    return {action.dest for action in actions if action.metavar in PATHS} | {"paro_machine"}


def code_version() -> str:
    """Return a hash of the source files: a commit would not show what was changed after it."""
    digest = sha256()
    for package in (paro, model, data):
        folder = Path(package.__path__[0])
        for path in sorted((*folder.rglob("*.py"), *folder.rglob("*.toml"))):
            digest.update(path.relative_to(folder.parent).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:_HASH_DIGITS]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _text(value: object) -> str:
    return "not given" if value is None else str(value)


def _without_paths(value: object) -> str:
    if value is None:
        return _text(value)
    words = value if isinstance(value, (list, tuple)) else [value]
    shown = ("a path" if number_in(word) is None else word for word in map(str, words))
    return " ".join(shown) or "not given"
