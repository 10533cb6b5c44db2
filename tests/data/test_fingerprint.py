"""A corpus records its tokenizer: written by preprocessing, compared by every reader."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from data.config import DataConfig
from data.fingerprint import (
    Fingerprint,
    check_tokenizer,
    digest_of,
    fingerprint_of,
    fingerprint_path,
    read_fingerprint,
)
from data.indexed_dataset import bin_path
from data.loader import SplitCounts, build_datasets
from data.tokenizer_json import write_tokenizer_json
from paro.config.run import RunConfig
from paro.launch.dry_run import run_dry
from paro.training.assembly import build_data
from tests.data.test_hugging_face_tokenizer import byte_level, write
from tests.data.test_tokenizer import TEXT, config_of, train_sentencepiece
from tests.helpers.corpora import write_corpus
from tests.helpers.flags import configured
from tests.helpers.refusals import refused
from tools.preprocess_data import main as preprocess

MADE = Fingerprint(tokenizer_type="HuggingFaceTokenizer", file="a", vocab_size=300, digest="1" * 32)


def fingerprint(kind: str, model: Path) -> Fingerprint:
    found = fingerprint_of(config_of(kind, model))
    assert found is not None
    return found


def hugging_face(folder: Path, special: Sequence[str], eos: str) -> Path:
    folder.mkdir()
    byte_level([*special]).save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", {"eos_token": eos})
    return folder


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_sentencepiece(tmp_path_factory.mktemp("spm") / "pieces.model")


def test_types_and_places_of_one_vocabulary_are_the_same(pieces: Path, tmp_path: Path) -> None:
    shutil.copyfile(pieces, tmp_path / "copy.model")
    assert write_tokenizer_json(pieces, tmp_path)
    found = [
        fingerprint("SentencePieceTokenizer", pieces),
        fingerprint("Llama2Tokenizer", tmp_path / "copy.model"),
        fingerprint("HuggingFaceTokenizer", tmp_path),
        fingerprint("HuggingFaceTokenizer", tmp_path / "tokenizer.json"),
    ]
    assert len({one.digest for one in found}) == 1
    assert found[1].describe().startswith(f"Llama2Tokenizer {tmp_path.name}/copy.model (280 ids, ")


def test_another_order_or_end_is_another(tmp_path: Path) -> None:
    first, order, end = (
        fingerprint("HuggingFaceTokenizer", hugging_face(tmp_path / name, special, eos))
        for name, special, eos in (
            ("a", ["<s>", "</s>"], "</s>"),
            ("b", ["</s>", "<s>"], "</s>"),
            ("c", ["<s>", "</s>"], "<s>"),
        )
    )
    assert len({first.digest, order.digest, end.digest}) == 3
    assert first.vocab_size == order.vocab_size == end.vocab_size


def test_the_definition_stays() -> None:
    """Existing corpora have this value."""
    assert digest_of({"b": 1, "ä": 0}, 9) == "63ae0e46c1d66baba4f0ca0bbc552d46"


def test_numbers_go_with_any_corpus() -> None:
    config = config_of("NullTokenizer", None, 9)
    assert fingerprint_of(config) is None
    check_tokenizer("x", MADE, config)
    check_tokenizer("megatrons", None, config_of("Llama2Tokenizer", Path("not looked at")))


def test_it_is_written_with_the_corpus_and_goes_with_it(tmp_path: Path) -> None:
    def interrupted() -> Iterator[list[list[int]]]:
        raise KeyboardInterrupt
        yield

    prefix = write_corpus(tmp_path / "x", [[[1]]], made_with=MADE)
    assert read_fingerprint(prefix) == MADE
    with pytest.raises(KeyboardInterrupt):
        write_corpus(prefix, interrupted(), made_with=replace(MADE, digest="2" * 32))
    assert read_fingerprint(prefix) == MADE
    assert read_fingerprint(write_corpus(prefix, [[[1]]])) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.bin.crc", "x.idx"]


COUNTED = json.dumps(asdict(MADE) | {"token_bytes": "1 2"})


@pytest.mark.parametrize("text", ["", "{", "[]", '{"digest": "1"}', COUNTED, b"\xff"])
def test_damage_is_named(text: str | bytes, tmp_path: Path) -> None:
    path = fingerprint_path(tmp_path / "x")
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    refused(lambda: read_fingerprint(tmp_path / "x"), f"{path} ... write the corpus again")


def test_training_with_another_tokenizer_is_refused(pieces: Path, tmp_path: Path) -> None:
    other = train_sentencepiece(tmp_path / "other.model", user_defined_symbols=["zz"])
    (tmp_path / "text.txt").write_text(TEXT * 9)
    flags = ["--append-eod", "--workers", "1", "--tokenizer-type", "SentencePieceTokenizer"]
    flags += ["--input", str(tmp_path / "text.txt"), "--output-prefix", str(tmp_path / "x")]
    preprocess([*flags, "--tokenizer-model", str(pieces), "--partitions", "2"])
    prefix = str(tmp_path / "x_text_document")
    config = config_of("SentencePieceTokenizer", pieces)
    assert read_fingerprint(prefix) == fingerprint_of(config, with_bytes=True)

    def run_with(model: Path) -> RunConfig:
        words = (
            "--num-layers 1 --hidden-size 64 --num-attention-heads 1 --seq-length 8 --split 1,0,0 "
            "--micro-batch-size 1 --train-iters 1 --lr 1 --distributed-backend gloo --num-workers 0"
        )
        named = ["--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", str(model)]
        return configured([*words.split(), *named, "--data-path", prefix])

    build_data(run_with(pieces))
    refused(
        lambda: build_data(run_with(other)),
        f"{bin_path(prefix)} ... SentencePieceTokenizer ... /pieces.model (280 ids",
        f"Llama2Tokenizer ... /other.model (280 ids ... remove {prefix}.tokenizer",
    )
    refused(lambda: run_dry(run_with(other)), "x_text_document.bin was made with")
    fingerprint_path(prefix).unlink()
    build_data(run_with(other))


def test_every_corpus_of_a_blend_is_compared(pieces: Path, tmp_path: Path) -> None:
    for name, made_with in (("a", fingerprint("Llama2Tokenizer", pieces)), ("b", MADE)):
        write_corpus(tmp_path / name, [[[1] * 99]], made_with=made_with)
    config = DataConfig(seq_length=8, data_path=("1", str(tmp_path / "a"), "1", f"{tmp_path}/b"))
    given = config_of("Llama2Tokenizer", pieces)
    refused(lambda: build_datasets(config, SplitCounts(train=4), 300, given), "b.bin was made with")
