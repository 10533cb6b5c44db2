"""Files of earlier versions still load: runs resume, and tools accept them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from data.indexed_dataset import IndexedDataset
from paro.machine.files import read_machine
from tests.end_to_end.test_training import read_metrics, run_main
from tests.fixtures.write import END, FIXTURES, MODEL, RUNS, SAVED
from tests.helpers.checkpoints import load_parameters
from tests.helpers.margins import assert_near
from tools.convert_checkpoint import main as convert
from tools.inspect_checkpoint import main as inspect
from tools.preprocess_data import main as preprocess
from tools.report import main as report

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


@pytest.mark.parametrize("name", RUNS)
def test_a_run_resumes(written: Path, name: str) -> None:
    metrics = Path(f"{name}/metrics.jsonl")
    wanted = {row["iteration"]: row for row in read_metrics(metrics)}
    assert [*wanted] == [*range(1, END + 1)]
    flags = [*MODEL.split(), *RUNS[name][2].split(), "--data-path", "corpus_text_document"]
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
