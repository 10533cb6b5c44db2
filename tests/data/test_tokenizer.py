"""Every tokenizer type: ids in both directions, special ids, sizes, mistakes in one line."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks

from data.tokenizer import END, Tokenizer, build_tokenizer
from data.tokenizer_config import (
    SENTENCEPIECE_TYPES,
    TokenizerConfig,
    saved_tokenizer,
    tokenizer_config,
)
from data.tokenizer_json import write_gpt2_tokenizer_json
from paro.errors import UserError
from tests.helpers.corpora import TEXT as GPT2_TEXT
from tests.helpers.corpora import write_gpt2
from tests.helpers.refusals import refused

TEXT = "def f(x):\n    return x  # é\n"


def config_of(kind: str, model: Path | None = None, size: int | None = None) -> TokenizerConfig:
    path = str(model) if model else None
    return TokenizerConfig(tokenizer_type=kind, tokenizer_model=path, vocab_size=size)


def build(*given: Any) -> Tokenizer:
    return build_tokenizer(config_of(*given))


def sentencepiece_model(lines: Iterable[str] = (TEXT,) * 3, **options: object) -> bytes:
    """A small model with the settings of LLaMA's, unless `options` are others."""
    model = io.BytesIO()
    settings = {
        "vocab_size": 280,
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, **(settings | options)
    )
    return model.getvalue()


def train_sentencepiece(path: Path, **options: object) -> Path:
    path.write_bytes(sentencepiece_model(**options))
    return path


@pytest.fixture(scope="module")
def spm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_sentencepiece(tmp_path_factory.mktemp("spm") / "x.model")


