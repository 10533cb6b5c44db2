"""A corpus records its tokenizer, which readers compare, and how many bytes each id stands for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from data.config import DataConfig
from data.fingerprint import (
    Fingerprint,
    check_tokenizer,
    digest_of,
    fingerprint_of,
    fingerprint_path,
    read_fingerprint,
)
from data.hugging_face_tokenizer import bytes_of_pieces
from data.indexed_dataset import bin_path
from data.loader import SplitCounts, build_datasets
from data.tokenizer import build_tokenizer
from data.tokenizer_config import TokenizerConfig
from data.tokenizer_json import write_tokenizer_json
from paro.config.run import RunConfig
from paro.launch.dry_run import run_dry
from paro.training.assembly import build_data
from tests.data.test_hugging_face_tokenizer import byte_level, modern, unigram, write
from tests.data.test_tokenizer import TEXT, config_of, train_sentencepiece, write_tik
from tests.helpers.corpora import write_corpus, write_gpt2
from tests.helpers.refusals import refused
from tests.helpers.training import configured
from tools.preprocess_data import main as preprocess

MADE = Fingerprint(tokenizer_type="HuggingFaceTokenizer", file="a", vocab_size=300, digest="1" * 32)


def fingerprint(kind: str, model: Path) -> Fingerprint:
    found = fingerprint_of(config_of(kind, model))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_sentencepiece(tmp_path_factory.mktemp("spm") / "pieces.model")


@pytest.mark.slow("makes tokenizers")
def test_types_and_places_of_one_vocabulary_are_the_same(pieces: Path, tmp_path: Path) -> None:
    shutil.copyfile(pieces, tmp_path / "copy.model")
    assert write_tokenizer_json(pieces, tmp_path)
    kinds = ("SentencePieceTokenizer", "Llama2Tokenizer", *["HuggingFaceTokenizer"] * 2)
    files = (pieces, tmp_path / "copy.model", tmp_path, tmp_path / "tokenizer.json")
    found = [*map(fingerprint, kinds, files)]
    assert len({one.digest for one in found}) == 1
    assert found[1].describe().startswith(f"Llama2Tokenizer {tmp_path.name}/copy.model (280 ids, ")


def test_another_order_or_end_is_another(tmp_path: Path) -> None:
    begin, end = "<s>", "</s>"
    given = {"a": ([begin, end], end), "b": ([end, begin], end), "c": ([begin, end], begin)}
    found = []
    for name, (special, eos) in given.items():
        folder = tmp_path / name
        folder.mkdir()
        byte_level(special).save(str(folder / "tokenizer.json"))
        write(folder, "tokenizer_config.json", {"eos_token": eos})
        found.append(fingerprint("HuggingFaceTokenizer", folder))
    assert len({one.digest for one in found}) == 3
    assert len({one.vocab_size for one in found}) == 1


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


def test_damage_is_named(tmp_path: Path) -> None:
    path = fingerprint_path(tmp_path / "x")
    counted = json.dumps(asdict(MADE) | {"token_bytes": "1 2"})
    for content in ("{", '{"digest": "1"}', counted):
        path.write_text(content)
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


# One to four bytes a character, in pieces of several characters and of parts of one.
TEXTS = ("def f(x):\n    return x  # é\n", " naïve  雪🙂\t", "\ufffd", "<0x41>Ġ</w>")


def sentencepiece(folder: Path, **options: object) -> Path:
    return train_sentencepiece(folder / "x.model", **options)


def counts_of(config: TokenizerConfig) -> list[int]:
    made_with = fingerprint_of(config, with_bytes=True)
    return [*map(int, made_with.token_bytes.split())]


@pytest.mark.parametrize(
    ("kind", "make", "added"),
    [
        # The space before every text is added.
        ("Llama2Tokenizer", sentencepiece, 1),
        ("SentencePieceTokenizer", partial(sentencepiece, add_dummy_prefix=False), 0),
        ("HuggingFaceTokenizer", lambda at: write_tokenizer_json(sentencepiece(at), at) and at, 1),
        ("HuggingFaceTokenizer", lambda folder: modern(folder) or folder, 0),
        ("GPT2BPETokenizer", write_gpt2, 0),
        ("TikTokenizer", lambda folder: write_tik(folder / "x"), 0),
    ],
)
def test_the_sum_over_a_text_is_its_length(
    kind: str, make: Callable[[Path], Any], added: int, tmp_path: Path
) -> None:
    made = make(tmp_path)
    if kind == "GPT2BPETokenizer":
        vocab_file, merge_file = map(str, made)
        config = TokenizerConfig(tokenizer_type=kind, vocab_file=vocab_file, merge_file=merge_file)
    else:
        config = config_of(kind, made)
    tokenizer, counts = build_tokenizer(config), counts_of(config)
    assert len(counts) == tokenizer.vocab_size
    for text in (*TEXTS, "".join(TEXTS) * 3):
        ids = tokenizer.encode(text)
        assert sum(counts[token] for token in ids) == len(text.encode()) + added, text
    assert counts[tokenizer.eod] == counts[tokenizer.bos or 0] == 0
    assert max(counts) > 1


def test_pieces_of_a_hand_written_vocabulary() -> None:
    pieces = ["<unk>", "▁", "▁the", "é", "<0xC3>", "<0x0A>", "</s>", "end"]
    whole = tokenizers.Tokenizer(
        models.BPE({piece: number for number, piece in enumerate(pieces)}, [], unk_token="<unk>")
    )
    whole.add_special_tokens(["</s>"])
    whole.add_tokens(["<tool>"])
    plain = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    whole.decoder = decoders.Sequence([decoders.ByteFallback(), *plain])
    assert bytes_of_pieces(whole, 9) == [0, 1, 4, 2, 1, 1, 0, 3, 6]
    for decoder in (decoders.Sequence(plain), decoders.Metaspace("▁")):
        whole.decoder = decoder
        assert bytes_of_pieces(whole, 9) == [0, 1, 4, 2, 6, 6, 0, 3, 6]
    for decoder in (decoders.WordPiece(), decoders.BPEDecoder(), None):  # they make blanks up
        whole.decoder = decoder
        assert bytes_of_pieces(whole, 9) is None


def test_an_unknown_piece_and_an_ordinary_end_are_no_text(tmp_path: Path) -> None:
    unigram(tmp_path)
    config = config_of("HuggingFaceTokenizer", tmp_path)
    tokenizer, counts = build_tokenizer(config), counts_of(config)
    assert counts[tokenizer.vocabulary["<unk>"]] == counts[tokenizer.eod] == 0
    text = "return x  # naïve"
    known = sum(counts[token] for token in tokenizer.encode(text))
    assert known == len(text) + 1 + 1
