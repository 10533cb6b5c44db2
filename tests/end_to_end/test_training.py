"""The real command line trains, resumes bitwise, exits, fails together, and loads earlier files."""

# Behaviour that only a launcher shows (environment, exit statuses, signals) is tested with torchrun
# or a separate process. Everything else runs the script's `main` on ranks that already exist: a
# start costs more than the training.

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import pretrain_llama
from data.indexed_dataset import IndexedDataset
from paro.errors import RunError, UserError
from paro.machine.files import read_machine
from tests.fixtures import write
from tests.fixtures.write import END, FIXTURES, RUNS, SAVED
from tests.helpers.corpora import write_corpus
from tests.helpers.margins import assert_near
from tests.helpers.ranks import run_ranks
from tests.helpers.refusals import refused
from tests.helpers.scripts import python_apart, run_script
from tests.helpers.training import load_parameters
from tools.convert_checkpoint import main as convert
from tools.inspect_checkpoint import main as inspect
from tools.preprocess_data import main as preprocess
from tools.report import main as report

SCRIPT = "pretrain_llama.py"
MODEL = [
    *("--distributed-backend", "gloo", "--tokenizer-type", "NullTokenizer", "--vocab-size", "128"),
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--ffn-hidden-size", "88", "--seq-length", "32", "--micro-batch-size", "1"),
    *("--global-batch-size", "8", "--lr", "3e-3", "--log-interval", "1", "--num-workers", "0"),
    *("--eval-iters", "0", "--lr-warmup-samples", "8", "--peak-tflops", "1"),
]
RUN = [SCRIPT, *MODEL, "--mock-data"]


@dataclass(frozen=True, slots=True)
class Ended:
    """The output of a rank, and the error in one line that ended it, if any."""

    printed: str
    mistake: str | None
    status: int = 0


def run_main(words: Sequence[str]) -> Ended:
    """Runs the script in this process, which is a rank if the environment says so."""
    printed, mistake, status = StringIO(), None, 0
    with mock.patch.object(sys, "argv", [*words]), redirect_stdout(printed):
        try:
            pretrain_llama.main()
        except (UserError, RunError) as error:
            mistake, status = str(error), 2 if isinstance(error, UserError) else 1
    return Ended(printed.getvalue(), mistake, status)


def split(words: Iterable[object]) -> list[str]:
    return shlex.split(" ".join(map(str, words)))


def run(*words: object, base: Sequence[str] = RUN) -> str:
    """The output of one process that trains the small model, by default on mock data."""
    ended = run_main([*base, *split(words)])
    assert ended.mistake is None, ended.mistake
    return ended.printed


def launch(*words: object) -> None:
    """Trains the small model, shows nothing, and raises what ends it."""
    argv = [SCRIPT, *MODEL, *split(words)]
    with mock.patch.object(sys, "argv", argv), redirect_stdout(StringIO()):
        pretrain_llama.main()


def on_ranks(command: Sequence[object], world_size: int) -> str:
    """The output of all ranks, in rank order."""
    ended = run_ranks(run_main, world_size, [str(word) for word in command], init=False)
    assert [rank.mistake for rank in ended] == [None] * world_size
    return "".join(rank.printed for rank in ended)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.ranks
def test_learns_logs_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    flags = [*RUN, "--train-iters", "12", "--paro-strategy", "IIG", "--paro-group-size", "2"]
    whole = tmp_path / "whole.jsonl"
    done = run_script([*flags, "--metrics-file", whole], nproc=4)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"iteration +(\d+)/ +12 \| consumed samples: +(\d+) \|.*MFU", done.stdout)
    assert lines == [(str(i), str(8 * i)) for i in range(1, 13)]
    straight = read_metrics(whole)
    assert straight[-1]["lm_loss"] < straight[0]["lm_loss"] - 0.1

    halves = tmp_path / "halves.jsonl"
    save = ["--save", tmp_path / "ckpt", "--load", tmp_path / "ckpt", "--metrics-file", halves]
    assert "holds no checkpoint" in on_ranks([*flags, *save, "--exit-interval", "5"], 4)
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text().strip() == "5"
    assert "successfully loaded checkpoint" in on_ranks([*flags, *save], 4)
    resumed = read_metrics(halves)
    assert [line["iteration"] for line in resumed] == list(range(1, 13))
    for one, other in zip(straight, resumed, strict=True):
        for name in ("lm_loss", "grad_norm", "learning_rate", "consumed_samples"):
            assert one[name] == other[name], f"{name} at iteration {one['iteration']}"
    steady = [(line["intra_bytes"], line["inter_bytes"]) for line in straight[1:]]
    assert len(set(steady)) == 1
    assert (resumed[-1]["intra_bytes"], resumed[-1]["inter_bytes"]) == steady[0]


def evaluations(printed: str) -> dict[str, float]:
    """The loss of every data set evaluated after training."""
    found = re.findall(r"on (\w+) set \| lm loss value: (\S+) \|", printed)
    return {name: float(loss) for name, loss in found}


