"""Ranks end with the agent of torchrun that started them, and only with that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import lives, wait_for
from tests.helpers.ranks import ROOT
from tests.helpers.warm_python import warm_python

RANK = """
import os, pathlib, time
from paro.distributed.user_errors import end_with_agent
{before}
end_with_agent()
pathlib.Path({folder!r}, os.environ.get("RANK", "0")).write_text(str(os.getpid()))
time.sleep(60)
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def script(folder: Path, before: str = "") -> Path:
    (folder / "pids").mkdir()
    path = folder / "rank.py"
    path.write_text(RANK.format(folder=str(folder / "pids"), before=before))
    return path


def pids(folder: Path) -> list[int]:
    return [int(text) for path in (folder / "pids").iterdir() if (text := path.read_text())]


@pytest.mark.process
def test_ranks_die_with_an_agent_that_is_killed(tmp_path: Path) -> None:
    torchrun = [warm_python() / "python", "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", script(tmp_path)]
    agent = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    ranks: list[int] = []
    try:
        wait_for(lambda: len(pids(tmp_path)) == 2, 60)
        ranks = pids(tmp_path)
        assert all(map(lives, ranks))
        agent.send_signal(signal.SIGKILL)
        wait_for(lambda: not any(map(lives, ranks)), 30)  # of the 60 s that they sleep
    finally:
        agent.kill()
        agent.wait()
        for pid in filter(lives, ranks):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.process
@pytest.mark.parametrize("agent", [True, False])
def test_a_rank_whose_agent_is_gone_does_not_start(agent: bool, tmp_path: Path) -> None:
    """The shell stands for the init process that adopts it; without torchrun all shells do."""
    before = "import os; os.setsid(); time.sleep = print"
    command = ["sh", "-c", f"{sys.executable} {script(tmp_path, before)} & wait $!; exit $?"]
    environment = ENVIRONMENT | ({"TORCHELASTIC_RUN_ID": "1"} if agent else {})
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, bool(pids(tmp_path))) == ((1, False) if agent else (0, True))
    assert ("PeerError: torchrun ended before this rank had started" in done.stderr) == agent
