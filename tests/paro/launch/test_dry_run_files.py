"""Files in a dry run: what is on this machine is checked, and what is not is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.fingerprint import Fingerprint
from paro.checkpoint.directory import begin_checkpoint, finish_checkpoint
from tests.helpers.corpora import write_corpus
from tests.helpers.refusals import refused
from tests.paro.launch.test_dry_run import MOCK, SMALL, printed, run


def test_a_corpus_that_is_here_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = write_corpus(tmp_path / "here", [[range(60)], [range(40)]])
    flags = f"{SMALL} --data-path 1 {here} 2 {tmp_path}/elsewhere --dry-run --world-size 4"
    before = sorted(tmp_path.iterdir())
    out = printed(flags, capsys)
    assert f"> data: {here} holds 100 tokens in 2 documents, with checksums\n" in out
    assert f"> data: {tmp_path}/elsewhere is not on this machine and was not checked\n" in out
    assert sorted(tmp_path.iterdir()) == before


def test_a_corpus_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", [[range(600)]])
    words = f"{SMALL} --data-path {tmp_path}/c --dry-run --world-size 4"
    refused(lambda: run(words), "holds token id 599, the vocabulary has 100")


@pytest.mark.parametrize(
    ("flags", "is_here"),
    [
        ("--tokenizer-type NullTokenizer", True),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model nowhere.model", False),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model nowhere.json", False),
        ("--vocab-file nowhere --merge-file nowhere", False),
        ("", False),
        ("--llama-preset 7B", False),
        ("--padded-vocab-size 128", False),
    ],
)
def test_a_vocabulary_stands_for_a_tokenizer_that_is_not_here(
    flags: str, is_here: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_with = Fingerprint(tokenizer_type="T", file="f", vocab_size=60, digest="")
    corpus = write_corpus(tmp_path / "here", [[range(60)]], made_with=made_with)
    size = "" if "--llama-preset" in flags or "--padded" in flags else "--vocab-size 100"
    common = SMALL.replace("--vocab-size 100 --tokenizer-type NullTokenizer", size)
    words = f"{common} {flags} --data-path {corpus} --dry-run --world-size 2"
    out = printed(words, capsys)
    rows = 32000 if "--llama-preset" in flags else 128 if "--padded" in flags else 100
    told = f"> tokenizer: none on this machine; a vocabulary of {rows:,} instead\n"
    assert (told in out) is not is_here
    assert f"> data: {corpus} holds 60 tokens" in out


def test_without_a_vocabulary_a_missing_tokenizer_is_refused() -> None:
    words = SMALL.replace("--vocab-size 100 --tokenizer-type NullTokenizer", "--data-path text")
    dry = f"{words} --dry-run --world-size 2"
    advice = "give --tokenizer-type NullTokenizer --vocab-size"
    refused(lambda: run(dry), f"--tokenizer-type is missing ... {advice}")
    file = "--tokenizer-type Llama2Tokenizer --tokenizer-model nowhere"
    refused(lambda: run(f"{dry} {file}"), f"--tokenizer-model nowhere is missing ... {advice}")
    refused(lambda: run(f"{words} {file} --vocab-size 100"), "--tokenizer-model nowhere is missing")
    refused(lambda: run(f"{words} --vocab-size 100"), "--tokenizer-type is missing")


def test_checkpoints_that_would_be_mixed_up_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finish_checkpoint(begin_checkpoint(tmp_path, 5), 5, {})
    words = f"{MOCK} --save {tmp_path} --dry-run --world-size 4"
    refused(lambda: run(words), "holds a checkpoint, iteration 5 ... no --load")
    assert "> the launch would fail: " in capsys.readouterr().out
