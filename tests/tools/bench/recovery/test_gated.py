"""Gates: the named rank waits until its gate is opened; files of other hosts are noted."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.ranks import HANGS_AFTER, ROOT
from tools.bench.recovery.gated import GATE, OPENED, POINTS, REACHED

PROGRAM = """
import sys
from pathlib import Path
from tools.bench.recovery import gated
folder = Path(sys.argv[1])
gated.install(folder, folder / "memory")
from paro.checkpoint.local import recovery
assert recovery._Copies.exchange.__name__ == "gated"
gated._put_gate(folder, "here", gated.Point("json", "dumps"))
import json
for number in range(3):
    json.dumps(number)
    (folder / f"done-{number}").touch()
(folder / "memory" / f"paro-{sys.argv[2]}" / "file").read_text()
"""


@pytest.mark.verify
@pytest.mark.process
@pytest.mark.parametrize("host", ["own", "elsewhere"])
def test_a_rank_waits_at_its_gate(tmp_path: Path, host: str) -> None:
    import socket

    name = socket.gethostname() if host == "own" else "elsewhere"
    (tmp_path / "memory" / f"paro-{name}").mkdir(parents=True)
    (tmp_path / "memory" / f"paro-{name}" / "file").touch()
    (tmp_path / GATE).write_text(json.dumps({"point": "here", "rank": 3, "skip": 1}))
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path), name],
        cwd=ROOT,
        env={"RANK": "3", "PATH": ""},
    )
    deadline = time.monotonic() + HANGS_AFTER
    while not (tmp_path / REACHED).exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    assert (tmp_path / "done-0").exists()
    assert not (tmp_path / "done-1").exists()
    (tmp_path / GATE).unlink()
    assert process.wait(60) == 0
    assert (tmp_path / "done-2").exists()
    assert (tmp_path / OPENED).exists() == (host == "elsewhere")


def test_the_points_are_functions() -> None:
    import importlib

    for point in POINTS.values():
        owner = importlib.import_module(point.module)
        for part in point.name.split("."):
            owner = getattr(owner, part)
        assert callable(owner)
