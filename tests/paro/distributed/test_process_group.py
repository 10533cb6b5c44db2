"""The world from the environment, the end of a script and of ranks, and freed memory."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paro.distributed.world import World, read_world
from paro.errors import UserError
from tests.helpers.ranks import ROOT
from tests.helpers.refusals import refused
from tests.helpers.scripts import lives, wait_for
from tests.helpers.warm_python import run_python, warm_python

LAUNCHERS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "MASTER_ADDR",
    "MASTER_PORT", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS",
)  # fmt: skip

FULL = "script: error: standard output cannot be written: No space left on device\n"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_torchrun(bare: pytest.MonkeyPatch) -> None:
    assert read_world() == World(rank=0, size=1, local_rank=0, ranks_per_node=1)
    for name, value in zip(LAUNCHERS, ("11", "16", "3", "8"), strict=False):
        bare.setenv(name, value)
    refused(read_world, "must set MASTER_ADDR, MASTER_PORT")
    bare.setenv("MASTER_ADDR", "node0")
    bare.setenv("MASTER_PORT", "6000")
    assert read_world() == World(rank=11, size=16, local_rank=3, ranks_per_node=8)
    bare.setenv("RANK", "0")
    bare.setenv("WORLD_SIZE", "1")
    bare.delenv("MASTER_PORT")
    assert read_world().size == 1
    bare.delenv("LOCAL_RANK")
    refused(read_world, "LOCAL_RANK")
    bare.delenv("RANK")
    assert read_world() == World()
    bare.setenv("WORLD_SIZE", "2")
    refused(read_world, "WORLD_SIZE is '2' in the environment and RANK is not set")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "2", "RANK is 2 and WORLD_SIZE 2 in the environment: ranks count from 0 to 1"),
        ("RANK", "-1", "RANK is '-1' in the environment, and not a number"),
        ("LOCAL_RANK", "2", "LOCAL_RANK is 2 and LOCAL_WORLD_SIZE 2 "),
        ("WORLD_SIZE", "0", "WORLD_SIZE is 0 in the environment: it must be 1 or more"),
        ("MASTER_PORT", "x", "MASTER_PORT is 'x' in the environment: give a port, 1 to 65535"),
        ("MASTER_PORT", "0", "MASTER_PORT is '0'"),
        ("MASTER_ADDR", "", "the launcher must set MASTER_ADDR"),
    ],
)
def test_a_wrong_value_is_named(
    bare: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    values = ("1", "2", "1", "2", None, "node0", "6000")
    for variable, right in zip(LAUNCHERS, values, strict=False):
        if right is not None:
            bare.setenv(variable, right)
    assert read_world() == World(rank=1, size=2, local_rank=1, ranks_per_node=2)
    bare.setenv(name, value)
    refused(read_world, message)
    if "RANK" in name:  # no other rank knows, and this one may not be the one that prints
        with pytest.raises(UserError) as caught:
            read_world()
        assert caught.value.on_this_rank


@pytest.mark.parametrize("tasks", ["8(x2)", "8(x1),4", "8"])
def test_slurm(bare: pytest.MonkeyPatch, tasks: str) -> None:
    for name, value in (("PROCID", "9"), ("NTASKS", "16"), ("LOCALID", "1")):
        bare.setenv(f"SLURM_{name}", value)
    bare.setenv("SLURM_STEP_TASKS_PER_NODE", tasks)
    bare.setenv("SLURM_STEP_NUM_TASKS", "16")
    refused(read_world, "export MASTER_ADDR")
    bare.setenv("MASTER_ADDR", "node0")
    refused(read_world, "must set MASTER_PORT")
    bare.setenv("MASTER_PORT", "6000")
    assert read_world() == World(rank=9, size=16, local_rank=1, ranks_per_node=8)
    for name, value in zip(LAUNCHERS, ("9", "16", "1"), strict=False):
        bare.setenv(name, value)  # as a hook of the container runtime does
    assert read_world() == World(rank=9, size=16, local_rank=1, ranks_per_node=8)
    bare.setenv("RANK", "1")  # set by hand, inside a task
    refused(read_world, "must set LOCAL_WORLD_SIZE")
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        bare.delenv(name)
    bare.setenv("SLURM_STEP_TASKS_PER_NODE", "1")
    bare.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert read_world() == World(), "a task alone is a world of its own"


def script(body: str, streams: str = "") -> subprocess.CompletedProcess[str]:
    program = f"from paro.distributed.user_errors import *\ndef main():\n    {body}\n"
    command = [sys.executable, "-c", f"{program}run_script('script', main)"]
    shell = ["sh", "-c", f"exec {shlex.join(command)} {streams}"]
    ascii_only = {"PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": ""}
    env = os.environ | ascii_only
    return subprocess.run(shell, cwd=ROOT, env=env, capture_output=True, text=True)


QUICKLY = "import paro.distributed.user_errors as own; own._PRINTING_RANK_SECONDS = 0.1"
OTHER_RANK = f"{QUICKLY}; os.environ['LOCAL_RANK'] = '1'"  # local rank 0 prints for its node
BY_LAUNCHER = "os.environ['SLURM_STEP_ID'] = '1'; time.sleep"
WAITS = f"{BY_LAUNCHER} = lambda _: print('waits', file=sys.stderr)"
# A launcher, which ends the others once a rank has left, does so while this one waits.
ENDED = f"{BY_LAUNCHER} = lambda _: os.kill(os.getpid(), 15)"
NO_READER = "import paro.report.log as log; r, w = os.pipe(); os.dup2(w, 1); os.close(r)"
LOST = "[Rank 0] standard output cannot be written: Broken pipe: the log goes on here\n"
MISTAKE = "raise UserError('mend it')"
MEND = "script: error: mend it\n"


@pytest.mark.process
@pytest.mark.parametrize(
    ("body", "streams", "status", "stderr"),
    [
        (MISTAKE, "", 2, MEND),
        ("raise UserError('a', 'b')", "", 2, "script: error: 2 mistakes:\n  a\n  b\n"),
        ("raise KeyboardInterrupt", "", 130, "script: interrupted\n"),
        (f"{OTHER_RANK}; raise KeyboardInterrupt", "", 130, ""),
        ("raise OSError(28, 'No space', '/x')", "", 1, "script: error: No space: /x\n"),
        (f"{QUICKLY}; raise PeerError('rank 1 failed')", "", 1, "script: error: rank 1 failed\n"),
        (f"{OTHER_RANK}; raise PeerError('rank 1 failed')", "", 1, ""),
        # While others wait, the rank that prints can: the first to leave ends all.
        (f"{OTHER_RANK}; {WAITS}; {MISTAKE}", "", 2, "waits\n"),
        (f"{ENDED}; raise RuntimeError('[/gloo/transport/tcp] closed by peer')", "", 1, ""),
        (f"print('x'); {MISTAKE}", ">&-", 2, MEND),
        ("import paro.report.log as log; log.print_line('x')", "> /dev/full", 1, FULL),
        ("sys.stdout.write('x')", "> /dev/full", 1, FULL),
        (f"{NO_READER}; log.print_line('x')", "", 141, ""),
        (f"{NO_READER}; log.print_line('x', stream=sys.stderr)", "", 0, "x\n"),
        (f"{NO_READER}; log.Log().show('x'); raise SystemExit(3)", "", 3, f"{LOST}x\n"),
        ("print('\\u00e9')", "> /dev/null", 0, ""),
    ],
)
def test_how_a_script_ends(body: str, streams: str, status: int, stderr: str) -> None:
    done = script(body, streams)
    assert (done.returncode, done.stderr) == (status, stderr)


@pytest.mark.process
def test_a_bug_shows_its_traceback() -> None:
    for body, message in (
        ("raise BrokenPipeError(32, 'of a process')", "BrokenPipeError: [Errno 32] of a process"),
        ("list(zip([1], [], strict=True))", "ValueError: zip() argument 2 is shorter"),
    ):
        done = script(body)
        assert (done.returncode, "Traceback" in done.stderr, message in done.stderr) == (
            1,
            True,
            True,
        )


PAGES = 1024  # of 4 KB, in a tensor

# Page faults of 20 steps that allocate 3 tensors of 4 MB, keep one and free all.
STEPS = """
import resource, torch
from paro.distributed.process_group import keep_freed_memory

