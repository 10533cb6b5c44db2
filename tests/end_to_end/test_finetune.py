"""The script from a Hugging Face folder and conversations to an adapter and an answer."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.test_quickstart import commands, programs
from tests.helpers.commands import write_lines
from tests.helpers.ranks import ROOT
from tests.helpers.warm_python import warm_python
from tests.paro.checkpoint.convert.folders import save_folder
from tests.tools.preprocessing.templates import PLAIN
from tests.tools.preprocessing.test_chat_template import folder_with

SHORT = "--micro-batch-size 2 --global-batch-size 4 --num-workers 0 --peak-tflops 1"
STEPS = ["convert_checkpoint", "preprocess_data", "pretrain_llama", "convert_checkpoint"]


def finetune(
    model: Path, talks: Path, run_dir: Path, *, on_path: Path | None = None, **settings: object
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "examples" / "finetune.sh"), str(model), str(talks)],
        env={
            **os.environ,
            "PATH": f"{on_path or warm_python()}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "RUN_DIR": str(run_dir),
            "EXTRA_FLAGS": SHORT,
            "SEQ_LENGTH": "48",
            **{name: str(value) for name, value in settings.items()},
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.ranks
def test_from_a_folder_and_conversations_to_an_adapter_and_an_answer(tmp_path: Path) -> None:
    model = folder_with(tmp_path, PLAIN)
    save_folder(model, 1, vocab_size=320)
    asked = {"from": "human", "value": "x?"}
    row = {"conversations": [asked, {"from": "gpt", "value": "def"}]}
    talks = write_lines(tmp_path / "talks.jsonl", *[row] * 20)
    run_dir = tmp_path / "a run"
    settings = {"KEYS": "conversations", "QUESTION": "x?"}
    first = finetune(model, talks, run_dir, TRAIN_ITERS=1, **settings)
    assert first.returncode == 0, first.stdout
    assert commands(first.stdout) == [*STEPS, "generate"]
    assert "20 of 20 answers end with a token that stops" in first.stdout
    made = json.loads((run_dir / "peft-1" / "adapter_config.json").read_text())
    assert made["base_model_name_or_path"] == str(model)

    # The command that is printed for more of it, in a pipe.
    words = next(line for line in first.stdout.splitlines() if line.startswith("  python"))
    talk = subprocess.run(
        [f"{warm_python()}/python", *shlex.split(words)[1:], "--max-new-tokens", "3"],
        cwd=ROOT,
        input="x?\nand?\n",
        capture_output=True,
        text=True,
        errors="replace",
    )
    assert (talk.returncode, talk.stderr) == (0, "")
    assert talk.stdout.count("\n") >= 2

    echoes = programs(tmp_path / "bin", "echo")
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
    done = finetune(tmp_path / "m", tmp_path / "t.jsonl", tmp_path / "run")
    assert (done.returncode, commands(done.stdout)) == (2, STEPS[:1])
    alone = subprocess.run(["bash", ROOT / "examples" / "finetune.sh"], capture_output=True)
    assert alone.returncode == 2
    assert b"give a Hugging Face folder" in alone.stderr
