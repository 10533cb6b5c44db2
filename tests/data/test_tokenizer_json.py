"""A SentencePiece model as transformers' tokenizer.json: the same ids and texts, or no file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data.hugging_face_tokenizer import hugging_face_tokenizer
from data.tokenizer import SentencePieceTokenizer
from data.tokenizer_json import write_tokenizer_json
from tests.data.test_tokenizer import train_sentencepiece

LINES = ["def main() -> None:", "    print('naïve 雪 text')", "the quick  brown fox", "a b c"] * 20
LLAMA: dict[str, Any] = {  # as LLaMA-1's, LLaMA-2's and this project's were trained
    "lines": LINES,
    "vocab_size": 320,
    "hard_vocab_limit": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
}
TEXTS = ["def main() -> None:", "  def  naïve(雪):\n\t", "quick é brown 🙂 2025"]
TEXTS += ["a", " a", "\n", "x" * 40]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.mark.parametrize("prefix", [True, False])
def test_ids_and_texts_are_the_same(prefix: bool, out: Path) -> None:
    from transformers import AutoTokenizer

    model = train_sentencepiece(out.with_name("x.model"), **LLAMA, add_dummy_prefix=prefix)
    assert write_tokenizer_json(model, out)
    own = SentencePieceTokenizer(str(model))
    file = hugging_face_tokenizer(str(out / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(out)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (own.bos, own.eod) == (1, 2)
    assert (file.bos, file.eod, file.vocab_size) == (1, 2, own.vocab_size)
    for text in TEXTS:
        ids = own.encode(text)
        assert theirs.encode(text) == ids == file.encode(text), text
        assert theirs.decode(ids) == own.decode(ids) == file.decode(ids) == text


@pytest.mark.parametrize(
    "options",
    [
        {"normalization_rule_name": "nmt_nfkc"},
        {"remove_extra_whitespaces": True},
        {"model_type": "unigram", "byte_fallback": True},
    ],
)
def test_what_would_have_other_ids_is_not_written(options: dict[str, Any], out: Path) -> None:
    model = train_sentencepiece(out.with_name("x.model"), **LLAMA, **options)
    assert not write_tokenizer_json(model, out)
    assert not list(out.iterdir())


def test_a_file_of_another_library_is_not_written(tmp_path: Path) -> None:
    model = tmp_path / "tokenizer.model"
    model.write_text("IQ== 0\nIg== 1\n")
    assert not write_tokenizer_json(model, tmp_path)