def write_tik(path: Path) -> Path:
    pieces = [*(bytes([byte]) for byte in range(256)), b"re", b"return", b" x"]
    lines = [f"{base64.b64encode(piece).decode()} {rank}" for rank, piece in enumerate(pieces)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def tik_model(tmp_path: Path) -> Path:
    return write_tik(tmp_path / "tokenizer.model")


PREFIXES = {"SentencePieceTokenizer": (), "GPTSentencePieceTokenizer": (), "Llama2Tokenizer": (1,)}


@pytest.mark.parametrize("tokenizer_type", SENTENCEPIECE_TYPES)
def test_sentencepiece(spm_model: Path, tokenizer_type: str) -> None:
    tokenizer = build(tokenizer_type, spm_model)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode([*ids, tokenizer.eod]) == TEXT
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (280, 1, 2)
    assert not {1, 2}.intersection(ids)
    assert tokenizer.text_prefix == PREFIXES[tokenizer_type], "of every text of a corpus"


def test_models_without_a_beginning_or_an_end(tmp_path: Path) -> None:
    endless = train_sentencepiece(tmp_path / "endless.model", eos_id=-1)
    refused(lambda: build("SentencePieceTokenizer", endless), "no end-of-sentence piece")
    model = train_sentencepiece(tmp_path / "x.model", bos_id=-1, eos_id=1)
    refused(lambda: build("Llama2Tokenizer", model), "no piece that begins a text")
    tokenizer = build("SentencePieceTokenizer", model)
    assert (tokenizer.bos, tokenizer.eod) == (None, 1)


def test_tiktoken_file_with_the_special_tokens_of_llama3(tik_model: Path) -> None:
    tokenizer = build("TikTokenizer", tik_model)
    assert tokenizer.encode("return x") == [257, 258]
    assert tokenizer.encode("<|end_of_text|>") == list(b"<|end_of_text|>"), "text is only text"
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (259 + 256, 259, 260)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode([tokenizer.bos or 0, *ids, tokenizer.eod]) == TEXT


def test_tiktoken_takes_long_runs_and_no_file_in_another_form(tik_model: Path) -> None:
    tokenizer = build("TikTokenizer", tik_model)
    for text in ("x" * 60_000, " " * 60_000, "a b\n" * 200_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    right = tik_model.read_text()
    for change in ("eA== 5\n", "no base64\n", '{"version": "1.0"}', "eHg= 999\n"):
        tik_model.write_text(right + change)
        refused(lambda: build("TikTokenizer", tik_model), "not a vocabulary in tiktoken's form")


def test_a_batch_is_what_its_texts_are(spm_model: Path, tik_model: Path) -> None:
    texts = [TEXT, "", "x" * 50, "return x", TEXT * 2]
    for tokenizer in (
        build("SentencePieceTokenizer", spm_model),
        build("Llama2Tokenizer", spm_model),
        build("TikTokenizer", tik_model),
    ):
        assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
        assert tokenizer.encode_batch([]) == []
    assert build("NullTokenizer", None, 9).encode_batch(["1 2", "", "3"]) == [[1, 2], [], [3]]


def test_the_last_entry_of_a_null_tokenizer_ends_documents_unless_another_is_given() -> None:
    tokenizer = build("NullTokenizer", None, 100)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.bos) == (100, 99, None)
    assert tokenizer.encode("3 1\n99") == [3, 1, 99]
    assert tokenizer.decode([3, 1, 99]) == "3 1 99"
    config = replace(config_of("NullTokenizer", None, 100), null_tokenizer_eod_id=2)
    assert (build_tokenizer(config).vocab_size, build_tokenizer(config).eod) == (100, 2)
    for eod in (-1, 100):
        bad = partial(replace, config, null_tokenizer_eod_id=eod)
        refused(bad, f"--null-tokenizer-eod-id {eod} ... at least 0")
    other = partial(replace, config, tokenizer_type="TikTokenizer", tokenizer_model="x")
    refused(other, "--null-tokenizer-eod-id")


def test_a_checkpoint_from_before_still_means_what_it_meant() -> None:
    null = {"tokenizer_type": "NullTokenizer", "vocab_size": 99}
    of_now = {"tokenizer": {**null, "vocab_size": 100}, "vocab_size": 100}
    for before in ({"tokenizer": null, "vocab_size": 100}, {"tokenizer": null}, of_now):
        assert build_tokenizer(TokenizerConfig(**saved_tokenizer(before))).eod == 99
    other = {"tokenizer": {"tokenizer_type": "TikTokenizer", "vocab_size": None}, "vocab_size": 9}
    assert saved_tokenizer(other) == other["tokenizer"]
    assert saved_tokenizer({"vocab_size": 9}) == {}


def test_null_tokenizer_refuses_what_is_no_id() -> None:
    tokenizer = build("NullTokenizer", None, 100)
    for text in ("1 x", "-1", "100", "1.5", "9" * 5000, "0" * 30 + "9999", "٣"):
        refused(partial(tokenizer.encode, text), "--tokenizer-type NullTokenizer")


def test_mistakes_name_the_flag() -> None:
    for fields, message in (
        (("GPT3Tokenizer", None, None), "--tokenizer-type GPT3Tokenizer is unknown: choose one of"),
        (("NullTokenizer", None, None), "NullTokenizer needs --vocab-size"),
        (("NullTokenizer", None, 0), "--vocab-size 0 must be at least 1"),
        (("BertWordPieceCase", None, None), "BertWordPieceCase is not supported: it is BERT's"),
        (("MultimodalTokenizer", Path("x"), None), "give HuggingFaceTokenizer and the same"),
        (("Llama2Tokenizer", None, None), "Llama2Tokenizer needs --tokenizer-model"),
        (("Llama2Tokenizer", Path("none.model"), None), "--tokenizer-model none.model"),
        (("HuggingFaceTokenizer", Path("no/ne"), None), "--tokenizer-model no/ne is neither"),
    ):
        refused(partial(build, *fields), message)


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "HuggingFaceTokenizer", "TikTokenizer"])
def test_a_foreign_file_or_one_beyond_the_limit_is_refused(kind: str, tmp_path: Path) -> None:
    refused(lambda: build(kind, Path("/dev/zero")), "--tokenizer-model /dev/zero is")
    path = tmp_path / "x"
    for content in (b"", b"no model", bytes(range(256))) if kind != "TikTokenizer" else ():
        path.write_bytes(content)
        refused(lambda: build(kind, path), "--tokenizer-model ... x is not a")
    with path.open("wb") as file:
        file.truncate(2**40)
    refused(lambda: build(kind, path), "x has 1,099,511,627,776 bytes, more than")


