"""The launcher for one machine: which addresses a job listens on, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.ranks import ROOT
from tests.helpers.warm_python import warm_python
from tools.torchrun import IMPATIENT_SECONDS

SCRIPT = ROOT / "examples" / "one_machine.sh"
# Prints the addresses on which the agent and rank 0 listen once the ranks have communicated.
LISTENING = """
import os
import psutil
import torch
from paro.distributed.process_group import RuntimeConfig, distributed
from paro.distributed.user_errors import run_script
from paro.distributed.world import read_world

def listening(pid):
    sockets = psutil.Process(pid).net_connections()
    return {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}

def main():
    world = read_world()
    with distributed(RuntimeConfig(distributed_backend="gloo"), world):
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        assert total == 2
        if world.rank == 0:
            print("rank", *listening(os.getpid()))
            print("agent", *listening(os.getppid()))

run_script("listening.py", main)
"""


# What every rank of a job runs, where the one of rank 1 differs.
SAVES = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1.5), print("saved\\n", end=""), sys.exit()))
signal.signal(signal.SIGINT, lambda *_: sys.exit(0 if os.environ["RANK"] == "0" else 3))
signal.signal(signal.SIGHUP, signal.SIG_IGN)
print("started\\n", end="", flush=True)
while True:
    time.sleep(0.05)  # a signal just before a long one would wait for its end
"""
FAILS = """
import os, sys, time
if os.environ["RANK"] == "0":
    time.sleep(1000)
from paro.distributed.user_errors import run_script
from paro.errors import UserError
def main():
    {}
run_script("job.py", main)
"""


def launch(script: Path, text: str) -> subprocess.Popen[str]:
    script.write_text(text)
    return subprocess.Popen(
        # These tests may run under nohup, whose children ignore SIGHUP.
        ["env", "--default-signal=HUP", "bash", SCRIPT, "--nproc-per-node", "2", script],
        env=os.environ | {"PATH": f"{warm_python()}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.ranks
def test_on_one_machine_nothing_listens_on_another_interface(tmp_path: Path) -> None:
    with launch(tmp_path / "listening.py", LISTENING) as job:
        out, said = job.communicate()
    assert job.returncode == 0, said
    rank, agent = sorted(out.splitlines(), reverse=True)
    assert (rank, agent) == ("rank 127.0.0.1", "agent")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("what", "status", "said"),
    [
        ("", 0, ""),
        ("raise UserError('a mistake', on_this_rank=True)", 2, "job.py: error: a mistake\n"),
        ("os.kill(os.getpid(), 9)", 137, "torchrun.py: rank 1 was killed by SIGKILL\n"),
    ],
)
def test_a_job_ends_with_the_status_and_the_line_of_the_rank_that_failed(
    tmp_path: Path, what: str, status: int, said: str
) -> None:
    with launch(tmp_path / "job.py", FAILS.format(what) if what else "") as job:
        _, told = job.communicate()
    assert (job.returncode, told) == (status, said)


@pytest.mark.ranks
def test_a_bug_keeps_its_traceback_and_the_launcher_has_none(tmp_path: Path) -> None:
    with launch(tmp_path / "job.py", FAILS.format("raise KeyError('a bug')")) as job:
        _, told = job.communicate()
    assert job.returncode == 1
    assert told.count("Traceback") == 1
    assert told.endswith("KeyError: 'a bug'\ntorchrun.py: rank 1 ended with status 1\n")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("signals", "status", "printed", "said"),
    [
        ([signal.SIGTERM], 0, "saved\nsaved\n", ""),
        ([signal.SIGTERM, signal.SIGTERM], 0, "saved\nsaved\n", ""),  # a supervisor and a shell
        ([signal.SIGINT], 3, "", ""),
        ([signal.SIGHUP, None, signal.SIGTERM], 129, "", "torchrun.py: ended by SIGHUP\n"),
    ],
    ids=["saves", "twice", "fails", "killed"],
)
def test_a_signal_reaches_the_ranks_which_have_time_to_end(
    tmp_path: Path, signals: list[signal.Signals | None], status: int, printed: str, said: str
) -> None:
    with launch(tmp_path / "job.py", SAVES) as job:
        assert [job.stdout.readline() for _ in range(2)] == ["started\n"] * 2
        for number in signals:
            if number is None:
                time.sleep(2 * IMPATIENT_SECONDS)
            else:
                job.send_signal(number)
        out, told = job.communicate()
    assert (job.returncode, out, told) == (status, printed, said)
