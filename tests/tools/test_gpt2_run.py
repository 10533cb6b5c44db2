"""A run with GPT-2's tokenizer: corpus, checkpoint, other formats, and generated text."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from data.indexed_dataset import IndexedDataset
from data.tokenizer import END, build_tokenizer
from data.tokenizer_config import tokenizer_config
from paro.checkpoint.convert.hugging_face import open_hugging_face
from tests.helpers.commands import output_of, printed, write_lines
from tests.helpers.gpt2 import TEXT, write_gpt2
from tests.helpers.refusals import refused
from tests.helpers.training import save_run
from tests.tools.untrained import convert, trained
from tools import generate, inspect_dataset, preprocess_data


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Megatron's own default type: it needs no flag."""
    (tmp_path / "gpt2").mkdir()
    vocab_file, merge_file = write_gpt2(tmp_path / "gpt2")
    return ["--vocab-file", str(vocab_file), "--merge-file", str(merge_file)]


@pytest.fixture
def saved(tmp_path: Path, flags: list[str]) -> Path:
    """A checkpoint as the trainer writes it, of the untrained model."""
    config, training = trained(tmp_path / "saved", *flags, "--padded-vocab-size", "310")
    assert (config.vocab_size, config.eod, config.model.vocab_size) == (301, 300, 310)
    save_run(config, training)
    return tmp_path / "saved"


def test_a_corpus_is_made_and_looked_at(tmp_path: Path, flags: list[str]) -> None:
    text = write_lines(tmp_path / "a.jsonl", {"text": TEXT})
    command = ["--input", str(text), "--output-prefix", str(tmp_path / "c"), "--workers", "1"]
    preprocess_data.main([*command, *flags, "--append-eod", "--partitions", "2"])
    config = tokenizer_config({"vocab_file": flags[1], "merge_file": flags[3]})
    assert config is not None, "the files name the type"
    expected = [*build_tokenizer(config).encode(TEXT), 300]
    assert IndexedDataset(tmp_path / "c_text_document")[0].tolist() == expected
    told = printed(inspect_dataset.main, "--data-path", tmp_path / "c_text_document", *flags)
    assert "end with the end-of-document token: 1 of 1" in told
    assert repr(TEXT) in told


def test_partitions_of_other_files_are_no_partitions_of_these(
    tmp_path: Path, flags: list[str]
) -> None:
    (tmp_path / "bad").mkdir()
    write_lines(tmp_path / "bad" / "a.jsonl", {"text": TEXT})
    (tmp_path / "bad" / "b.jsonl").write_text("broken\n")
    command = ["--input", str(tmp_path / "bad"), "--output-prefix", str(tmp_path / "c")]
    command += [*flags, "--workers", "1", "--partitions", "2"]
    refused(lambda: preprocess_data.main(command), "b.jsonl")
    merges = Path(flags[3])
    merges.write_text("\n".join(merges.read_text(encoding="utf-8").splitlines()[:-1]) + "\n")
    refused(lambda: preprocess_data.main(command), "c_partitions")


def continued(folder: Path, *words: object) -> str:
    flags = ["--load", folder, "--prompt", "The fox", "--temperature", 0, "--max-new-tokens", 6]
    return printed(generate.main, *flags, *words)


def test_every_format_brings_the_tokenizer_along(tmp_path: Path, saved: Path) -> None:
    text = continued(saved)
    hf = convert("paro", "hf", saved, tmp_path / "hf")
    files = {path.name for path in hf.iterdir()}
    assert {"vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json"} <= files
    fields = json.loads((hf / "config.json").read_text())
    assert (fields["vocab_size"], fields["eos_token_id"]) == (310, 300)
    assert json.loads((hf / "tokenizer_config.json").read_text())["eos_token"] == END
    assert open_hugging_face(hf).tokenizer is not None
    again = convert("paro", "paro", saved, tmp_path / "again", "--padded-vocab-size", "400")
    megatron = convert("paro", "megatron", saved, tmp_path / "megatron")
    back = convert("megatron", "paro", megatron, tmp_path / "back")
    shutil.rmtree(tmp_path / "gpt2")  # each folder has its own copy
    for folder in (hf, again, back):
        assert continued(folder) == text, folder
    common = json.loads((again / "iter_0000000" / "common.json").read_text())
    assert (common["model"]["vocab_size"], common["vocab_size"]) == (400, 310)


def test_files_that_moved_are_found_by_their_folder(tmp_path: Path, saved: Path) -> None:
    text = continued(saved)
    (tmp_path / "gpt2").rename(tmp_path / "elsewhere")
    refused(lambda: continued(saved), "--tokenizer-model")
    assert continued(saved, "--tokenizer-model", tmp_path / "elsewhere") == text
    told = output_of(lambda: convert("paro", "hf", saved, tmp_path / "hf"))
    assert not (tmp_path / "hf" / "tokenizer.json").exists()
    assert "converted without it" in told


def test_rows_that_do_not_hold_the_vocabulary_are_refused(tmp_path: Path, saved: Path) -> None:
    for target, message in (("paro", "is less than the 310 entries"), ("hf", "holds no padding")):
        less = ("paro", target, saved, tmp_path / "out", "--padded-vocab-size", 300)
        refused(partial(convert, *less), f"--padded-vocab-size 300 ... {message}")
    assert not (tmp_path / "out").exists()
