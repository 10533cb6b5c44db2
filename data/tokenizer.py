"""Text to token ids and back, by Megatron's tokenizer types."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from data.gpt2_tokenizer import GPT2BPETokenizer
from data.tik_tokenizer import TikTokenizer
from data.tokenizer_config import GPT2_TYPE, SENTENCEPIECE_TYPES, TokenizerConfig


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
        return NullTokenizer(config.vocab_size, eod=config.null_tokenizer_eod_id)
    tokenizer = _read_tokenizer(config)
    if config.vocab_size not in (None, tokenizer.vocab_size):
        flag = "--vocab-file" if config.tokenizer_type == GPT2_TYPE else "--tokenizer-model"
        raise ValueError(
            f"--vocab-size {config.vocab_size} contradicts {flag} {config.files[0]}, which has "
            f"{tokenizer.vocab_size} entries: leave --vocab-size out; --padded-vocab-size sets the "
            "model's rows"
        )
    return tokenizer


def _read_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """A tokenizer that lies in files."""
    if config.tokenizer_type == GPT2_TYPE:
        assert config.vocab_file is not None, "TokenizerConfig checks this"
        assert config.merge_file is not None, "TokenizerConfig checks this"
        return GPT2BPETokenizer(config.vocab_file, config.merge_file)
    assert config.tokenizer_model is not None, "TokenizerConfig checks this"
    if config.tokenizer_type in SENTENCEPIECE_TYPES:
        begins = config.tokenizer_type == "Llama2Tokenizer"
        return SentencePieceTokenizer(config.tokenizer_model, begins_texts=begins)
    if config.tokenizer_type == "TikTokenizer":
        return TikTokenizer(config.tokenizer_model)
    return HuggingFaceTokenizer(config.tokenizer_model)


def padded_vocab_size(vocab_size: int, divisible_by: int, exactly: int | None = None) -> int:
    """The rows of embedding and head: `vocab_size` rounded up to --make-vocab-size-divisible-by.

    With --padded-vocab-size they are `exactly` so many, and the multiple does not count.
    """
    if exactly is not None:
        if exactly < vocab_size:
            raise ValueError(
                f"--padded-vocab-size {exactly} is less than the {vocab_size} entries of the "
                f"tokenizer: give {vocab_size} or more, or leave it out"
            )
        return exactly
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


class HuggingFaceTokenizer:
    """A `tokenizer.json` file, or what transformers loads: a folder, or a hub name in its cache.

    A `tokenizer.json` does not say which token ends a document: `eos_token` in the
    `tokenizer_config.json` beside it does, as published models have it. Nothing is downloaded,
    since every rank would do so.

    Texts of a corpus get no special tokens. Megatron's type of this name gives them those of the
    tokenizer, such as LLaMA's beginning, unless --tokenizer-hf-no-include-special-tokens is given.
    """

    def __init__(self, model: str) -> None:
        path = Path(model)
        loaded = _load_tokenizer_json(path) if path.is_file() else _load_with_transformers(model)
        if loaded.eos is None:
            raise ValueError(
                f"--tokenizer-model {model} does not say which token ends a document: put "
                '{"eos_token": "..."} into the tokenizer_config.json beside it'
            )
        self.text_prefix: tuple[int, ...] = ()
        self._encode = loaded.encode
        self._encode_batch = loaded.encode_batch
        self._decode = loaded.decode
        self.vocab_size = loaded.vocab_size
        self.eod = loaded.eos
        self.bos = loaded.bos

    def encode(self, text: str) -> list[int]:
        return self._encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encode_batch(texts) if texts else []

    def decode(self, ids: Iterable[int]) -> str:
        return self._decode([int(token) for token in ids])


class _Loaded(NamedTuple):
    """What the two libraries have in common."""

    encode: Callable[[str], list[int]]
    encode_batch: Callable[[Sequence[str]], list[list[int]]]
    decode: Callable[[list[int]], str]
    vocab_size: int
    eos: int | None
    bos: int | None


def _load_tokenizer_json(path: Path) -> _Loaded:
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError("--tokenizer-type HuggingFaceTokenizer needs tokenizers") from error
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"--tokenizer-model {path} is not a tokenizer.json") from error
    named = _special_tokens(path.with_name("tokenizer_config.json"))
    return _Loaded(
        encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        encode_batch=lambda texts: [
            encoding.ids
            for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ],
        decode=lambda ids: str(tokenizer.decode(ids)),
        vocab_size=max(tokenizer.get_vocab().values()) + 1,
        eos=tokenizer.token_to_id(named["eos_token"]) if "eos_token" in named else None,
        bos=tokenizer.token_to_id(named["bos_token"]) if "bos_token" in named else None,
    )


def _special_tokens(path: Path) -> dict[str, str]:
    """Texts of the special tokens that a tokenizer_config.json names; none without the file."""
    if not path.is_file():
        return {}
    try:
        entries = json.loads(path.read_text(encoding="utf-8")).items()
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a JSON object: repair or remove it") from error
    texts = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in entries
        if key in ("eos_token", "bos_token")
    }
    return {key: text for key, text in texts.items() if text is not None}


def _load_with_transformers(model: str) -> _Loaded:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(
            f"--tokenizer-model {model} is no file, and a folder or a name needs transformers"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except Exception as error:  # OSError, ValueError, TypeError and more, by what is in the folder
        raise ValueError(
            f"--tokenizer-model {model} is neither a tokenizer.json nor a tokenizer that "
            f"transformers finds on this machine: get it first, such as with 'hf download {model}'"
        ) from error
    return _Loaded(
        encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
        encode_batch=lambda texts: list(
            # Quiet: a corpus has texts longer than what the model was made for.
            tokenizer(list(texts), add_special_tokens=False, verbose=False).input_ids
        ),
        decode=lambda ids: str(
            tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        ),
        vocab_size=max(tokenizer.get_vocab().values()) + 1,
        eos=tokenizer.eos_token_id,
        bos=tokenizer.bos_token_id,
    )


class NullTokenizer:
    """Texts that are numbers: `3 1 2` is the ids 3, 1, 2, all below --vocab-size.

    The end of a document is the last id, --vocab-size - 1, unless --null-tokenizer-eod-id says
    otherwise: as in Megatron since core 0.18, before which it came on top of --vocab-size.
    """

    def __init__(self, vocab_size: int, *, eod: int | None = None) -> None:
        self.eod = vocab_size - 1 if eod is None else eod
        self.bos = None
        self.text_prefix: tuple[int, ...] = ()
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        words = text.split()
        for word in words:
            known = word.isascii() and word.isdigit() and len(word) < 20
            if not known or int(word) >= self.vocab_size:
                raise ValueError(
                    f"{word[:20]!r} is no token id: --tokenizer-type NullTokenizer takes numbers "
                    f"from 0 to {self.vocab_size - 1}, separated by blanks"
                )
        return [int(word) for word in words]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(token)) for token in ids)
