"""The scripts from text to a sample, and from conversations to an adapter and an answer."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import shlex
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from tests.end_to_end.conftest import executables
from tests.end_to_end.test_terminal import TAGS, read_tensorboard
from tests.end_to_end.test_training import read_metrics, run_main
from tests.helpers.ranks import ROOT
from tests.helpers.refusals import printed, write_lines
from tests.helpers.warm_python import warm_python
from tests.paro.checkpoint.convert.folders import save_folder
from tests.tools.preprocessing.templates import PLAIN
from tests.tools.preprocessing.test_chat_template import folder_with
from tools.generate import main as generate

SCRIPT, FINETUNE = (ROOT / "examples" / name for name in ("quickstart.sh", "finetune.sh"))
TEXT_BYTES = 300_000
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


def ended(
    words: Sequence[str | Path],
    settings: Mapping[str, object],
    on_path: Path | None,
    terminal: int = subprocess.STDOUT,
) -> subprocess.CompletedProcess[str]:
    """Runs a script of the examples with settings; standard error may be a terminal."""
    path = f"{on_path or warm_python()}:{os.environ['PATH']}"
    own = {name: str(value) for name, value in settings.items()}
    return subprocess.run(
        ["bash", *words],
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **own},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
    )


def quickstart(
    run_dir: Path, on_path: Path | None = None, *terminal: int, **settings: object
) -> subprocess.CompletedProcess[str]:
    own = {"RUN_DIR": run_dir, "RANKS": 2, "TERM": "xterm", "WANDB_MODE": "offline", **settings}
    return ended([SCRIPT], own, on_path, *terminal)


def commands(output: str) -> list[str]:
    return re.findall(r"^\+ .*?(\w+)\.py ", output, re.M)


def summary(output: str) -> str:
    return output[output.index("loss of the untrained") : output.index("next, in ")]


def check_summary(output: str, metrics: list[dict[str, float]]) -> None:
    message = re.search(
        r"untrained model ([\d.]+), on held-out .* ([\d.]+): (-?[\d.]+) nats", output
    )
    start, end, gained = map(float, message.groups())
    assert start == pytest.approx(metrics[0]["lm_loss"], abs=0.006)
    assert gained == pytest.approx(start - end, abs=0.011)
    names = "tokenizer|token ids|checkpoints|metrics|report|loss curve|log"
    paths = re.findall(rf"^(?:{names}) +([^,\n]+)", output, re.M)
    assert len(paths) == 7
    assert all(Path(path).exists() for path in paths)


def check_board(folder: Path, metrics: list[dict[str, float]]) -> None:
    """Every tag, which W&B gets too, in TensorBoard's files."""
    board = read_tensorboard(folder)
    assert board.keys() >= TAGS
    over_samples = read_tensorboard(folder / "samples")
    assert {f"{tag} vs samples" for tag in TAGS} <= over_samples.keys()
    losses = {int(line["iteration"]): line["lm_loss"] for line in metrics}
    assert board["lm loss"] == pytest.approx(losses, rel=1e-6)


