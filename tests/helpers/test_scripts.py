"""A script runs as it would from a shell: its folder, its streams, its status, its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.ranks import RankError
from tests.helpers.scripts import run_script

pytestmark = pytest.mark.ranks

# One write per line, so that ranks cannot mix their lines even if Python does not buffer.
SCRIPT = """
import os, sys, time
seen = [os.environ.get(name) for name in ("RANK", "OMP_NUM_THREADS", "GIVEN")]
os.write(1, f"rank {' '.join(map(str, seen))} {os.getcwd()}\\n".encode())
time.sleep(float(sys.argv[1]))
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_a_plain_script_runs_in_the_root_and_keeps_its_status(script: Path) -> None:
    done = run_script([script, 0, 3], env={"GIVEN": "x"})

    assert done.returncode == 3
    assert done.stdout == f"rank None 1 x {Path(__file__).parents[2]}\n"


def test_torchrun_starts_a_script_on_every_rank(script: Path) -> None:
    done = run_script([script, 0, 0], nproc=2, env={"GIVEN": "x"})

    assert done.returncode == 0, done.stderr
    assert sorted(line[:8] for line in done.stdout.splitlines()) == ["rank 0 1", "rank 1 1"]


def test_a_script_that_does_not_end_is_ended(script: Path) -> None:
    with pytest.raises(RankError, match="did not end within 1 s"):
        run_script([script, 600, 0], env={"GIVEN": "x"}, timeout=1)
