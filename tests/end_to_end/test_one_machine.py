"""The launcher for one machine: which addresses a job listens on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.ranks import ROOT

SCRIPT = ROOT / "examples" / "one_machine.sh"
# Prints the addresses on which the agent and rank 0 listen once the ranks have communicated.
LISTENING = """
import os
import torch
from pathlib import Path
from paro.distributed.process_group import RuntimeConfig, distributed
from paro.distributed.user_errors import run_script
from paro.distributed.world import read_world

def listening(pid):
    sockets = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                yield words[1].partition(":")[0]

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


@pytest.mark.ranks
def test_on_one_machine_nothing_listens_on_another_interface(tmp_path: Path) -> None:
    script = tmp_path / "listening.py"
    script.write_text(LISTENING)
    done = subprocess.run(
        ["bash", SCRIPT, "--nproc-per-node", "2", script],
        env=os.environ
        | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rank, agent = sorted(done.stdout.splitlines(), reverse=True)
    loopback = "0100007F"  # 127.0.0.1 in the kernel's table
    assert set(rank.split()[1:]) == {loopback}
    assert agent.split() == ["agent"]
