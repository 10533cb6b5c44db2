"""The tool's report on a corpus, and the samples it writes: those that a training run reads."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import indexed_dataset
from data.batch import Fetch
from data.fingerprint import fingerprint_of
from data.indexed_dataset import IndexedDataset
from data.loader import MicroBatches
from data.tokenizer_config import TokenizerConfig
from paro.distributed.world import World
from paro.training.assembly import build_data
from tests.data.test_tokenizer import train_sentencepiece
from tests.helpers.corpora import write_conversations, write_corpus
from tests.helpers.flags import configured
from tests.helpers.refusals import refused
from tools.inspect_dataset import main
from tools.inspection import contents
from tools.inspection.lengths import document_lengths, draw_text, figures, histogram

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1001"]
DUMP = ["--dump-samples", "x", *NULL]
EOD = 1000


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    chooser = np.random.default_rng(0)
    sizes = chooser.integers(1, 40, 60).tolist()
    documents = [[[*chooser.integers(0, 999, size).tolist(), EOD]] for size in sizes]
    return write_corpus(tmp_path / "data" / "corpus", [[], *documents])


def test_counts_lengths_and_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_corpus(tmp_path / "x", [[[1, 2, 3, EOD]], [], [[4], [5, 6]], [[7] * 100]])
    picture = tmp_path / "pictures" / "lengths.png"
    flags = ["--data-path", "0.5", str(prefix), "--documents", "9", "--histogram", str(picture)]
    main([*flags, *NULL])
    out = capsys.readouterr().out
    assert f"{prefix}: 4 documents, 4 sequences, 107 tokens as uint16 (0.0 MB)" in out
    assert "documents without a token: 1" in out
    assert "token ids: 1 to 1000" in out
    assert "least 0, 25% 2, median 4, 75% 28, 99% 97, most 100, mean 26.8" in out
    assert "end with the end-of-document token: 1 of 3" in out
    assert f"document 0: '1 2 3 {EOD}'" in out
    assert "document 1: ''" in out
    assert "document 2: '4 5 6'" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_every_block_is_checked_and_checksums_are_written_where_there_are_none(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*words: str) -> str:
        main(["--data-path", str(corpus), *words])
        (line,) = (line for line in capsys.readouterr().out.splitlines() if "checksums" in line)
        return line

    path = Path(f"{corpus}.bin.crc")
    written = path.read_bytes()
    assert told("--write-checksums") == f"  checksums: all blocks of .bin agree with {path}"
    path.unlink()
    none = f"  checksums: none, so damage of .bin is not noticed; --write-checksums writes {path}"
    assert told() == none
    assert not path.exists()
    assert told("--write-checksums") == f"  checksums: written to {path}, of .bin as it is now"
    assert path.read_bytes() == written
    content = bytearray(Path(f"{corpus}.bin").read_bytes())
    content[-1] ^= 128
    Path(f"{corpus}.bin").write_bytes(content)
    refused(lambda: told("--write-checksums"), "corpus.bin is damaged in bytes 0 to")
    assert path.read_bytes() == written
    both = partial(told, "--write-checksums", "--dump-samples", "x")
    refused(both, "--dump-samples ... --write-checksums: give one")


def test_answered_tokens_are_counted_and_dumped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write_conversations(tmp_path / "x", [([1, 2, 3], [0, 1, 1])] * 9)
    main(["--data-path", str(prefix), *NULL])
    assert "conversations: 18 tokens (66.7%) are answered" in capsys.readouterr().out
    run = ["--data-path", str(prefix), "--split", "1,0,0", "--sft", "--seq-length", "4"]
    dump = tmp_path / "samples.jsonl"
    main([*run, "--train-samples", "9", "--dump-samples", str(dump), *NULL])
    samples = [json.loads(line) for line in dump.read_text().splitlines()]
    assert samples == [{"tokens": [1, 2, 3, 3], "answered": [0, 1, 1, 0]}] * 9


def test_long_reads_say_how_far_they_are(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(indexed_dataset, "PART_TOKENS", 300)
    monkeypatch.setattr(contents, "NOTICE_SECONDS", 0.0)
    main(["--data-path", str(corpus), *NULL])
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    num_tokens = IndexedDataset(corpus).num_tokens
    assert len(lines) == -(-num_tokens // 300)
    assert lines[0] == f"{corpus}.bin: {30000 // num_tokens}% read, 0 s left"
    assert "token ids: " in printed.out
    assert "end with the end-of-document token: 60 of 60" in printed.out


def test_files_of_blends_are_understood(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "blend").write_text(f"1 {corpus}\n")
    (tmp_path / "splits").write_text(json.dumps({"train": [str(corpus)]}))
    for flag, name in (("--data-args-path", "blend"), ("--per-split-data-args-path", "splits")):
        main([flag, str(tmp_path / name)])
        assert capsys.readouterr().out.startswith(f"{corpus}: ")


def test_a_corpus_of_another_tokenizer_is_told(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
    main(["--data-path", str(corpus), *flags])
    assert "the tokenizer has 1,000 ids: this corpus was made with another" in (
        capsys.readouterr().out
    )


def test_the_tokenizer_of_a_corpus_is_named_and_compared(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*words: str) -> str:
        main(["--data-path", str(corpus), *words])
        (line,) = (line for line in capsys.readouterr().out.splitlines() if "made with" in line)
        return line

    assert "that no .tokenizer file names" in told()
    own = train_sentencepiece(tmp_path / "own.model")
    given = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model"]
    config = TokenizerConfig(tokenizer_type=given[1], tokenizer_model=str(own))
    write_corpus(corpus, [[[1]]], made_with=fingerprint_of(config))
    assert f"made with SentencePieceTokenizer {tmp_path.name}/own.model (280 ids" in told()
    assert told(*given, str(own)).endswith(", which is the one given")
    other = train_sentencepiece(tmp_path / "other.model", user_defined_symbols=["zz"])
    assert f", and not with SentencePieceTokenizer {tmp_path.name}/other.model" in told(
        *given, str(other)
    )


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
    bins = histogram(lengths)
    assert [item.documents for item in bins] == [
        sum(item.first <= size <= item.last for size in expected) for item in bins
    ]
    assert sum(item.documents for item in bins) == len(expected)
    assert len(draw_text(bins)) == len(bins)
    assert figures(lengths) == "no documents" or "mean" in figures(lengths)


TRAINING = [
    *("--num-layers", "1", "--hidden-size", "64", "--num-attention-heads", "1", "--lr", "1"),
    *("--micro-batch-size", "2", "--global-batch-size", "8", "--num-workers", "0"),
]


@pytest.mark.parametrize("split", ["100,0,0", "70,20,10"])
@pytest.mark.parametrize("samples", [8, 304])
def test_dumped_samples_are_those_of_a_training(
    corpus: Path, tmp_path: Path, split: str, samples: int
) -> None:
    """On 4 ranks, over several epochs."""
    data = ["--data-path", str(corpus), "--seq-length", "16", "--split", split, "--seed", "7"]
    flags = [*data, *NULL, "--train-samples", str(samples)]
    dumped = tmp_path / "sub" / "samples.jsonl"
    main(["--dump-samples", str(dumped), *flags])
    lines = [json.loads(line) for line in dumped.read_text().splitlines()]
    assert all(list(line) == ["tokens"] for line in lines)
    config = configured([*flags, *TRAINING], World(size=4, ranks_per_node=4))
    datasets = build_data(config)
    ranks = [
        MicroBatches(
            Fetch(datasets.train), micro_batch_size=2, data_parallel_rank=rank, data_parallel_size=4
        )
        for rank in range(4)
    ]
    seen = [
        row.tolist() for _ in range(samples // 8) for rank in ranks for row in next(rank).tokens_BS
    ]
    assert [line["tokens"] for line in lines] == seen
    assert len(seen) == samples


def test_the_command_of_a_training_can_be_taken_as_it_is(corpus: Path, tmp_path: Path) -> None:
    flags = ["--data-path", str(corpus), "--seq-length", "16", *NULL, *TRAINING]
    ranks = ["--paro-strategy", "IIG", "--paro-group-size", "4", "--save", str(tmp_path / "save")]
    out = tmp_path / "samples.jsonl"
    main(["--dump-samples", str(out), *flags, *ranks, "--train-iters", "3"])
    assert len(out.read_text().splitlines()) == 24
    assert not (tmp_path / "save").exists()


@pytest.mark.parametrize(
    "words",
    [
        "--load nowhere --ckpt-step 3",
        "--load nowhere --exit-on-missing-checkpoint",
        "--load nowhere --use-checkpoint-args",
        "--load nowhere --use-checkpoint-opt_param-scheduler",
        "--save nowhere --log-progress",
        "--save nowhere --start-over",
        "--save nowhere --profile --use-pytorch-profiler",
        "--paro-strategy IIG --paro-materialize rotate --paro-rotate-in-place",
    ],
)
def test_what_samples_do_not_depend_on_is_not_looked_at(
    corpus: Path, tmp_path: Path, words: str
) -> None:
    flags = ["--data-path", str(corpus), "--seq-length", "16", *NULL, *TRAINING]
    out = tmp_path / "samples.jsonl"
    main(["--dump-samples", str(out), *flags, *words.split(), "--train-iters", "3"])
    assert len(out.read_text().splitlines()) == 24


def test_mock_data_can_be_dumped(tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl"
    main(["--dump-samples", str(out), "--mock-data", "--vocab-size", "50", "--seq-length", "8",
          "--train-samples", "5"])  # fmt: skip
    assert [len(json.loads(line)["tokens"]) for line in out.read_text().splitlines()] == [8] * 5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give --data-path PREFIX"),
        (["--data-path", "none"], "none.idx is missing"),
        (["--data-path", "-0.3", "x", "1", "y"], "--data-path the weight -0.3 is no share"),
        (["--data-args-path", "none"], "--data-args-path none cannot be read"),
        (["--data-path", "none", "--documents", "-1"], "--documents -1 must be 0 or more"),
        (["--data-path", "none", "--histogram", "x.txt"], "the name must end in .png"),
        (["--data-path", "none", "--no-such-flag"], "--no-such-flag is unknown"),
        ([*DUMP, "--train-samples", "3", "--mock-data"], "--seq-length is missing"),
        (
            [*DUMP, "--train-iters", "3", "--seq-length", "3"],
            "needs --global-batch-size",
        ),
        ([*DUMP, "--seq-length", "3", "--mock-data"], "--train-iters or --train-samples"),
    ],
)
def test_mistakes_are_one_line(flags: list[str], message: str) -> None:
    refused(lambda: main(flags), message)


def test_a_failed_dump_leaves_what_was_there(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl"
    out.write_text("before")
    flags = ["--data-path", str(corpus), "--seq-length", "99999", "--train-samples", "1", *NULL]
    refused(lambda: main(["--dump-samples", str(out), *flags]), "--seq-length 99999 is longer")
    assert out.read_text() == "before"
