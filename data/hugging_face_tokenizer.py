"""Hugging Face's tokenizers: a tokenizer.json by its own library, anything else by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TOKENIZER_JSON = "tokenizer.json"
# What transformers calls the tokens that have a part of their own.
_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class HuggingFaceTokenizer:
    """A `tokenizer.json` file, a folder that holds one, or what else transformers loads: a folder
    of other files, or a hub name in its cache.

    A `tokenizer.json` does not say which token ends a document: `eos_token` in the
    `tokenizer_config.json` beside it does, as published models have it, or `eos_token_id` in their
    `config.json`. Nothing is downloaded, since every rank would do so.

    Texts of a corpus get no special tokens. Megatron's type of this name gives them those of the
    tokenizer, such as LLaMA's beginning, unless --tokenizer-hf-no-include-special-tokens is given.
    """

    def __init__(self, model: str) -> None:
        path = Path(model)
        if path.is_file():
            loaded = _load_tokenizer_json(path)
        elif (path / TOKENIZER_JSON).is_file():
            # transformers itself takes ten times as long to import as this takes in all.
            loaded = _load_tokenizer_json(path / TOKENIZER_JSON, more_tokens=True)
        else:
            loaded = _load_with_transformers(model)
        if loaded.eos is None:
            raise ValueError(
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
    """What the two libraries have in common."""

    encode: Callable[[str], list[int]]
    encode_batch: Callable[[Sequence[str]], list[list[int]]]
    decode: Callable[[list[int]], str]
    vocabulary: Mapping[str, int]
    eos: int | None
    bos: int | None


def _load_tokenizer_json(path: Path, *, more_tokens: bool = False) -> _Loaded:
    """`more_tokens`: with those that the files beside it add, as transformers reads a folder."""
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError("--tokenizer-type HuggingFaceTokenizer needs tokenizers") from error
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"--tokenizer-model {path} is not a tokenizer.json") from error
    tokenizer.no_truncation()  # which a file may ask for
    tokenizer.no_padding()
    config = _read_config(path.parent)
    if more_tokens:
        known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        for token in _added_tokens(path.parent, config):
            if token["content"] not in known:  # the first of two is the one that counts
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
    """The fields of tokenizer_config.json, and of special_tokens_map.json as older folders have."""
    config = _read(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _read(folder / "special_tokens_map.json")
    return config


def _added_tokens(folder: Path, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What transformers adds to a tokenizer.json that lacks it, in its order."""
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
    """The text of a token that is given as one, or by its fields."""
    text: str | None = token["content"] if isinstance(token, dict) else token
    return text


def _model_says(folder: Path, field: str) -> int | None:
    """A special id by config.json or generation_config.json, where it is one and not several."""
    for name in ("config.json", "generation_config.json"):
        value = _read(folder / name).get(field)
        if isinstance(value, int):
            return value
    return None


def _read(path: Path) -> dict[str, Any]:
    """An object of JSON; empty without the file."""
    if not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} is not a JSON object: repair or remove it")
    return fields


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
        vocabulary=tokenizer.get_vocab(),
        eos=tokenizer.eos_token_id,
        bos=tokenizer.bos_token_id,
    )
