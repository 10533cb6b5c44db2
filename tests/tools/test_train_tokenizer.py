"""Text is gathered, a tokenizer trained; a run with GPT-2's tokenizer, from corpus to text."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import sysconfig
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.indexed_dataset import IndexedDataset
from data.sources import find_chunks
from data.tokenizer import END, SentencePieceTokenizer, build_tokenizer
from data.tokenizer_config import tokenizer_config
from paro.checkpoint.convert.hugging_face import open_hugging_face
from paro.errors import UserError
from tests.helpers.corpora import TEXT, write_gpt2
from tests.helpers.refusals import output_of, printed, read_lines, refused, write_lines
from tests.helpers.training import save_run
from tests.tools.conftest import convert, trained
from tools import gather_text, generate, inspect_dataset, preprocess_data
from tools.train_tokenizer import main, sampled_chunks

SOURCES = [Path(json.__file__).with_name(name) for name in ("decoder.py", "encoder.py")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "sources.jsonl"
    texts = [source.read_text(encoding="utf-8") for source in SOURCES]
    lines = [json.dumps({"text": text}) for text in (*texts, "2024 " * 500)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def tokenizer(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    prefix = tmp_path_factory.mktemp("model") / "spm"
    flags = ["--input", str(corpus), "--output-prefix", str(prefix), "--vocab-size", "500"]
    main(flags)
    return SentencePieceTokenizer(f"{prefix}.model")


def test_sizes_special_ids_and_pieces(tokenizer: SentencePieceTokenizer) -> None:
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (500, 1, 2)
    assert tokenizer.decode([0]).strip() == "⁇"
    assert len(tokenizer.encode(" " * 8)) == 1, "indentation has pieces of its own"
    assert len(tokenizer.encode("2024")) == 4, "digits are split"


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=30))
def test_any_text_comes_back_exactly(tokenizer: SentencePieceTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_sample_is_spread_over_the_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{number:2000d}" for number in range(1000)))
    pieces = find_chunks([path])
    chunks = [int(chunk) for chunk in sampled_chunks(pieces, key="text", sample_bytes=200_000)]
    assert 60 < len(chunks) < 140
    assert sum(number < 500 for number in chunks) == pytest.approx(len(chunks) / 2, rel=0.3)
    whole = sampled_chunks(pieces, key="text", sample_bytes=2_000_000)
    assert len(whole) == 1000


def test_a_sample_of_compressed_text_stays_small_and_an_empty_one_is_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.txt").touch()
    flags = ["--input", str(tmp_path / "a.txt"), "--output-prefix", str(tmp_path / "x")]
    refused(lambda: main(flags), "holds no text")
    path = tmp_path / "a.jsonl.gz"
    line = json.dumps({"text": "x" * 1000}) + "\n"
    path.write_bytes(gzip.compress(line.encode() * 3000))
    assert path.stat().st_size < 30_000
    chunks = sampled_chunks(find_chunks([path]), key="text", sample_bytes=100_000)
    assert 50_000 < sum(map(len, chunks)) < 400_000


def test_mistakes_are_one_line_and_leave_nothing(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for flags, message in (
        (["--vocab-size", "100"], "--vocab-size 100 does not work with this text"),
        (["--vocab-size", str(10**12)], "--vocab-size 1000000000000 must be at least 1 and below"),
        (["--sample-bytes", "0"], "--sample-bytes 0 must be at least 1"),
        (["--json-key", "body"], "line 1 has no key 'body'; its keys are: text (--json-key says"),
        (["--character-coverage", "2"], "--character-coverage 2.0 must be in (0, 1]"),
        (["--input", "none.txt"], "--input none.txt is missing"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            main(["--input", str(corpus), "--output-prefix", str(tmp_path / "x"), *flags])
        lines = capfd.readouterr().err.splitlines()
        assert not [line for line in lines if not re.match("Processed|training", line)]
        assert list(tmp_path.iterdir()) == []


def gather(path: Path, *flags: str) -> list[str]:
    printed(gather_text.main, "--output", path, *flags)
    return [entry["text"] for entry in read_lines(path)]


def test_the_order_is_shuffled_and_reproducible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "library"
    library.mkdir()
    for number in range(20):
        (library / f"module{number:02d}.py").write_text(f"x = {number}\n")
    (library / "empty.py").write_text("")
    (library / "latin.py").write_bytes(b"# caf\xe9\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(library))
    flags = ["--min-bytes", "100"]
    first = gather(tmp_path / "a.jsonl", *flags)
    assert first != [f"x = {number}\n" for number in range(20)]
    assert sorted(first) == sorted(f"x = {number}\n" for number in range(20))
    assert gather(tmp_path / "b.jsonl", *flags) == first
    assert gather(tmp_path / "c.jsonl", *flags, "--seed", "1") != first
    refused(lambda: gather(tmp_path / "d.jsonl", "--min-bytes", "1000000"), "1,000,000")


def test_tests_packages_and_machine_specific_files_are_left_out(tmp_path: Path) -> None:
    wanted = ["a.py", "json/b.py", "testing.py"]
    left_out = "test/c.py json/tests/d.py site-packages/e.py _sysconfigdata__linux_.py notes.txt"
    for name in (*wanted, *left_out.split(), "config-3.11-x/f.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    assert list(gather_text.python_sources(tmp_path)) == [tmp_path / name for name in wanted]


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Megatron's own default type: it needs no flag."""
    (tmp_path / "gpt2").mkdir()
    vocab_file, merge_file = map(str, write_gpt2(tmp_path / "gpt2"))
    return ["--vocab-file", vocab_file, "--merge-file", merge_file]


@pytest.fixture
def saved(tmp_path: Path, flags: list[str]) -> Path:
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
    message = printed(inspect_dataset.main, "--data-path", tmp_path / "c_text_document", *flags)
    assert "end with the end-of-document token: 1 of 1" in message
    assert repr(TEXT) in message


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
    message = output_of(lambda: convert("paro", "hf", saved, tmp_path / "hf"))
    assert not (tmp_path / "hf" / "tokenizer.json").exists()
    assert "converted without it" in message


def test_rows_that_do_not_hold_the_vocabulary_are_refused(tmp_path: Path, saved: Path) -> None:
    for target, message in (("paro", "is less than the 310 entries"), ("hf", "holds no padding")):
        less = ("paro", target, saved, tmp_path / "out", "--padded-vocab-size", 300)
        refused(partial(convert, *less), f"--padded-vocab-size 300 ... {message}")
    assert not (tmp_path / "out").exists()
