"""How many bytes of text each id stands for: their sum over a text is its length in UTF-8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from data.fingerprint import fingerprint_of
from data.hugging_face_tokenizer import bytes_of_pieces
from data.tokenizer import build_tokenizer
from data.tokenizer_config import TokenizerConfig
from data.tokenizer_json import write_tokenizer_json
from tests.data.test_hugging_face_tokenizer import modern, unigram
from tests.data.test_tokenizer import config_of, train_sentencepiece, write_tik
from tests.helpers.gpt2 import write_gpt2

# One to four bytes a character, in pieces of several characters and of parts of one.
TEXTS = ("def f(x):\n    return x  # é\n", " naïve  雪🙂\t", "\ufffd", "<0x41>Ġ</w>")


def without_prefix(folder: Path) -> Path:
    return train_sentencepiece(folder / "x.model", add_dummy_prefix=False)


def sentencepiece_as_json(folder: Path) -> Path:
    assert write_tokenizer_json(train_sentencepiece(folder / "x.model"), folder)
    return folder


def byte_level(folder: Path) -> Path:
    modern(folder)
    return folder


def counts_of(config: TokenizerConfig) -> list[int]:
    made_with = fingerprint_of(config, with_bytes=True)
    return [*map(int, made_with.token_bytes.split())]


@pytest.mark.parametrize(
    ("kind", "make", "added"),
    [
        # The space before every text is added.
        ("Llama2Tokenizer", lambda folder: train_sentencepiece(folder / "x.model"), 1),
        ("SentencePieceTokenizer", without_prefix, 0),
        ("HuggingFaceTokenizer", sentencepiece_as_json, 1),
        ("HuggingFaceTokenizer", byte_level, 0),
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
    whole.decoder = decoders.Sequence(plain)
    assert bytes_of_pieces(whole, 9) == [0, 1, 4, 2, 6, 6, 0, 3, 6]
    whole.decoder = decoders.Metaspace("▁")
    assert bytes_of_pieces(whole, 9) == [0, 1, 4, 2, 6, 6, 0, 3, 6]
    for decoder in (decoders.WordPiece(), decoders.BPEDecoder()):
        whole.decoder = decoder
        assert bytes_of_pieces(whole, 9) is None, "it makes blanks up"
    whole.decoder = None
    assert bytes_of_pieces(whole, 9) is None


def test_an_unknown_piece_and_an_ordinary_end_are_no_text(tmp_path: Path) -> None:
    unigram(tmp_path)
    config = config_of("HuggingFaceTokenizer", tmp_path)
    tokenizer, counts = build_tokenizer(config), counts_of(config)
    assert counts[tokenizer.vocabulary["<unk>"]] == counts[tokenizer.eod] == 0
    text = "return x  # naïve"
    known = sum(counts[token] for token in tokenizer.encode(text))
    assert known == len(text) + 1 + 1