@pytest.mark.ranks
def test_skip_train_evaluates_what_was_saved_and_writes_nothing(tmp_path: Path) -> None:
    flags = [*RUN, "--train-iters", "3", "--eval-iters", "2", "--load", tmp_path / "ckpt"]
    # One evaluation during training, of the same samples as that of --skip-train.
    trained = on_ranks([*flags, "--save", tmp_path / "ckpt", "--eval-interval", "3"], 1)
    (on_the_way,) = re.findall(r"validation loss at iteration 3 \| lm loss value: (\S+)", trained)
    wanted = evaluations(trained) | {"validation": float(on_the_way)}
    assert wanted.keys() == {"validation", "test"}
    samples = re.findall(r"validation loss at .* \| samples: (.*) \|", trained)
    assert samples == ["1 to 16", "17 to 32", "1 to 16"]
    before = sorted(tmp_path.rglob("*"))
    records = ["--metrics-file", tmp_path / "metrics", "--tensorboard-dir", tmp_path / "board"]
    spread = ["--paro-strategy", "GGG", "--paro-group-size", "2"]
    skipped = on_ranks([*flags, *records, *spread, "--skip-train", "--save", tmp_path / "new"], 4)
    assert_near(evaluations(skipped).values(), wanted.values(), 1e-5, "evaluated after loading")
    assert re.findall(r"validation loss at .* \| samples: (.*) \|", skipped) == ["1 to 16"] * 2
    assert "skipping training (--skip-train is on) ..." in skipped
    assert re.search(r"^optimizer +G .* 0\.00$", skipped, re.MULTILINE)  # parameters only
    assert "iteration        " not in skipped
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.ranks
@pytest.mark.parametrize(
    "sender", ["IIG", pytest.param("IIG --paro-materialize rotate", marks=pytest.mark.verify)]
)
def test_skip_train_evaluates_what_was_computed_with(tmp_path: Path, sender: str) -> None:
    """Updates that are sent as codes leave a part of the masters behind."""
    words = (
        "--train-iters 4 --eval-iters 2 --eval-interval 4 --bf16 --hidden-size 64 "
        "--ffn-hidden-size 152 --paro-group-size 2 --paro-inter-param-bits 4 "
        f"--paro-inter-bits-warmup-iters 0 --paro-strategy {sender} --load {tmp_path}"
    )
    flags = [*RUN, *words.split()]
    trained = on_ranks([*flags, "--save", tmp_path], 4)
    skipped = on_ranks([*flags, "--skip-train"], 4)
    (on_the_way,) = re.findall(r"validation loss at iteration 4 \| lm loss value: (\S+)", trained)
    assert evaluations(skipped)["validation"] == float(on_the_way)
    assert evaluations(skipped)["test"] == evaluations(trained)["test"]


@pytest.mark.ranks
def test_mistakes_end_every_rank_with_one_line(tmp_path: Path) -> None:
    done = run_script([*RUN, "--train-iters", "2", "--paro-strategy", "IIN"], nproc=2)
    assert done.returncode == 1  # torchrun's own; each rank exits with 2
    assert len(re.findall(r"^pretrain_llama.py: error: ", done.stderr, re.MULTILINE)) == 1
    assert len(re.findall(r"exitcode *: 2", done.stderr)) >= 1
    assert "Traceback" not in done.stdout
    lines = done.stderr.splitlines()
    (line,) = (line for line in lines if line.startswith("pretrain_llama.py: error: "))
    assert "--paro-strategy IIN is not legal" in line
    assert lines[-2].endswith(f" : {line}"), "torchrun's report does not end with it"

    # Found by the ranks together, after they have connected.
    write_corpus(tmp_path / "high", [[[*range(100), 200] * 40]])
    data = ["--data-path", tmp_path / "high", "--split", "1,0,0", "--train-iters", "2"]
    done = run_script([SCRIPT, *MODEL, *data], nproc=2)
    assert done.returncode == 1
    assert len(re.findall(r"^pretrain_llama.py: error: ", done.stderr, re.MULTILINE)) == 1


def files_in(root: Path) -> dict[Path, bytes]:
    """The contents of all files, but not who holds the folder."""
    files = [path for path in root.rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in files if not path.match("lease_*.json")}


@pytest.mark.slow("trains and saves")
def test_a_checkpoint_of_another_model_is_refused_and_kept(tmp_path: Path) -> None:
    words = f"--train-iters 3 --save {tmp_path} --load {tmp_path}"
    run(words)
    before = files_in(tmp_path)
    other = f"--mock-data {words} --ffn-hidden-size 96"
    refused(lambda: launch(other), "ffn_hidden_size is 88 there and 96 here")
    assert files_in(tmp_path) == before


# Whose mistake: a user's file is one line and status 2, a bug keeps its traceback


def bug(*_: object, **__: object) -> None:
    """What a bug of ours may look like: a `ValueError`, as a mistake of a user is one."""
    list(zip([1], [], strict=True))