@pytest.mark.ranks
def test_from_text_to_sample_and_on(tmp_path: Path) -> None:
    run_dir, text = tmp_path / "a run", tmp_path / "text.jsonl"
    write_text(text)
    trackers = f"--tensorboard-dir {tmp_path}/board --wandb-project p --wandb-save-dir {tmp_path}"
    extra_flags = f"{trackers} {ALL_TAGS} {SHORTER}"

    first = quickstart(run_dir, TEXT=text, TRAIN_ITERS=1, EXTRA_FLAGS=extra_flags)
    assert first.returncode == 0, first.stdout
    train_and_show = ["pretrain_llama", "report", "generate"]
    assert commands(first.stdout) == ["train_tokenizer", "preprocess_data", *train_and_show]
    assert "> strategy: IIG, 2 ranks in groups of 1" in first.stdout
    assert "validation loss at iteration 1 on validation set" in first.stdout
    assert "> Weights & Biases: offline" in first.stdout
    assert "\nwandb: " not in first.stdout  # it would follow our last lines
    metrics = read_metrics(run_dir / "metrics.jsonl")
    assert [line["iteration"] for line in metrics] == [1]
    # Close to the loss of a uniform guess, ln 4096, which the summary also prints.
    assert metrics[0]["lm_loss"] == pytest.approx(8.32, abs=0.2)
    check_summary(first.stdout, metrics)
    assert len(first.stdout.partition("+ python tools/generate.py")[2].partition("loss of")[0]) > 99

    script = f"""case $1 in *torchrun.py) exec {warm_python()}/python "$@" ;; esac"""
    trains = executables(tmp_path / "trains", python=script)
    second = quickstart(run_dir, trains, TEXT=text, TRAIN_ITERS=2, EXTRA_FLAGS=extra_flags)
    assert second.returncode == 0, second.stdout
    assert commands(second.stdout) == train_and_show
    assert "successfully loaded checkpoint" in second.stdout
    assert re.findall(r"iteration +(\d+)/ +2 ", second.stdout) == ["2"]
    metrics = read_metrics(run_dir / "metrics.jsonl")
    assert [line["iteration"] for line in metrics] == [1, 2]
    check_board(tmp_path / "board", metrics)
    runs = [path.name for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb")]
    assert len(runs) == 2 > len(set(runs)), "the second start resumes the W&B run"

    folder, sampled, longer, planned = second.stdout[
        second.stdout.rindex("next, in ") :
    ].splitlines()
    assert folder == f"next, in {ROOT}:"
    assert {"TRAIN_ITERS=4", f"TEXT={text}", f"RUN_DIR={run_dir}"} < set(shlex.split(longer))
    generate(shlex.split(sampled)[2:])
    assert run_main(shlex.split(planned)[1:]).mistake is None

    made = [path for path in run_dir.rglob("*") if path.is_file() and path.suffix != ".log"]
    before = {path: path.stat().st_mtime_ns for path in made}
    echoes = executables(tmp_path / "bin", python="echo")
    third = quickstart(run_dir, echoes, TEXT=text, TRAIN_ITERS=2)
    assert third.returncode == 0, third.stdout
    assert commands(third.stdout) == ["report", "generate"]
    assert third.stdout.count("\n= ") + third.stdout.startswith("= ") == 4
    assert summary(third.stdout) == summary(second.stdout)
    assert {path: path.stat().st_mtime_ns for path in made} == before


@pytest.mark.process
def test_a_terminal_gets_bars_and_the_view_and_the_log_the_lines(tmp_path: Path) -> None:
    script = """
[ -t 2 ] && echo "$1 has a terminal"
case $1 in */torchrun.py) echo "trains: $*" ;; esac
"""
    (tmp_path / "text.jsonl").touch()
    here, there = pty.openpty()
    path, text = executables(tmp_path / "bin", python=script), tmp_path / "text.jsonl"
    done = quickstart(tmp_path / "run", path, there, TEXT=text, TRAIN_ITERS=2)
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
@pytest.mark.parametrize(
    ("share", "flags", "message"),
    [
        (0.5, "", "{low:.2f} to {high:.2f} on held-out text, by 5 seeds: {loss:.2f} is inside"),
        (2.0, "", "{loss:.2f} is OUTSIDE (docs/quickstart.md#which-loss-to-expect)"),
        (0.5, "--lr 1", "measured for the default text, flags and"),
        (math.nan, "", "is OUTSIDE"),
    ],
)
def test_the_end_says_whether_the_loss_is_as_expected(
    tmp_path: Path, share: float, flags: str, message: str
) -> None:
    """Tells of a loss at this share of the way through the range that the script expects."""
    found = re.search(r"^EXPECTED_LOSS=\(([\d.]+) ([\d.]+)\)$", SCRIPT.read_text(), re.M)
    low, high = map(float, found.groups())
    loss = low + share * (high - low)
    script = f"""case $1 in */torchrun.py) for word; do
    [ "$last" != --train-iters ] || iters=$word; last=$word; done
echo " [time] iteration        1/ $iters | lm loss: 8.4E+00 | "
echo " validation loss at iteration $iters on validation set | lm loss value: {loss:E} | "
;; esac"""
    on_path = executables(tmp_path / "bin", python=script)
    done = quickstart(tmp_path / "run", on_path, EXTRA_FLAGS=flags)
    assert done.returncode == 0, done.stderr
    (expected,) = re.findall(r"^expected +(.*)$", done.stdout, re.M)
    assert message.format(low=low, high=high, loss=loss) in expected


@pytest.mark.process
def test_ranks_make_two_groups_and_fit_the_cores(tmp_path: Path) -> None:
    done = quickstart(tmp_path / "run", RANKS=3)
    assert (done.returncode, done.stdout) == (2, "RANKS=3: give 2, 4 or 8\n")
    assert not (tmp_path / "run").exists()
    trains = 'case $1 in */torchrun.py) echo "trains: $*" ;; esac'
    for cores, ranks in ((3, 2), (64, 4)):
        path = executables(tmp_path / "bin", python=trains, nproc=f"echo {cores}")
        done = quickstart(tmp_path / f"{ranks} ranks", path, RANKS="")
        flags = f"--paro-group-size {ranks // 2} .* --micro-batch-size {8 // ranks} "
        assert re.search(rf"^trains: .* --nproc-per-node {ranks} .* {flags}", done.stdout, re.M)


# From a Hugging Face folder and conversations to an adapter and an answer

SHORT = "--micro-batch-size 2 --global-batch-size 4 --num-workers 0 --peak-tflops 1"
STEPS = ["convert_checkpoint", "preprocess_data", "pretrain_llama", "convert_checkpoint"]


def finetune(
    model: Path, talks: Path, run_dir: Path, *, on_path: Path | None = None, **settings: object
) -> subprocess.CompletedProcess[str]:
    own = {"RUN_DIR": run_dir, "EXTRA_FLAGS": SHORT, "SEQ_LENGTH": 48, **settings}
    return ended([FINETUNE, model, talks], own, on_path)


@pytest.mark.verify
@pytest.mark.ranks
def test_from_a_folder_and_conversations_to_an_adapter_and_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folder_with(tmp_path, PLAIN)
    save_folder(model, 1, vocab_size=320)
    asked = {"from": "human", "value": "x?"}
    row = {"conversations": [asked, {"from": "gpt", "value": "def"}]}
    talks = write_lines(tmp_path / "talks.jsonl", *[row] * 20)
    run_dir = tmp_path / "a run"
    settings = {"KEYS": "conversations", "QUESTION": "x?"}
    alone = f'''case $1 in *preprocess_data.py) set -- "$@" --workers 1 ;; esac
exec {warm_python()}/python "$@"'''
    here = executables(tmp_path / "alone", python=alone)  # a worker would import transformers, too
    first = finetune(model, talks, run_dir, on_path=here, TRAIN_ITERS=1, **settings)
    assert first.returncode == 0, first.stdout
    assert commands(first.stdout) == [*STEPS, "generate"]
    assert "20 of 20 answers end with a token that stops" in first.stdout
    made = json.loads((run_dir / "peft-1" / "adapter_config.json").read_text())
    assert made["base_model_name_or_path"] == str(model)

    # The command that is printed for more of it, in a pipe.
    words = next(line for line in first.stdout.splitlines() if line.startswith("  python"))
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"x?\nand?\n"), encoding="utf-8"))
    assert printed(generate, *shlex.split(words)[2:], "--max-new-tokens", 3).count("\n") >= 2

    echoes = executables(tmp_path / "bin", python="echo")
    again, longer = (
        finetune(model, talks, run_dir, on_path=echoes, TRAIN_ITERS=count, **settings).stdout
        for count in (1, 2)
    )
    assert commands(again) == ["generate"]
    assert commands(longer) == [*STEPS[2:], "generate"]
    for output, loaded in ((first.stdout, "base"), (longer, "adapter")):
        assert f"--use-checkpoint-args --load '{run_dir}/{loaded}' " in output


