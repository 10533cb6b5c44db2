"""The quickstart from text to sample, shortened, with trackers; a second call resumes it."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.end_to_end.test_trackers import MEGATRON, OURS, read_tensorboard, read_wandb
from tests.end_to_end.test_training import read_metrics
from tests.helpers.ranks import ROOT

BIN = Path(sys.executable).parent
TEXT_BYTES = 600_000
ALL_TAGS = (
    "--log-params-norm --log-num-zeros-in-grad --timing-log-level 2 --log-timers-to-tensorboard"
)
SHORTER = "--num-layers 2 --hidden-size 64 --seq-length 64 --eval-iters 1"


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


def quickstart(
    run_dir: Path,
    text: Path,
    *,
    train_iters: int,
    programs: Path = BIN,
    extra_flags: str = "",
    terminal: int = subprocess.STDOUT,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "examples" / "quickstart.sh")],
        env={
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "WANDB_MODE": "offline",
            "RUN_DIR": str(run_dir),
            "TEXT": str(text),
            "TRAIN_ITERS": str(train_iters),
            "EXTRA_FLAGS": extra_flags,
            "TERM": "xterm",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
    )


def commands(output: str) -> list[str]:
    """The commands run, by the script's name."""
    return re.findall(r"^\+ .*?(\w+)\.py ", output, re.M)


def sample(output: str) -> str:
    return output[output.rindex("+ python tools/generate.py") : output.index("loss of the untr")]


def summary(output: str) -> str:
    return output[output.index("loss of the untrained") : output.index("next, in ")]


def check_summary(output: str, metrics: list[dict[str, float]]) -> None:
    """The losses and paths printed at the end."""
    told = re.search(r"untrained model ([\d.]+), on held-out .* ([\d.]+): (-?[\d.]+) nats", output)
    assert told is not None, output
    start, end, gained = map(float, told.groups())
    assert start == pytest.approx(metrics[0]["lm_loss"], abs=0.006)
    assert gained == pytest.approx(start - end, abs=0.011)
    names = "tokenizer|token ids|checkpoints|metrics|report|loss curve|log"
    paths = re.findall(rf"^(?:{names}) +([^,\n]+)", output, re.M)
    assert len(paths) == 7
    assert all(Path(path).exists() for path in paths)


def check_trackers(folder: Path, metrics: list[dict[str, float]]) -> None:
    """Every tag, in TensorBoard's files and in those of one resumed W&B run."""
    wanted = MEGATRON | OURS
    board = read_tensorboard(folder / "board")
    assert wanted <= board.keys()
    over_samples = read_tensorboard(folder / "board" / "samples")
    assert {f"{tag} vs samples" for tag in wanted} <= over_samples.keys()
    (values,) = read_wandb(folder).values()  # one run, in two files
    assert wanted | {"samples vs steps"} <= values.keys()
    assert sorted(values["lm loss"]) == [1, 2]
    for line in metrics:
        step = int(line["iteration"])
        assert board["lm loss"][step] == pytest.approx(line["lm_loss"], rel=1e-6)
        assert values["lm loss"][step] == pytest.approx(line["lm_loss"], rel=1e-6)
        assert values["samples vs steps"][step] == line["consumed_samples"]
    panels = {tag.partition("/")[0] for tag in OURS}
    assert panels == {"throughput", "memory", "communication", "data", "steps"}


