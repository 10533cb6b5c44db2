"""Launch scripts, run with launchers that start nothing, and plans of what they would start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from paro.launch.dry_run import RunPrediction, predict_run
from tests.helpers.ranks import ROOT
from tests.helpers.training import configured

EXAMPLES = ROOT / "examples"
BIN = Path(sys.executable).parent

# Replaces a launcher: prints its arguments and the variables that scripts set.
RECORDER = """for word in "${0##*/}" "$@"; do echo "word $word"; done
env | grep -E '^(NCCL|CUDA|SRUN|MASTER|OMP|PYTORCH)_' | sed 's/^/set /'"""


class Started(NamedTuple):
    """The command and environment that a script would have started."""

    words: list[str]
    environment: dict[str, str]

    @property
    def launcher(self) -> list[str]:
        return self.words[: self.words.index("pretrain_llama.py")]

    @property
    def flags(self) -> list[str]:
        return self.words[self.words.index("pretrain_llama.py") + 1 :]


def bash(script: str | Path, *args: object, path: str, **environment: object) -> str:
    done = subprocess.run(
        ["bash", str(EXAMPLES / script), *map(str, args)],
        cwd=ROOT,
        env={"PATH": f"{path}:{os.environ['PATH']}"} | {k: str(v) for k, v in environment.items()},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def start(recorders: Path, script: str | Path, *args: object, **environment: object) -> Started:
    lines = bash(script, *args, path=str(recorders), **environment).splitlines()
    words = [line.removeprefix("word ") for line in lines if line.startswith("word ")]
    settings = [line.removeprefix("set ") for line in lines if line.startswith("set ")]
    return Started(words, dict(setting.split("=", 1) for setting in settings))


def planned(started: Started) -> RunPrediction:
    return predict_run(configured(started.flags))


def executables(folder: Path, **scripts: str) -> Path:
    """A folder with programs of these lines of shell."""
    folder.mkdir(exist_ok=True)
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def recorders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of launchers that start nothing."""
    recorders = dict.fromkeys(("python", "torchrun", "srun"), RECORDER)
    named = 'printf "first\\nsecond\\n"'
    return executables(tmp_path_factory.mktemp("bin"), **recorders, scontrol=named)