def test_a_contradicting_vocabulary_size_is_refused(spm_model: Path) -> None:
    assert build("Llama2Tokenizer", spm_model, 280).vocab_size == 280
    other = partial(build, "Llama2Tokenizer", spm_model, 300)
    refused(other, "--vocab-size 300 ... --tokenizer-model")


# GPT-2's regular expression for words, as published by its authors.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT2_TEXTS = (GPT2_TEXT, "", " ", "I'LL they've", "ﬁ ½ ①", GPT2_TEXT * 9, "x" * 999)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return write_gpt2(tmp_path)


def build_gpt2(files: tuple[Path, Path], **more: object) -> Tokenizer:
    vocab_file, merge_file = map(str, files)
    found = tokenizer_config({"vocab_file": vocab_file, "merge_file": merge_file, **more})
    assert found is not None, "the two files alone name GPT2BPETokenizer"
    assert found.tokenizer_type == "GPT2BPETokenizer"
    return build_tokenizer(found)


def test_ids_are_those_of_another_library_and_texts_come_back(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    ranks = data_gym_to_mergeable_bpe_ranks(str(files[1]), str(files[0]))
    other = tiktoken.Encoding(
        "gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={END: len(ranks)}
    )
    own = build_gpt2(files)
    for text in (*GPT2_TEXTS, f"a {END} b{END}"):
        assert own.encode(text) == other.encode(text, allowed_special="all"), text
    for text in GPT2_TEXTS:
        assert own.decode([*own.encode(text), own.eod]) == text
    assert own.encode_batch(GPT2_TEXTS) == [own.encode(text) for text in GPT2_TEXTS]
    assert own.encode_batch([]) == []
    assert (own.vocab_size, own.eod, own.bos, own.text_prefix) == (301, 300, 300, ())


def test_the_tokenizer_json_gives_the_same_ids(files: tuple[Path, Path], tmp_path: Path) -> None:
    write_gpt2_tokenizer_json(*files, tmp_path)
    other = build("HuggingFaceTokenizer", tmp_path / "tokenizer.json")
    own = build_gpt2(files)
    assert (other.vocab_size, other.eod) == (own.vocab_size, own.eod)
    assert other.encode_batch(GPT2_TEXTS) == own.encode_batch(GPT2_TEXTS)


def without_end(text: str) -> str:
    return json.dumps({name: number for name, number in json.loads(text).items() if name != END})


@pytest.mark.parametrize(
    ("which", "change", "message"),
    [
        (0, lambda _: "[1]", "must be an object"),
        (0, lambda _: "no JSON", "is not valid JSON"),
        (0, lambda text: text.replace(": 7,", ": 7000,"), "count from 0 without a gap"),
        (0, lambda text: text.replace('"!"', '"\\ud800"'), "a piece with half a surrogate pair"),
        (0, without_end, "is not GPT-2's: ... <|endoftext|>"),
        (1, lambda text: text + "q z\n", "--merge-file ... --vocab-file ... `qz`"),
        (1, lambda text: text + "a b c\n", "--merge-file ... --vocab-file ... line 45"),
    ],
)
def test_files_at_fault_are_named(
    files: tuple[Path, Path], which: int, change: Callable[[str], str], message: str
) -> None:
    files[which].write_text(change(files[which].read_text(encoding="utf-8")), encoding="utf-8")
    refused(lambda: build_gpt2(files), message)


def test_files_that_are_missing_are_named_together(files: tuple[Path, Path]) -> None:
    files[0].unlink()
    refused(lambda: build_gpt2(files), "--vocab-file ... gpt2-vocab.json is missing")
    files[1].unlink()
    with pytest.raises(UserError) as caught:
        build_gpt2(files)
    assert [line.split()[0] for line in caught.value.args] == ["--vocab-file", "--merge-file"]


def test_flags_that_contradict_are_refused() -> None:
    vocab, merge = {"vocab_file": "x"}, {"merge_file": "x"}
    for given, message in (
        (vocab, "GPT2BPETokenizer needs --merge-file"),
        (merge, "GPT2BPETokenizer needs --vocab-file"),
        ({**vocab, **merge, "tokenizer_model": "z"}, "leave --tokenizer-model"),
        ({**vocab, "tokenizer_type": "NullTokenizer"}, "--vocab-file ... NullTokenizer"),
    ):
        refused(partial(tokenizer_config, given), message)