@pytest.mark.ranks
def test_from_text_to_sample_and_on(tmp_path: Path) -> None:
    run_dir, text = tmp_path / "a run", tmp_path / "text.jsonl"
    write_text(text)
    trackers = f"--tensorboard-dir {tmp_path}/board --wandb-project p --wandb-save-dir {tmp_path}"
    extra_flags = f"{trackers} {ALL_TAGS} {SHORTER}"

    first = quickstart(run_dir, text, train_iters=1, extra_flags=extra_flags)
    assert first.returncode == 0, first.stdout
    assert commands(first.stdout) == [
        "train_tokenizer",
        "preprocess_data",
        "pretrain_llama",
        "report",
        "generate",
    ]
    assert "> strategy: IIG, 4 ranks in groups of 2" in first.stdout
    assert "validation loss at iteration 1 on validation set" in first.stdout
    assert "> Weights & Biases: offline" in first.stdout
    assert "\nwandb: " not in first.stdout  # it would follow our last lines
    metrics = read_metrics(run_dir / "metrics.jsonl")
    assert [line["iteration"] for line in metrics] == [1]
    # Close to the loss of a uniform guess, ln 4096, which the summary also prints.
    assert metrics[0]["lm_loss"] == pytest.approx(8.32, abs=0.2)
    check_summary(first.stdout, metrics)
    assert len(sample(first.stdout)) > 100

    second = quickstart(run_dir, text, train_iters=2, extra_flags=extra_flags)
    assert second.returncode == 0, second.stdout
    assert commands(second.stdout) == ["pretrain_llama", "report", "generate"]
    assert "successfully loaded checkpoint" in second.stdout
    assert re.findall(r"iteration +(\d+)/ +2 ", second.stdout) == ["2"]
    metrics = read_metrics(run_dir / "metrics.jsonl")
    assert [line["iteration"] for line in metrics] == [1, 2]
    check_trackers(tmp_path, metrics)

    sampled, longer, planned = next_commands(second.stdout)
    assert {"TRAIN_ITERS=4", f"TEXT={text}", f"RUN_DIR={run_dir}"} < set(shlex.split(longer))
    for line in (sampled, planned):
        subprocess.run(line, shell=True, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("#!/bin/sh\necho a sample\n")
    (tmp_path / "bin" / "python").chmod(0o755)
    made = [path for path in run_dir.rglob("*") if path.is_file() and path.suffix != ".log"]
    before = {path: path.stat().st_mtime_ns for path in made}
    third = quickstart(run_dir, text, train_iters=2, programs=tmp_path / "bin")
    assert third.returncode == 0, third.stdout
    assert commands(third.stdout) == ["report", "generate"]
    assert third.stdout.count("\n= ") + third.stdout.startswith("= ") == 4
    assert summary(third.stdout) == summary(second.stdout)
    assert {path: path.stat().st_mtime_ns for path in made} == before


def next_commands(output: str) -> list[str]:
    """The commands that are printed at the end."""
    folder, *lines = output[output.rindex("next, in ") :].splitlines()
    assert folder == f"next, in {ROOT}:"
    return lines


@pytest.mark.process
def test_a_terminal_gets_bars_and_the_view_and_the_log_the_lines(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("""#!/bin/sh
[ -t 2 ] && echo "$1 has a terminal"
case $1 in */torchrun.py) echo "trains: $*" ;; esac
""")
    (tmp_path / "bin" / "python").chmod(0o755)
    (tmp_path / "text.jsonl").touch()
    here, there = pty.openpty()
    done = quickstart(
        tmp_path / "run",
        tmp_path / "text.jsonl",
        train_iters=2,
        programs=tmp_path / "bin",
        terminal=there,
    )
    os.close(here)
    os.close(there)
    log = (tmp_path / "run" / "quickstart.log").read_text()
    assert done.returncode == 0
    assert done.stdout.count("has a terminal") == 4
    assert log.count("has a terminal") == 5
    assert re.search(r"^trains: .* --terminal live$", log, re.M)
    assert "trains: " not in done.stdout
    assert re.search(r"^\+ bash examples/one_machine.sh .* --terminal live >>", done.stdout, re.M)


@pytest.mark.process
def test_a_step_that_fails_ends_the_quickstart(tmp_path: Path) -> None:
    done = quickstart(tmp_path / "run", tmp_path / "missing.jsonl", train_iters=2)
    assert done.returncode == 2
    assert commands(done.stdout) == ["train_tokenizer"]
    assert f"--input {tmp_path / 'missing.jsonl'} is missing" in done.stdout
    assert "nats gained" not in done.stdout
