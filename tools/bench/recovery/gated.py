"""Runs pretrain_llama.py on a rank that can be held at a chosen point, and traces opened files."""

# gated.py FOLDER MEMORY ARGS: a rank that FOLDER/gate.json names waits where it says, to be killed
# there. If it opens a file below MEMORY of another host, FOLDER has a file `opened-elsewhere`.

from __future__ import annotations

import importlib
import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

GATE = "gate.json"
REACHED = "reached"
OPENED = "opened-elsewhere"


class Point(NamedTuple):
    """A function, and whether ranks are held before or after it."""

    module: str
    name: str
    after: bool = False


POINTS = {
    "update": Point("paro.optim.optimizer", "UnitOptimizer.update"),
    "all-gather": Point("paro.optim.optimizer", "UnitOptimizer.write_params", after=True),
    "local copy": Point("paro.checkpoint.in_memory.snapshot", "SnapshotWriter.write"),
    "save": Point("paro.checkpoint.save", "write_states"),
    "recovery": Point("paro.checkpoint.in_memory.recovery", "_VerifiedSnapshots._exchange"),
}


def install(folder: Path, memory: Path) -> None:
    """Put a gate at every point, and traces the files that are opened."""
    for name, point in POINTS.items():
        _put_gate(folder, name, point)
    own, elsewhere = f"-{socket.gethostname()}", folder / OPENED

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(args[0], str | bytes | os.PathLike):
            return
        path = os.fsdecode(args[0])
        if path.startswith(f"{memory}/") and not Path(path).relative_to(memory).parts[0].endswith(
            own
        ):
            elsewhere.touch()

    sys.addaudithook(note)


def _put_gate(folder: Path, name: str, point: Point) -> None:
    owner: Any = importlib.import_module(point.module)
    *parts, last = point.name.split(".")
    for part in parts:
        owner = getattr(owner, part)
    setattr(owner, last, _gated(getattr(owner, last), folder, name, after=point.after))


def _gated(
    original: Callable[..., Any], folder: Path, name: str, *, after: bool
) -> Callable[..., Any]:
    gate, calls = folder / GATE, itertools.count()

    def gated(*args: Any, **named: Any) -> Any:
        result = original(*args, **named) if after else None
        if gate.exists():
            _wait_at(gate, name, next(calls))
        return result if after else original(*args, **named)

    return gated


def _wait_at(gate: Path, name: str, call: int) -> None:
    try:
        wanted = json.loads(gate.read_text())
    except (OSError, ValueError):
        return  # it is written or removed at this moment
    mine = wanted["point"] == name and wanted["rank"] == int(os.environ["RANK"])
    if not mine or call < wanted["skip"]:
        return
    (gate.parent / REACHED).touch()
    while gate.exists():
        time.sleep(0.002)


def main() -> None:
    folder, memory, *argv = sys.argv[1:]
    sys.argv = ["pretrain_llama.py", *argv]
    from paro.distributed.user_errors import run_script
    from pretrain_llama import main as pretrain

    install(Path(folder), Path(memory))
    run_script("pretrain_llama.py", pretrain)


if __name__ == "__main__":
    main()
