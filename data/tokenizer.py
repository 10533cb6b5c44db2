"""Text to token ids and back, by Megatron's tokenizer types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from data.hugging_face_tokenizer import HuggingFaceTokenizer
from data.tik_tokenizer import TikTokenizer

SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
TOKENIZER_TYPES = (
    *SENTENCEPIECE_TYPES,
    "HuggingFaceTokenizer",
    "TikTokenizer",
    "NullTokenizer",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """Which tokenizer; `vocab_size` is needed by NullTokenizer and checked for the others."""

    tokenizer_type: str
    tokenizer_model: str | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.tokenizer_type not in TOKENIZER_TYPES:
            raise ValueError(
                f"--tokenizer-type {self.tokenizer_type} is unknown: choose one of "
                f"{', '.join(TOKENIZER_TYPES)}"
            )
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ValueError(f"--vocab-size {self.vocab_size} must be at least 1")
        if self.tokenizer_type == "NullTokenizer":
            if self.vocab_size is None:
                raise ValueError("--tokenizer-type NullTokenizer needs --vocab-size")
        elif self.tokenizer_model is None:
            raise ValueError(f"--tokenizer-type {self.tokenizer_type} needs --tokenizer-model")


class Tokenizer(Protocol):
    """What preprocessing, training and generation need of a tokenizer.

    `encode` adds no special tokens: who wants a beginning or an end adds `bos` or `eod`.
    """

    @property
    def text_prefix(self) -> tuple[int, ...]:
        """What is put before every text of a corpus: `bos` by Llama2Tokenizer, else nothing."""

    @property
    def vocab_size(self) -> int:
        """All ids lie below; not padded."""

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Every piece's id; empty where ids stand for nothing."""

    @property
    def eod(self) -> int:
        """The id that ends a document."""

    @property
    def bos(self) -> int | None:
        """The id that begins a text, where there is one."""

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Many texts in one call of the library, on one thread."""

    def decode(self, ids: Iterable[int]) -> str: ...


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of a configuration; `ValueError` or `OSError` names the flag at fault."""
    if config.tokenizer_type == "NullTokenizer":
        assert config.vocab_size is not None, "TokenizerConfig checks this"
        return NullTokenizer(config.vocab_size)
    assert config.tokenizer_model is not None, "TokenizerConfig checks this"
    tokenizer: Tokenizer
    if config.tokenizer_type in SENTENCEPIECE_TYPES:
        begins = config.tokenizer_type == "Llama2Tokenizer"
        tokenizer = SentencePieceTokenizer(config.tokenizer_model, begins_texts=begins)
    elif config.tokenizer_type == "TikTokenizer":
        tokenizer = TikTokenizer(config.tokenizer_model)
    else:
        tokenizer = HuggingFaceTokenizer(config.tokenizer_model)
    if config.vocab_size not in (None, tokenizer.vocab_size):
        raise ValueError(
            f"--vocab-size {config.vocab_size} contradicts --tokenizer-model "
            f"{config.tokenizer_model}, which has {tokenizer.vocab_size} entries: leave "
            "--vocab-size out"
        )
    return tokenizer


def padded_vocab_size(vocab_size: int, divisible_by: int) -> int:
    """The rows of embedding and head: `vocab_size` rounded up to --make-vocab-size-divisible-by."""
    if divisible_by < 1:
        raise ValueError(f"--make-vocab-size-divisible-by {divisible_by} must be at least 1")
    return -(-vocab_size // divisible_by) * divisible_by


class SentencePieceTokenizer:
    """A SentencePiece `.model` file, such as LLaMA-1 and LLaMA-2 have or tools/train_tokenizer.py
    writes. Of Megatron's three names for it Llama2Tokenizer alone begins texts with `bos`.

    Documents end with the model's own end of a sentence. So they do in Megatron under two of the
    names; its SentencePieceTokenizer ends them with an <EOD> that it adds above the model's ids.
    """

    def __init__(self, model: str, *, begins_texts: bool = False) -> None:
        self._processor = _load_sentencepiece(Path(model))
        self.vocab_size: int = self._processor.get_piece_size()
        self.eod: int = self._processor.eos_id()
        bos = self._processor.bos_id()
        self.bos: int | None = bos if bos >= 0 else None
        if self.eod < 0:
            raise ValueError(
                f"--tokenizer-model {model} has no end-of-sentence piece to end documents with: "
                "train it with one, as tools/train_tokenizer.py does"
            )
        self.text_prefix: tuple[int, ...] = ()
        if begins_texts:
            if self.bos is None:
                raise ValueError(
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


def _load_sentencepiece(path: Path) -> Any:
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise ValueError("this --tokenizer-type needs the package sentencepiece") from error
    if not path.is_file():
        raise FileNotFoundError(f"--tokenizer-model {path} is missing: give a SentencePiece .model")
    try:
        return SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise ValueError(f"--tokenizer-model {path} is not a SentencePiece model") from error


class NullTokenizer:
    """Texts that are numbers: `3 1 2` is the ids 3, 1, 2, all below --vocab-size.

    The end of a document is the id --vocab-size itself, as in Megatron, so that the vocabulary
    has one entry more than the flag says.
    """

    def __init__(self, vocab_size: int) -> None:
        self.eod = vocab_size
        self.bos = None
        self.text_prefix: tuple[int, ...] = ()
        self.vocab_size = vocab_size + 1
        self.vocabulary: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        words = text.split()
        for word in words:
            known = word.isascii() and word.isdigit() and len(word) < 20
            if not known or int(word) > self.eod:
                raise ValueError(
                    f"{word[:20]!r} is no token id: --tokenizer-type NullTokenizer takes numbers "
                    f"from 0 to {self.eod}, separated by blanks"
                )
        return [int(word) for word in words]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(token)) for token in ids)
