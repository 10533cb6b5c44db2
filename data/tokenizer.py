"""The tokenizer interface, and construction of tokenizers by Megatron's tokenizer types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from data.gpt2_tokenizer import gpt2_tokenizer
from data.hugging_face_tokenizer import hugging_face_tokenizer
from data.tik_tokenizer import TikTokenizer
from data.tokenizer_config import GPT2_TYPE, SENTENCEPIECE_TYPES, TokenizerConfig
from paro.errors import UserError, importing, reading
from paro.untrusted.regular_file import read_bytes

_MAX_ROWS = 2**31  # most rows of an embedding
BLANK = "\u2581"  # how SentencePiece spells a space


class Tokenizer(Protocol):
    """The interface that preprocessing, training and generation need from a tokenizer.

    `encode` adds no special tokens: callers add `bos` or `eod` if they need them.
    """

    @property
    def text_prefix(self) -> tuple[int, ...]:
        """Ids put before every text of a corpus: `bos` for Llama2Tokenizer, else none."""

    @property
    def vocab_size(self) -> int:
        """The number of ids, not padded."""

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """The id of every piece; empty for NullTokenizer."""

    @property
    def eod(self) -> int:
        """The id that ends a document."""

    @property
    def bos(self) -> int | None:
        """The id that begins a text; None if there is none."""

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts in one call of the library, on one thread."""

    def decode(self, ids: Iterable[int]) -> str: ...

    def token_bytes(self) -> list[int] | None:
        """Count the bytes of text that every id stands for, special tokens 0; None if unknown."""


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer of a configuration; `UserError` names the wrong flag."""
    if config.tokenizer_type == "NullTokenizer":
        assert config.vocab_size is not None, "TokenizerConfig checks this"
        return NullTokenizer(config.vocab_size, eod=config.null_tokenizer_eod_id)
    with reading(" and ".join(config.files)):
        tokenizer = _read_tokenizer(config)
    if config.vocab_size not in (None, tokenizer.vocab_size):
        flag = "--vocab-file" if config.tokenizer_type == GPT2_TYPE else "--tokenizer-model"
        raise UserError(
            f"--vocab-size {config.vocab_size} contradicts {flag} {config.files[0]}, which has "
            f"{tokenizer.vocab_size} entries: leave --vocab-size out; --padded-vocab-size sets the "
            "model's rows"
        )
    return tokenizer


def _read_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Return a tokenizer read from files."""
    if config.tokenizer_type == GPT2_TYPE:
        assert config.vocab_file is not None, "TokenizerConfig checks this"
        assert config.merge_file is not None, "TokenizerConfig checks this"
        return gpt2_tokenizer(config.vocab_file, config.merge_file)
    assert config.tokenizer_model is not None, "TokenizerConfig checks this"
    if config.tokenizer_type in SENTENCEPIECE_TYPES:
        begins = config.tokenizer_type == "Llama2Tokenizer"
        return SentencePieceTokenizer(config.tokenizer_model, begins_texts=begins)
    if config.tokenizer_type == "TikTokenizer":
        return TikTokenizer(config.tokenizer_model)
    return hugging_face_tokenizer(config.tokenizer_model)


