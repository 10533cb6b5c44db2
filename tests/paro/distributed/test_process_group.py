"""The world from the environment, agreement among ranks, and the exit of a script."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from paro.distributed.control import Control
from paro.distributed.process_group import RuntimeConfig, device_for
from paro.distributed.user_errors import UserMistakeError, one_line, user_mistakes
from paro.distributed.world import World, read_world
from paro.errors import MistakesError
from tests.helpers.ranks import ROOT, run_ranks

LAUNCHERS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "MASTER_ADDR",
    "MASTER_PORT", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS",
)  # fmt: skip


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_alone(bare: pytest.MonkeyPatch) -> None:
    assert read_world() == World(rank=0, size=1, local_rank=0, ranks_per_node=1)


def test_torchrun(bare: pytest.MonkeyPatch) -> None:
    for name, value in zip(LAUNCHERS, ("11", "16", "3", "8"), strict=False):
        bare.setenv(name, value)
    with pytest.raises(ValueError, match="must set MASTER_ADDR, MASTER_PORT"):
        read_world()
    bare.setenv("MASTER_ADDR", "node0")
    bare.setenv("MASTER_PORT", "6000")
    assert read_world() == World(rank=11, size=16, local_rank=3, ranks_per_node=8)
    bare.setenv("WORLD_SIZE", "1")
    bare.delenv("MASTER_PORT")
    assert read_world().size == 1
    bare.delenv("LOCAL_RANK")
    with pytest.raises(ValueError, match="LOCAL_RANK"):
        read_world()


@pytest.mark.parametrize("tasks", ["8(x2)", "8(x1),4", "8"])
def test_slurm(bare: pytest.MonkeyPatch, tasks: str) -> None:
    bare.setenv("MASTER_ADDR", "node0")
    bare.setenv("SLURM_PROCID", "9")
    bare.setenv("SLURM_NTASKS", "16")
    bare.setenv("SLURM_LOCALID", "1")
    bare.setenv("SLURM_STEP_TASKS_PER_NODE", tasks)
    bare.setenv("SLURM_STEP_NUM_TASKS", "16")
    with pytest.raises(ValueError, match="must set MASTER_PORT"):
        read_world()
    bare.setenv("MASTER_PORT", "6000")
    assert read_world() == World(rank=9, size=16, local_rank=1, ranks_per_node=8)
    for name, value in zip(LAUNCHERS, ("9", "16", "1"), strict=False):
        bare.setenv(name, value)  # as a hook of the container runtime does
    assert read_world() == World(rank=9, size=16, local_rank=1, ranks_per_node=8)
    bare.setenv("RANK", "1")  # set by hand, inside a task
    with pytest.raises(ValueError, match="must set LOCAL_WORLD_SIZE"):
        read_world()


def test_tasks_of_srun_are_no_worlds_of_their_own(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("SLURM_PROCID", "9")
    bare.setenv("SLURM_STEP_TASKS_PER_NODE", "8(x2)")
    bare.setenv("SLURM_STEP_NUM_TASKS", "16")
    with pytest.raises(ValueError, match="export MASTER_ADDR"):
        read_world()
    bare.setenv("SLURM_STEP_TASKS_PER_NODE", "1")
    bare.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert read_world() == World()


def test_devices() -> None:
    assert device_for(RuntimeConfig(distributed_backend="gloo"), World()) == torch.device("cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="--distributed-backend gloo"):
            device_for(RuntimeConfig(), World())


def test_one_line() -> None:
    assert one_line(ValueError("a\n  b")) == "a b"
    assert one_line(ValueError()) == "ValueError"


def test_several_mistakes_keep_their_lines() -> None:
    assert one_line(MistakesError(["a\n b"])) == "a b"
    with pytest.raises(UserMistakeError) as error, user_mistakes():
        raise MistakesError(["a\n b", "c"], example="run\n  this")
    assert str(error.value) == "2 mistakes:\n  a b\n  c\nrun\n  this"


def _control() -> Control:
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    return Control(world, torch.device("cpu"))


def agree_on_a_mistake() -> tuple[list[float], str]:
    control = _control()
    summed = control.sum([control.world.rank, 0.5])
    try:
        with control.raise_on_all_ranks():
            if control.world.rank == 2:
                raise ValueError("rank 2 finds\na mistake")
    except UserMistakeError as mistake:
        return summed, str(mistake)
    return summed, "none"


@pytest.mark.ranks
def test_a_mistake_of_one_rank_is_everybody_s() -> None:
    assert run_ranks(agree_on_a_mistake, 4) == [([6.0, 2.0], "rank 2 finds a mistake")] * 4


@pytest.mark.process
@pytest.mark.parametrize(
    ("body", "status", "stderr"),
    [
        ("pass", 0, ""),
        ("raise UserMistakeError('mend it')", 2, "script: error: mend it\n"),
        ("raise RuntimeError('a bug')", 1, "RuntimeError: a bug"),
        ("raise SystemExit(3)", 3, ""),
        ("raise KeyboardInterrupt", 130, "script: interrupted\n"),
    ],
)
def test_how_a_script_ends(body: str, status: int, stderr: str) -> None:
    program = "from paro.distributed.user_errors import *\ndef main():\n    {body}\n"
    code = f"{program.format(body=body)}run_script('script', main)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status
    assert stderr in done.stderr
    assert ("Traceback" in done.stderr) == (status == 1)
