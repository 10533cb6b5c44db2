"""GPT-2's two files: ids equal another library's, transformers reads them, mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks

from data.gpt2_tokenizer import END
from data.tokenizer import Tokenizer, build_tokenizer
from data.tokenizer_config import TokenizerConfig, tokenizer_config
from data.tokenizer_json import write_gpt2_tokenizer_json
from paro.errors import UserError
from tests.helpers.gpt2 import TEXT, write_gpt2
from tests.helpers.refusals import refused

# GPT-2's regular expression for words, as published by its authors.
PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TEXTS = (TEXT, "", " ", "I'LL they've", "ﬁ ½ ①", TEXT * 9, "x" * 999)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return write_gpt2(tmp_path)


def build(files: tuple[Path, Path], **more: object) -> Tokenizer:
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
        "gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={END: len(ranks)}
    )
    own = build(files)
    for text in (*TEXTS, f"a {END} b{END}"):
        assert own.encode(text) == other.encode(text, allowed_special="all"), text
    for text in TEXTS:
        assert own.decode([*own.encode(text), own.eod]) == text
    assert own.encode_batch(TEXTS) == [own.encode(text) for text in TEXTS]
    assert own.encode_batch([]) == []
    assert (own.vocab_size, own.eod, own.bos, own.text_prefix) == (301, 300, 300, ())


def test_the_tokenizer_json_gives_the_same_ids(files: tuple[Path, Path], tmp_path: Path) -> None:
    write_gpt2_tokenizer_json(*files, tmp_path)
    path = str(tmp_path / "tokenizer.json")
    config = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=path)
    other = build_tokenizer(config)
    own = build(files)
    assert (other.vocab_size, other.eod) == (own.vocab_size, own.eod)
    assert other.encode_batch(TEXTS) == own.encode_batch(TEXTS)


def without(piece: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        vocabulary = json.loads(text)
        del vocabulary[piece]
        return json.dumps({name: number for number, name in enumerate(vocabulary)})

    return change


@pytest.mark.parametrize(
    ("which", "change", "message"),
    [
        (0, None, "--vocab-file ... gpt2-vocab.json is missing"),
        (1, None, "--merge-file ... gpt2-merges.txt is missing"),
        (0, lambda _: "[1]", "must be an object"),
        (0, lambda _: "no JSON", "is not valid JSON"),
        (0, lambda text: text.replace(": 7,", ": 7000,"), "count from 0 without a gap"),
        (0, lambda text: text.replace('"!"', '"\\ud800"'), "a piece with half a surrogate pair"),
        (0, without(END), "is not GPT-2's: ... <|endoftext|>"),
        (0, without("!"), "is not GPT-2's"),
        (1, lambda text: text + "q z\n", "--merge-file ... --vocab-file ... `qz`"),
        (1, lambda text: text + "qz\n", "--merge-file ... --vocab-file ... line 45"),
        (1, lambda text: text + "a b c\n", "--merge-file ... --vocab-file ... line 45"),
    ],
)
def test_files_at_fault_are_named(
    files: tuple[Path, Path], which: int, change: Callable[[str], str] | None, message: str
) -> None:
    if change is None:
        files[which].unlink()
    else:
        files[which].write_text(change(files[which].read_text(encoding="utf-8")), encoding="utf-8")
    refused(lambda: build(files), message)


def test_files_that_are_missing_are_named_together(files: tuple[Path, Path]) -> None:
    for file in files:
        file.unlink()
    with pytest.raises(UserError) as caught:
        build(files)
    assert [line.split()[0] for line in caught.value.args] == ["--vocab-file", "--merge-file"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"vocab_file": "x"}, "GPT2BPETokenizer needs --merge-file"),
        ({"merge_file": "x"}, "GPT2BPETokenizer needs --vocab-file"),
        ({"vocab_file": "x", "merge_file": "y", "tokenizer_model": "z"}, "leave --tokenizer-model"),
        ({"vocab_file": "x", "tokenizer_type": "NullTokenizer"}, "--vocab-file ... NullTokenizer"),
    ],
)
def test_flags_that_contradict_are_refused(flags: dict[str, str], message: str) -> None:
    refused(lambda: tokenizer_config(flags), message)


def test_another_size_of_the_vocabulary_is_refused(files: tuple[Path, Path]) -> None:
    told = "--vocab-size 50257 ... --vocab-file ... 301"
    refused(lambda: build(files, vocab_size=50257), told)