def step():
    tensors = [torch.ones(2**20) for _ in range(3)]
    del tensors[1]
    return sum(float(x[0]) for x in tensors)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

step()
plain = faults()
keep_freed_memory()
faults()  # of freed memory that a process shares with the one it was forked from
print(plain, faults())
"""


@pytest.mark.process
def test_the_next_step_has_no_page_faults() -> None:
    done = run_python(["-c", STEPS])
    assert done.returncode == 0, done.stderr
    plain, keeping = map(int, done.stdout.split())
    assert plain > 4 * PAGES, "glibc keeps them by itself"
    assert keeping < PAGES / 4


RANK = """
import os, pathlib, time
from paro.distributed.user_errors import end_with_agent
{before}
end_with_agent()
pathlib.Path({folder!r}, "pid" + os.environ.get("RANK", "0")).write_text(str(os.getpid()))
time.sleep(60)
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def rank_script(folder: Path, before: str = "") -> Path:
    path = folder / "rank.py"
    path.write_text(RANK.format(folder=str(folder), before=before))
    return path


def pids(folder: Path) -> list[int]:
    return [int(text) for path in folder.glob("pid*") if (text := path.read_text())]


@pytest.mark.process
def test_ranks_die_with_an_agent_that_is_killed(tmp_path: Path) -> None:
    torchrun = [warm_python() / "python", "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", rank_script(tmp_path)]
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
    command = ["sh", "-c", f"{sys.executable} {rank_script(tmp_path, before)} & wait $!; exit $?"]
    environment = ENVIRONMENT | ({"TORCHELASTIC_RUN_ID": "1"} if agent else {})
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, bool(pids(tmp_path))) == ((1, False) if agent else (0, True))
    assert ("PeerError: torchrun ended before this rank had started" in done.stderr) == agent
