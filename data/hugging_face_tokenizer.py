"""Hugging Face tokenizers: tokenizer.json via the tokenizers library, others via transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paro.errors import UserError

TOKENIZER_JSON = "tokenizer.json"
# Names of special token roles in transformers.
_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class HuggingFaceTokenizer:
    """A `tokenizer.json` file, a folder that contains one, or anything else transformers loads: a
    folder of other files, or a hub name in its cache.

    A `tokenizer.json` does not define which token ends a document. That comes from `eos_token` in
    the `tokenizer_config.json` next to it, as in published models, or from `eos_token_id` in their
    `config.json`. Nothing is downloaded, since every rank would do so.

    Texts of a corpus get no special tokens. Megatron's type of this name adds the tokenizer's, such
    as LLaMA's BOS, unless --tokenizer-hf-no-include-special-tokens is given.
    """

    def __init__(self, model: str) -> None:
        path = Path(model)
        if path.is_file():
            loaded = _load_tokenizer_json(path)
        elif (path / TOKENIZER_JSON).is_file():
            # Importing transformers alone takes ten times as long as this whole load.
            loaded = _load_tokenizer_json(path / TOKENIZER_JSON, more_tokens=True)
        else:
            loaded = _load_with_transformers(model)
        if loaded.eos is None:
            raise UserError(
                f"--tokenizer-model {model} does not say which token ends a document: put "
                '{"eos_token": "..."} into the tokenizer_config.json beside it'
            )
        self.text_prefix: tuple[int, ...] = ()
        self._encode = loaded.encode
        self._encode_batch = loaded.encode_batch
        self._decode = loaded.decode
        self.vocabulary = loaded.vocabulary
        self.vocab_size = max(loaded.vocabulary.values()) + 1
        self.eod = loaded.eos
        self.bos = loaded.bos

    def encode(self, text: str) -> list[int]:
        return self._encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encode_batch(texts) if texts else []

    def decode(self, ids: Iterable[int]) -> str:
        return self._decode([int(token) for token in ids])


class _Loaded(NamedTuple):
    """A loaded tokenizer of either library, reduced to what both provide."""

    encode: Callable[[str], list[int]]
    encode_batch: Callable[[Sequence[str]], list[list[int]]]
    decode: Callable[[list[int]], str]
    vocabulary: Mapping[str, int]
    eos: int | None
    bos: int | None


def _load_tokenizer_json(path: Path, *, more_tokens: bool = False) -> _Loaded:
    """`more_tokens`: also add tokens from the files next to it, like transformers does."""
    try:
        import tokenizers
    except ImportError as error:
        raise UserError("--tokenizer-type HuggingFaceTokenizer needs tokenizers") from error
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"--tokenizer-model {path} is not a tokenizer.json") from error
    tokenizer.no_truncation()  # a file may enable it
    tokenizer.no_padding()
    config = _read_config(path.parent)
    if more_tokens:
        known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        for token in _added_tokens(path.parent, config):
            if token["content"] not in known:  # the first of two equal tokens counts
                known.add(token["content"])
                tokenizer.add_tokens([tokenizers.AddedToken(**token)])
        tokenizer.encode_special_tokens = bool(config.get("split_special_tokens"))

    def special(part: str) -> int | None:
        text = _content(config.get(f"{part}_token"))
        if text is not None:
            return tokenizer.token_to_id(text)
        return _model_says(path.parent, f"{part}_token_id")

    return _Loaded(
        encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        encode_batch=lambda texts: [
            encoding.ids
            for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ],
        decode=lambda ids: str(tokenizer.decode(ids)),
        vocabulary=tokenizer.get_vocab(),
        eos=special("eos"),
        bos=special("bos"),
    )


def _read_config(folder: Path) -> dict[str, Any]:
    """The fields of tokenizer_config.json, and of special_tokens_map.json in older folders."""
    config = _read(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _read(folder / "special_tokens_map.json")
    return config


def _added_tokens(folder: Path, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Tokens that transformers adds to a tokenizer.json that lacks them, in its order."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    named = [config.get(f"{part}_token") for part in _NAMED]
    special = [
        {**(token if isinstance(token, dict) else {"content": token}), "special": True}
        for token in (*named, *(extra.values() if isinstance(extra, dict) else extra))
        if token is not None
    ]
    if "added_tokens_decoder" in config:
        decoder = config["added_tokens_decoder"]
        yield from (decoder[number] for number in sorted(decoder, key=int))
    else:
        texts = {token["content"] for token in special}
        ids = _read(folder / "added_tokens.json")
        for text in sorted(ids, key=lambda text: int(ids[text])):
            yield {"content": text, "normalized": text not in texts, "special": text in texts}
    for token in special:
        yield {name: value for name, value in token.items() if name != "__type"}


def _content(token: Any) -> str | None:
    """The text of a token that is given as a string or as an object."""
    text: str | None = token["content"] if isinstance(token, dict) else token
    return text


def _model_says(folder: Path, field: str) -> int | None:
    """A special id from config.json or generation_config.json, if it is a single id."""
    for name in ("config.json", "generation_config.json"):
        value = _read(folder / name).get(field)
        if isinstance(value, int):
            return value
    return None


def _read(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file."""
    if not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_bytes())
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise UserError(f"{path} is not a JSON object: repair or remove it")
    return fields


def _load_with_transformers(model: str) -> _Loaded:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UserError(
            f"--tokenizer-model {model} is no file, and a folder or a name needs transformers"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except Exception as error:  # OSError, ValueError, TypeError and more, depending on the folder
        raise UserError(
            f"--tokenizer-model {model} is neither a tokenizer.json nor a tokenizer that "
            f"transformers finds on this machine: get it first, such as with 'hf download {model}'"
        ) from error
    return _Loaded(
        encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
        encode_batch=lambda texts: list(
            # No warnings: a corpus has texts longer than the model's maximum length.
            tokenizer(list(texts), add_special_tokens=False, verbose=False).input_ids
        ),
        decode=lambda ids: str(
            tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        ),
        vocabulary=tokenizer.get_vocab(),
        eos=tokenizer.eos_token_id,
        bos=tokenizer.bos_token_id,
    )