@pytest.mark.process
def test_the_commands_of_other_forms_of_conversations(tmp_path: Path) -> None:
    settings = {"DRY_RUN": 1, "RANKS": 6, "KEYS": "instruction input output tools"}
    done = finetune(tmp_path / "m", tmp_path / "t.jsonl", tmp_path / "run", **settings)
    assert (done.returncode, commands(done.stdout)) == (0, [*STEPS, "generate"])
    assert f"--data-path {tmp_path}/run/corpus_instruction_input_output_document" in done.stdout
    assert "--json-keys instruction input output tools" in done.stdout
    assert "--nproc-per-node 6 " in done.stdout
    assert "--global-batch-size 18 " in done.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.process
def test_a_step_that_fails_ends_the_script(tmp_path: Path) -> None:
    done = quickstart(tmp_path / "run", TEXT=tmp_path / "missing.jsonl", TRAIN_ITERS=2)
    assert (done.returncode, commands(done.stdout)) == (2, ["train_tokenizer"])
    assert f"--input {tmp_path / 'missing.jsonl'} is missing" in done.stdout
    done = finetune(tmp_path / "m", tmp_path / "t.jsonl", tmp_path / "run")
    assert (done.returncode, commands(done.stdout)) == (2, STEPS[:1])
    alone = subprocess.run(["bash", FINETUNE], capture_output=True)
    assert alone.returncode == 2
    assert b"give a Hugging Face folder" in alone.stderr
