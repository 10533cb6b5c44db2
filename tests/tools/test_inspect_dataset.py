"""A corpus is described, dumped as training reads it, and joined as if written at once."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch import BatchFetcher
from data.fingerprint import Fingerprint, fingerprint_of, read_fingerprint
from data.indexed_dataset import IndexedDataset
from data.loader import MicroBatches
from data.tokenizer_config import TokenizerConfig
from paro.distributed.world import World
from paro.training.assembly import build_data
from tests.data.test_tokenizer import train_sentencepiece
from tests.helpers.corpora import (
    Documents,
    corpus_bytes,
    read_corpus,
    write_conversations,
    write_corpus,
)
from tests.helpers.refusals import printed, read_lines, refused
from tests.helpers.training import configured
from tools.inspect_dataset import main
from tools.inspection.lengths import document_lengths, draw_text, figures, histogram
from tools.merge_datasets import main as merge

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1001"]
EOD = 1000


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    chooser = np.random.default_rng(0)
    sizes = chooser.integers(1, 40, 60).tolist()
    documents = [[[*chooser.integers(0, 999, size).tolist(), EOD]] for size in sizes]
    return write_corpus(tmp_path / "data" / "corpus", [[], *documents])


def dumped(path: Path, *flags: object) -> list[dict[str, list[int]]]:
    printed(main, "--dump-samples", path, *flags)
    return read_lines(path)


def line_with(text: str, *words: object) -> str:
    (line,) = (line for line in printed(main, *words).splitlines() if text in line)
    return line


def test_counts_lengths_and_texts(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "x", [[[1, 2, 3, EOD]], [], [[4], [5, 6]], [[7] * 100]])
    picture = tmp_path / "pictures" / "lengths.png"
    flags = ["--data-path", "0.5", prefix, "--documents", 9, "--histogram", picture]
    out = printed(main, *flags, *NULL)
    for message in (
        f"{prefix}: 4 documents, 4 sequences, 107 tokens as uint16 (0.0 MB)",
        "documents without a token: 1",
        "token ids: 1 to 1000",
        "least 0, 25% 2, median 4, 75% 28, 99% 97, most 100, mean 26.8",
        "end with the end-of-document token: 1 of 3",
        *(f"document 0: '1 2 3 {EOD}'", "document 1: ''", "document 2: '4 5 6'"),
    ):
        assert message in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_every_block_is_checked_and_checksums_are_written_where_there_are_none(
    corpus: Path,
) -> None:
    message = partial(line_with, "checksums", "--data-path", corpus)
    path = Path(f"{corpus}.bin.crc")
    written = path.read_bytes()
    assert f"all blocks of .bin agree with {path}" in message("--write-checksums")
    path.unlink()
    assert f"none, so damage of .bin is not noticed; --write-checksums writes {path}" in message()
    assert not path.exists()
    assert f"written to {path}" in message("--write-checksums")
    assert path.read_bytes() == written
    content = bytearray(Path(f"{corpus}.bin").read_bytes())
    content[-1] ^= 128
    Path(f"{corpus}.bin").write_bytes(content)
    refused(lambda: message("--write-checksums"), "corpus.bin is damaged in bytes 0 to")
    assert path.read_bytes() == written
    both = partial(message, "--write-checksums", "--dump-samples", "x")
    refused(both, "--dump-samples ... --write-checksums: give one")


def test_answered_tokens_are_counted_and_dumped(tmp_path: Path) -> None:
    prefix = write_conversations(tmp_path / "x", [([1, 2, 3], [0, 1, 1])] * 9)
    out = printed(main, "--data-path", prefix, *NULL)
    assert "conversations: 18 tokens (66.7%) are answered" in out
    run = ["--data-path", prefix, "--split", "1,0,0", "--sft", "--seq-length", 4]
    samples = dumped(tmp_path / "samples.jsonl", *run, "--train-samples", 9, *NULL)
    assert samples == [{"tokens": [1, 2, 3, 3], "answered": [0, 1, 1, 0]}] * 9
    empty = write_conversations(tmp_path / "empty", [])
    assert "conversations: 0 tokens are answered" in printed(main, "--data-path", empty, *NULL)


def test_the_tokenizer_of_a_corpus_is_named_and_compared(corpus: Path, tmp_path: Path) -> None:
    smaller = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
    said = "the tokenizer has 1,000 ids: this corpus was made with another"
    assert said in printed(main, "--data-path", corpus, *smaller)
    message = partial(line_with, "made with", "--data-path", corpus)
    assert "that no .tokenizer file names" in message()
    own = train_sentencepiece(tmp_path / "own.model")
    given = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model"]
    config = TokenizerConfig(tokenizer_type=given[1], tokenizer_model=str(own))
    write_corpus(corpus, [[[1]]], made_with=fingerprint_of(config))
    assert f"made with SentencePieceTokenizer {tmp_path.name}/own.model (280 ids" in message()
    assert message(*given, str(own)).endswith(", which is the one given")
    other = train_sentencepiece(tmp_path / "other.model", user_defined_symbols=["zz"])
    named = f"SentencePieceTokenizer {tmp_path.name}/other.model"
    assert f", and not with {named}" in message(*given, str(other))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(1, 70), max_size=3), max_size=12))
def test_lengths_and_histogram_count_every_document(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[list[int]]
) -> None:
    documents = [[[1] * size for size in document] for document in sizes]
    prefix = write_corpus(tmp_path_factory.mktemp("lengths") / "x", documents)
    lengths = document_lengths(IndexedDataset(prefix))
    expected = [sum(document) for document in sizes]
    assert lengths.tolist() == expected
    counts = histogram(lengths)
    for label, count in counts.items():
        first, _, last = label.partition("-")
        assert count == sum(int(first) <= size <= int(last or first) for size in expected)
    assert sum(counts.values()) == len(expected)
    assert len(draw_text(counts)) == len(counts)
    assert figures(lengths) == "no documents" or "mean" in figures(lengths)


TRAINING = [
    *("--num-layers", "1", "--hidden-size", "64", "--num-attention-heads", "1", "--lr", "1"),
    *("--micro-batch-size", "2", "--global-batch-size", "8", "--num-workers", "0"),
]


@pytest.mark.parametrize(("split", "samples"), [("100,0,0", 304), ("70,20,10", 8)])
def test_dumped_samples_are_those_of_a_training(
    corpus: Path, tmp_path: Path, split: str, samples: int
) -> None:
    """On 4 ranks, over several epochs."""
    data = ["--data-path", str(corpus), "--seq-length", "16", "--split", split, "--seed", "7"]
    flags = [*data, *NULL, "--train-samples", str(samples)]
    lines = dumped(tmp_path / "sub" / "samples.jsonl", *flags)
    assert all(list(line) == ["tokens"] for line in lines)
    config = configured([*flags, *TRAINING], World(size=4, ranks_per_node=4))
    place = {"micro_batch_size": 2, "data_parallel_size": 4}
    fetch = BatchFetcher(build_data(config).train)
    ranks = [MicroBatches(fetch, data_parallel_rank=rank, **place) for rank in range(4)]
    rounds = ((next(rank) for rank in ranks) for _ in range(samples // 8))
    seen = [row for batches in rounds for batch in batches for row in batch.tokens_BS.tolist()]
    assert [line["tokens"] for line in lines] == seen
    assert len(seen) == samples


def test_the_command_of_a_training_can_be_taken_as_it_is(corpus: Path, tmp_path: Path) -> None:
    """Reads and writes no file that samples do not depend on."""
    flags = ["--data-path", corpus, "--seq-length", 16, *NULL, *TRAINING, "--train-iters", 3]
    for words in (
        "--load {none} --ckpt-step 3",
        "--load {none} --use-checkpoint-args --use-checkpoint-opt_param-scheduler",
        "--load {none} --exit-on-missing-checkpoint",
        "--save {none} --log-progress --start-over --profile --use-pytorch-profiler",
        "--save {none} --paro-strategy IIG --paro-group-size 4",
        "--paro-strategy IIG --paro-materialize rotate --paro-rotate-in-place",
    ):
        more = words.format(none=tmp_path / "none").split()
        assert len(dumped(tmp_path / "samples.jsonl", *flags, *more)) == 24
        assert not (tmp_path / "none").exists()


def test_the_samples_of_an_iteration_have_numbers_and_text(corpus: Path, tmp_path: Path) -> None:
    """With rising batch sizes: of 2, 2, 4, 4, 6 samples and so on."""
    flags = ["--data-path", corpus, "--seq-length", 16, *NULL, "--train-samples", 40]
    whole = dumped(tmp_path / "whole.jsonl", *flags)
    rising = [*flags, "--global-batch-size", 8, "--rampup-batch-size", 2, 2, 12]
    third = dumped(tmp_path / "third.jsonl", *rising, "--iteration", 3)
    assert [line["number"] for line in third] == [5, 6, 7, 8]
    assert [line["tokens"] for line in third] == [line["tokens"] for line in whole[4:8]]
    assert third[0]["text"].split() == list(map(str, third[0]["tokens"]))
    phases = [{"name": "one", "samples": 4, "data": "gone"}, {"name": "two", "data": str(corpus)}]
    (tmp_path / "phases.json").write_text(json.dumps(phases))
    phased = ["--data-phases", tmp_path / "phases.json", *rising[2:], "--iteration", 3]
    assert len(dumped(tmp_path / "phased.jsonl", *phased)) == 4
    out = ["--dump-samples", str(tmp_path / "x")]
    for words, message in (
        ([*rising, *out, "--iteration", 9], "the training ends before"),
        ([*flags, *out, "--iteration", 1], "--iteration needs --global-batch-size"),
        ([*rising, "--iteration", 1], "--iteration needs --dump-samples"),
        ([*rising, *out, "--iteration", 0], "--iteration 0"),
    ):
        refused(partial(printed, main, *words), message)


def test_mock_data_can_be_dumped_and_a_failure_leaves_what_was_there(
    corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "samples.jsonl"
    mock = ("--mock-data", "--vocab-size", 50, "--seq-length", 8, "--train-samples", 5)
    assert [len(sample["tokens"]) for sample in dumped(out, *mock)] == [8] * 5
    out.write_text("before")
    flags = ["--data-path", str(corpus), "--seq-length", "99999", "--train-samples", "1", *NULL]
    refused(lambda: main(["--dump-samples", str(out), *flags]), "--seq-length 99999 is longer")
    assert out.read_text() == "before"


SEQUENCE = st.lists(st.integers(0, 65535), min_size=1, max_size=5)
CORPORA = st.lists(st.lists(st.lists(SEQUENCE, max_size=3), max_size=6), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(corpora=CORPORA)
def test_joined_is_as_if_written_at_once(
    tmp_path_factory: pytest.TempPathFactory, corpora: list[Documents]
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    for number in reversed(range(len(corpora))):
        write_corpus(folder / f"part{number}", corpora[number])
    (folder / "notes.txt").write_text("not a data set")
    merged(folder, folder / "sub" / "all")
    write_corpus(folder / "once", [document for corpus in corpora for document in corpus])
    assert corpus_bytes(folder / "sub" / "all") == corpus_bytes(folder / "once")


def merged(source: Path, target: Path) -> str:
    return printed(merge, "--input", source, "--output-prefix", target)


def test_half_data_sets_other_types_folders_and_targets_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write_corpus(folder / "a", [[[1]]])
    before = (folder / "a.bin").read_bytes()
    for source, target, message in (
        (tmp_path / "none", tmp_path / "x", f"--input {tmp_path / 'none'} is no folder"),
        (tmp_path, tmp_path / "x", "holds no data set"),
        (folder, folder / "a", f"--output-prefix {folder / 'a'}"),
    ):
        refused(partial(merged, source, target), message)
    for missing in ("b.bin", "b.idx"):
        (write_corpus(folder / "b", [[[1]]]).parent / missing).unlink()
        refused(lambda: merged(folder, tmp_path / "x"), f"{missing} is missing")
    write_corpus(folder / "b", [[[70000]]], "<i4")
    refused(lambda: merged(folder, tmp_path / "x"), "holds int32")
    assert (folder / "a.bin").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_damaged_part_is_refused_and_a_part_without_checksums_gets_them(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write_corpus(folder / "a", [[[1, 2, 3]]])
    write_corpus(folder / "b", [[[4, 5]]])
    (folder / "b.bin").write_bytes(b"\x05\0\x05\0")
    write_corpus(tmp_path / "x", [[[9]]])
    message = f"{folder / 'b'}.bin is damaged in bytes 0 to 4,"
    refused(lambda: merged(folder, tmp_path / "x"), message)
    assert read_corpus(tmp_path / "x") == [[[9]]]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["in", "x.bin", "x.bin.crc", "x.idx"]
    (folder / "b.bin.crc").unlink()
    merged(folder, tmp_path / "x")
    assert read_corpus(tmp_path / "x") == [[[1, 2, 3]], [[5, 5]]]
    assert IndexedDataset(tmp_path / "x").has_checksums


def made(prefix: Path, digest: str, token_bytes: str | None = None) -> None:
    named = {"tokenizer_type": "Llama2Tokenizer", "file": f"{digest}.model", "vocab_size": 2}
    made_with = Fingerprint(**named, digest=digest, token_bytes=token_bytes)
    write_corpus(prefix, [[[1]]], made_with=made_with)


def test_corpora_of_two_tokenizers_are_refused_and_one_is_carried(tmp_path: Path) -> None:
    folder, target = tmp_path / "in", tmp_path / "all"
    made(folder / "a", "one")
    made(folder / "b", "one", "0 3")
    assert "made with Llama2Tokenizer one.model (2 ids" in merged(folder, target)
    assert read_fingerprint(target) == read_fingerprint(folder / "b") is not None
    write_corpus(folder / "c", [[[1]]])
    assert "an unknown tokenizer: not all of them say" in merged(folder, target)
    assert read_fingerprint(target) is None
    made(folder / "d", "two")
    message = (f"{folder / 'a'}.bin ... one.model", f"{folder / 'd'}.bin ... two.model")
    refused(lambda: merged(folder, target), *message)
