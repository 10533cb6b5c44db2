"""The quickstart from text to sample, shortened; called again it goes on from what is there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.helpers.ranks import ROOT

TEXT_BYTES = 600_000


def write_text(path: Path) -> None:
    """Enough documents for a tokenizer of 4096 pieces and a held-out part."""
    written = 0
    with path.open("w", encoding="utf-8") as stream:
        for module in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text = module.read_text(encoding="utf-8")
            stream.write(json.dumps({"text": text}) + "\n")
            written += len(text)
            if written > TEXT_BYTES:
                return


def quickstart(run_dir: Path, text: Path, *, train_iters: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "examples" / "quickstart.sh")],
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "RUN_DIR": str(run_dir),
            "TEXT": str(text),
            "TRAIN_ITERS": str(train_iters),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def commands(output: str) -> list[str]:
    """What was run, by the script's name."""
    return re.findall(r"^\+ .*?(\w+)\.py ", output, re.M)


def sample(output: str) -> str:
    return output[output.rindex("+ python tools/generate.py") : output.index("loss of the untr")]


@pytest.mark.ranks
@pytest.mark.timeout(900)  # half a minute on two cores of one's own
def test_from_text_to_sample_and_on(tmp_path: Path) -> None:
    run_dir, text = tmp_path / "a run", tmp_path / "text.jsonl"
    write_text(text)

    first = quickstart(run_dir, text, train_iters=1)
    assert first.returncode == 0, first.stdout
    assert commands(first.stdout) == [
        "train_tokenizer",
        "preprocess_data",
        "pretrain_llama",
        "generate",
    ]
    assert "> strategy IIG: 4 ranks in groups of 2" in first.stdout
    assert "validation loss at iteration 1 on validation set" in first.stdout
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in metrics] == [1]
    # Close to the loss of a fair guess, ln 4096, as the summary has it too.
    assert metrics[0]["lm_loss"] == pytest.approx(8.32, abs=0.2)
    told = re.search(
        r"untrained model ([\d.]+), on held-out .* ([\d.]+): (-?[\d.]+) nats", first.stdout
    )
    assert told is not None, first.stdout
    start, end, gained = map(float, told.groups())
    assert start == pytest.approx(metrics[0]["lm_loss"], abs=0.006)
    assert gained == pytest.approx(start - end, abs=0.011)
    assert len(sample(first.stdout)) > 100
    paths = re.findall(
        r"^(?:tokenizer|token ids|checkpoints|metrics|log) +([^,\n]+)", first.stdout, re.M
    )
    assert len(paths) == 5
    assert all(Path(path).exists() for path in paths)

    made = [path for path in run_dir.rglob("*") if path.is_file() and path.suffix != ".log"]
    before = {path: path.stat().st_mtime_ns for path in made}
    second = quickstart(run_dir, text, train_iters=1)
    assert second.returncode == 0, second.stdout
    assert commands(second.stdout) == ["generate"]
    assert second.stdout.count("\n= ") + second.stdout.startswith("= ") == 4
    assert sample(second.stdout) == sample(first.stdout)
    assert second.stdout.endswith(first.stdout[first.stdout.index("loss of the untrained") :])
    assert {path: path.stat().st_mtime_ns for path in made} == before

    third = quickstart(run_dir, text, train_iters=2)
    assert third.returncode == 0, third.stdout
    assert commands(third.stdout) == ["pretrain_llama", "generate"]
    assert "successfully loaded checkpoint" in third.stdout
    assert re.findall(r"iteration +(\d+)/ +2 ", third.stdout) == ["2"]


def test_a_step_that_fails_ends_the_quickstart(tmp_path: Path) -> None:
    done = quickstart(tmp_path / "run", tmp_path / "missing.jsonl", train_iters=2)
    assert done.returncode == 2
    assert commands(done.stdout) == ["train_tokenizer"]
    assert f"--input {tmp_path / 'missing.jsonl'} is missing" in done.stdout
    assert "nats gained" not in done.stdout