def padded_vocab_size(vocab_size: int, divisible_by: int, exactly: int | None = None) -> int:
    """Round `vocab_size` up to --make-vocab-size-divisible-by: rows of embedding and head.

    With --padded-vocab-size the number is `exactly`, and the multiple is ignored.
    """
    if exactly is not None:
        if exactly < vocab_size:
            raise UserError(
                f"--padded-vocab-size {exactly} is less than the {vocab_size} entries of the "
                f"vocabulary: give {vocab_size} or more, or leave it out"
            )
        if exactly > _MAX_ROWS:
            raise UserError(f"--padded-vocab-size {exactly} must be at most {_MAX_ROWS}")
        return exactly
    if not 1 <= divisible_by <= _MAX_ROWS:
        raise UserError(
            f"--make-vocab-size-divisible-by {divisible_by} must be at least 1 and at most "
            f"{_MAX_ROWS}"
        )
    return -(-vocab_size // divisible_by) * divisible_by


class SentencePieceTokenizer:
    """A SentencePiece `.model` file, as in LLaMA-1 and LLaMA-2 or from tools/train_tokenizer.py.
    Of Megatron's three names for this type, only Llama2Tokenizer begins texts with `bos`.

    Documents end with the model's own EOS token. Megatron does the same under two of the names; its
    SentencePieceTokenizer ends them with an <EOD> that it adds above the model's ids.
    """

    def __init__(self, model: str, *, begins_texts: bool = False) -> None:
        self._processor = _load_sentencepiece(Path(model))
        self.vocab_size: int = self._processor.get_piece_size()
        self.eod: int = self._processor.eos_id()
        bos = self._processor.bos_id()
        self.bos: int | None = bos if bos >= 0 else None
        if self.eod < 0:
            raise UserError(
                f"--tokenizer-model {model} has no end-of-sentence piece to end documents with: "
                "train it with one, as tools/train_tokenizer.py does"
            )
        self.text_prefix: tuple[int, ...] = ()
        if begins_texts:
            if self.bos is None:
                raise UserError(
                    f"--tokenizer-model {model} has no piece that begins a text, which "
                    "--tokenizer-type Llama2Tokenizer needs: use SentencePieceTokenizer"
                )
            self.text_prefix = (self.bos,)

    @property
    def vocabulary(self) -> dict[str, int]:
        return {self._processor.id_to_piece(i): i for i in range(self.vocab_size)}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._processor.encode(list(texts), num_threads=1)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._processor.decode([int(token) for token in ids])
        return text

    def token_bytes(self) -> list[int]:
        return [self._bytes_of(number) for number in range(self.vocab_size)]

    def _bytes_of(self, number: int) -> int:
        pieces = self._processor
        if pieces.is_control(number) or pieces.is_unknown(number):
            return 0
        text: str = pieces.id_to_piece(number)
        return 1 if pieces.is_byte(number) else len(text.replace(BLANK, " ").encode())


def _load_sentencepiece(path: Path) -> Any:
    with importing("this --tokenizer-type needs the package sentencepiece"):
        from sentencepiece import SentencePieceProcessor
    if not path.is_file():
        raise UserError(f"--tokenizer-model {path} is missing: give a SentencePiece .model")
    content = read_bytes(path, f"--tokenizer-model {path}")
    try:
        processor = SentencePieceProcessor(model_proto=content)
        num_pieces = processor.get_piece_size() if content else 0  # it takes nothing for no model
    except (OSError, RuntimeError) as error:
        raise UserError(f"--tokenizer-model {path} is not a SentencePiece model") from error
    if num_pieces == 0:
        raise UserError(f"--tokenizer-model {path} is not a SentencePiece model: it has no pieces")
    return processor


class NullTokenizer:
    """A tokenizer of numbers: `3 1 2` becomes the ids 3, 1, 2, all below --vocab-size.

    The EOD is the last id, --vocab-size - 1, unless --null-tokenizer-eod-id is given: as in
    Megatron since core 0.18; before, it was an extra id on top of --vocab-size.
    """

    def __init__(self, vocab_size: int, *, eod: int | None = None) -> None:
        self.eod = vocab_size - 1 if eod is None else eod
        self.bos = None
        self.text_prefix: tuple[int, ...] = ()
        self.vocab_size = vocab_size
        self.vocabulary: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        words = text.split()
        for word in words:
            known = word.isascii() and word.isdigit() and len(word) < 20
            if not known or int(word) >= self.vocab_size:
                raise UserError(
                    f"{word[:20]!r} is no token id: --tokenizer-type NullTokenizer takes numbers "
                    f"from 0 to {self.vocab_size - 1}, separated by blanks"
                )
        return [int(word) for word in words]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(token)) for token in ids)

    def token_bytes(self) -> None:
        return None