@pytest.mark.slow("trains a step")
def test_a_bug_is_no_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"--mock-data --save {tmp_path} --load {tmp_path} --train-iters"
    launch(words, 2)
    for place in (
        "config.resolve.OpenChoices.decide",
        "checkpoint.load._check_model",
        "checkpoint.storage.CheckedReader._read_chunk",
        "checkpoint.load.read_saved",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"paro.{place}", bug)
            with pytest.raises(ValueError, match=r"zip\(\) argument 2 is shorter") as caught:
                launch(words, 3)
        assert not isinstance(caught.value, UserError), place


# torch.compile, DCP and transformers take as long to import as the rest of a start.
SLOW = ("torch._dynamo", "torch.distributed.checkpoint", "transformers", "matplotlib")
PROGRAM = f"""
import sys
from pretrain_llama import main
main()
print([name for name in {SLOW} if name in sys.modules])
"""


@pytest.mark.process
def test_a_run_without_checkpoints_imports_nothing_that_takes_long() -> None:
    flags = [*MODEL, "--mock-data", "--train-iters", "2"]
    assert python_apart(PROGRAM, *flags).splitlines()[-1] == "[]"


SETS = sorted(path for path in FIXTURES.iterdir() if (path / "machine.json").exists())
VOCAB_SIZE = "32"
TOLERANCES = {"nng-bf16-async": 2e-3}  # bf16 gradients, summed in another order on one rank


@pytest.fixture(params=SETS, ids=lambda path: path.name)
def written(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A copy of a set of fixtures, in which the tests run."""
    place = tmp_path / "set"
    shutil.copytree(request.param, place)
    monkeypatch.chdir(place)
    return place


@pytest.mark.slow("trains several times")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_resumes(written: Path, name: str) -> None:
    metrics = Path(f"{name}/metrics.jsonl")
    wanted = {row["iteration"]: row for row in read_metrics(metrics)}
    assert [*wanted] == [*range(1, END + 1)]
    flags = [*write.MODEL.split(), *RUNS[name][2].split(), "--data-path", "corpus_text_document"]
    flags += ["--tokenizer-type", "NullTokenizer", "--vocab-size", VOCAB_SIZE]
    flags += ["--load", f"{name}/saved", "--save", f"{name}/saved", "--metrics-file", str(metrics)]
    ended = run_main(["pretrain_llama.py", *flags])
    assert ended.mistake is None
    assert f"at iteration {SAVED}" in ended.printed
    resumed = {row["iteration"]: row for row in read_metrics(metrics)}
    assert [*resumed] == [*wanted]
    for iteration in range(SAVED + 1, END + 1):
        for field in ("lm_loss", "grad_norm", "learning_rate", "consumed_samples"):
            figures = [resumed[iteration][field]], [wanted[iteration][field]]
            assert_near(*figures, TOLERANCES.get(name, 1e-5), f"{field} of {iteration}")


@pytest.mark.parametrize("form", ["hf", "megatron"])
def test_a_converted_folder_comes_back(written: Path, form: str) -> None:
    flags = ["--make-vocab-size-divisible-by", "4", "--input", form, "--output", "back"]
    convert(["--from", form, "--to", "paro", *flags])
    back, wanted = load_parameters(Path("back")), load_parameters(Path("iig/saved"))
    assert back.keys() == wanted.keys()
    for name, values in wanted.items():
        assert torch.equal(back[name], values), name


def test_preprocessing_continues_after_its_finished_partition(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads(Path("halfway_partitions/run.json").read_text(encoding="utf-8"))
    # A checkout sets its own modification times.
    stamp = record["partitions"][0][0]["stamp"]
    os.utime("text.jsonl", ns=(stamp, stamp))
    for name, (_, stamp) in record["tokenizer_files"].items():
        os.utime(name, ns=(stamp, stamp))
    flags = ["--input", "text.jsonl", "--append-eod", "--tokenizer-type", "HuggingFaceTokenizer"]
    flags += ["--tokenizer-model", "tokenizer.json", "--workers", "1", "--partitions", "2"]
    preprocess([*flags, "--output-prefix", "halfway"])
    assert "partition 1 of 2 is done already" in capsys.readouterr().err
    whole, joined = (IndexedDataset(f"{name}_text_document") for name in ("corpus", "halfway"))
    assert len(whole) == len(joined)
    for one, other in zip(whole, joined, strict=True):
        assert (one == other).all()


@pytest.mark.slow("imports matplotlib")
def test_tools_read_records(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = read_machine(Path("machine.json"))
    assert (machine.world_size, machine.group_size) == (2, 1)
    assert machine.measured
    metrics = [f"{name}/metrics.jsonl" for name in RUNS]
    report([*metrics, "--output", "report.html"])
    page = Path("report.html").read_text(encoding="utf-8")
    assert "IIG" in page
    capsys.readouterr()
    for name in RUNS:
        inspect(["--load", f"{name}/saved"])
        assert "blocks.1.wq" in capsys.readouterr().out
