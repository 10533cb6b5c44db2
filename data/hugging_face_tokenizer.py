"""Hugging Face tokenizers: tokenizer.json via the tokenizers library, others via transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from data.hub import how_to_fetch
from paro.errors import UserError, importing
from paro.files.regular_file import check_regular, read_bytes
from paro.files.schema import read_json

TOKENIZER_JSON = "tokenizer.json"
# Files that may add tokens to those of a tokenizer file next to them.
ADDING_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_ONE_BYTE = re.compile("<0x[0-9A-F]{2}>")
_UNCHANGING = ("ByteFallback", "ByteLevel", "Fuse", "Strip")  # decoder steps that keep the bytes


class LibraryTokenizer:
    """A tokenizer of the tokenizers library; `source` is the flag and the file, for messages."""

    text_prefix: tuple[int, ...] = ()

    def __init__(self, tokenizer: Any, source: str, *, eos: int | None, bos: int | None) -> None:
        if eos is None:
            raise UserError(
                f"{source} does not say which token ends a document: put "
                '{"eos_token": "..."} into the tokenizer_config.json of that folder'
            )
        self._tokenizer = tokenizer
        self.vocabulary: dict[str, int] = tokenizer.get_vocab()
        if not self.vocabulary:
            raise UserError(f"{source} has an empty vocabulary")
        self.vocab_size = max(self.vocabulary.values()) + 1
        if not 0 <= eos < self.vocab_size:
            raise UserError(
                f"{source} ends documents with the id {eos}, and it has {self.vocab_size} ids: "
                "correct the eos_token_id in the config.json of that folder"
            )
        self.eod = eos
        self.bos = bos

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))

    def token_bytes(self) -> list[int] | None:
        return bytes_of_pieces(self._tokenizer, self.vocab_size)


class _TransformersTokenizer(LibraryTokenizer):
    """A tokenizer of transformers."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        # No warnings: a corpus has texts longer than the model's maximum length.
        encoded = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)
        return list(encoded.input_ids)

    def decode(self, ids: Iterable[int]) -> str:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(ids), **options))

    def token_bytes(self) -> list[int] | None:
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        return None if fast is None else bytes_of_pieces(fast, self.vocab_size)


def hugging_face_tokenizer(model: str) -> LibraryTokenizer:
    """Open a `tokenizer.json` or its folder, another folder of transformers, or a cached hub name.

    Files next to a `tokenizer.json` may add tokens, which get the same ids as in transformers. The
    token that ends documents is `eos_token` of the `tokenizer_config.json` next to it, or
    `eos_token_id` of `config.json`: `tokenizer.json` does not define it. Nothing is downloaded,
    since every rank would download it.

    Texts of a corpus get no special tokens. Megatron's type of this name adds the tokenizer's, such
    as LLaMA's BOS, unless --tokenizer-hf-no-include-special-tokens is given.
    """
    path = Path(model)
    file = path / TOKENIZER_JSON if path.is_dir() else path
    source = f"--tokenizer-model {model}"
    # Importing transformers alone takes ten times as long as reading a tokenizer.json.
    if file.exists():
        return _load_tokenizer_json(file, source)
    tokenizer = load_transformers_tokenizer(model)
    eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
    return _TransformersTokenizer(tokenizer, source, eos=eos, bos=bos)


class _Token(TypedDict):
    """The fields of tokenizers.AddedToken."""

    content: str
    single_word: NotRequired[bool]
    lstrip: NotRequired[bool]
    rstrip: NotRequired[bool]
    normalized: NotRequired[bool]
    special: NotRequired[bool]


_Named = str | _Token | None
_Extra = list[str | _Token] | dict[str, str | _Token] | None


class _TokenizerFields(TypedDict, total=False):
    """The fields of tokenizer_config.json and special_tokens_map.json that are read."""

    bos_token: _Named
    eos_token: _Named
    unk_token: _Named
    sep_token: _Named
    pad_token: _Named
    cls_token: _Named
    mask_token: _Named
    added_tokens_decoder: dict[int, _Token]
    extra_special_tokens: _Extra
    additional_special_tokens: _Extra
    split_special_tokens: bool | None


_ROLES = [name for name in _TokenizerFields.__annotations__ if name.endswith("_token")]


def _load_tokenizer_json(path: Path, source: str) -> LibraryTokenizer:
    """Return a tokenizer.json with the tokens that the files next to it add."""
    with importing("--tokenizer-type HuggingFaceTokenizer needs tokenizers"):
        import tokenizers
    content = read_bytes(path, f"--tokenizer-model {path}")
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"--tokenizer-model {path} is not a tokenizer.json") from error
    tokenizer.no_truncation()  # tokenizer.json may enable truncation
    tokenizer.no_padding()
    config = _read_config(path.parent)
    _add_tokens(tokenizer, path.parent, config)
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens"))

    def special(part: str) -> int | None:
        text = _content(config.get(f"{part}_token"))
        if text is not None:
            return tokenizer.token_to_id(text)
        files = (path.parent / name for name in ("config.json", "generation_config.json"))
        stated = (_read(file, dict[str, Any]).get(f"{part}_token_id") for file in files)
        return next((number for number in stated if type(number) is int), None)  # of several, none

    return LibraryTokenizer(tokenizer, source, eos=special("eos"), bos=special("bos"))


def _read_config(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, and in older folders special_tokens_map.json."""
    config = _read(folder / "tokenizer_config.json", _TokenizerFields)
    if "added_tokens_decoder" not in config:
        config |= _read(folder / "special_tokens_map.json", _TokenizerFields)
    return config


def _add_tokens(tokenizer: Any, folder: Path, config: Mapping[str, Any]) -> None:
    """Add the tokens that transformers adds to a tokenizer.json, in its order.

    First tokens with an id of their own, then those with a role, then extra ones. A text that is
    there keeps its id.
    """
    named, extra = _special_tokens(config)
    names = {_content(token) for token in named}
    present = tokenizer.get_added_tokens_decoder()
    unchanged = {repr(token) for token in present.values()}
    decoder = config.get("added_tokens_decoder", {})
    numbered = {number: _added_token(token) for number, token in decoder.items()}
    if "added_tokens_decoder" not in config:
        special = {*names, *map(_content, extra)}
        for text, number in _read(folder / "added_tokens.json", dict[str, int]).items():
            flags = {"normalized": text not in special, "special": text in special}
            numbered[number] = _added_token({"content": text, **flags})
        numbered |= present
        _mark_special(numbered.values(), names)
    tokens = [numbered[number] for number in sorted(numbered)]
    added = [token for token in tokens if repr(token) not in unchanged]
    known = {token.content for token in (*present.values(), *added)}
    added += [token for token in map(_added_token, (*named, *extra)) if token.content not in known]
    _mark_special(added, names)
    tokenizer.add_tokens(added)


def adds_tokens(folder: Path, vocabulary: Mapping[str, int], *, eos: int, bos: int | None) -> bool:
    """Return whether a folder's files add tokens to a vocabulary, or name another end or begin."""
    config = _read_config(folder)
    named, extra = _special_tokens(config)
    numbered = config.get("added_tokens_decoder", {}).values()
    texts = {*map(_content, (*named, *extra, *numbered))}
    if "added_tokens_decoder" not in config:
        texts |= _read(folder / "added_tokens.json", dict[str, int]).keys()
    if not texts <= vocabulary.keys():
        return True
    end, begin = (_content(config.get(name)) for name in ("eos_token", "bos_token"))
    other_end = end is not None and vocabulary[end] != eos
    return other_end or (begin is not None and vocabulary[begin] != bos)


def _special_tokens(config: Mapping[str, Any]) -> tuple[list[str | _Token], list[str | _Token]]:
    """Return the tokens with a role (`eos_token`, `image_token`), and the extra ones."""
    tokens = {name: config.get(name) for name in _ROLES}
    tokens |= {k: v for k, v in config.items() if k.endswith("_token") and isinstance(v, str)}
    extra, older = config.get("extra_special_tokens"), config.get("additional_special_tokens")
    if isinstance(extra, dict):
        tokens, extra = tokens | extra, None
    return [token for token in tokens.values() if token is not None], extra or older or []


def _mark_special(tokens: Iterable[Any], names: Container[str | None]) -> None:
    for token in tokens:
        token.special = token.special or token.content in names


def _added_token(token: str | Mapping[str, Any]) -> Any:
    """Build the library's token; a token given as plain text is special."""
    from tokenizers import AddedToken

    if isinstance(token, str):
        return AddedToken(token, special=True)
    return AddedToken(**{name: token[name] for name in _Token.__annotations__ if name in token})


def _content(token: Any) -> str | None:
    """Return the text of a token that is given as a string or as an object."""
    return token["content"] if isinstance(token, dict) else token


class _Ends(TypedDict, total=False):
    eos_token_id: int | list[int] | None


def ends_in(path: Path) -> frozenset[int]:
    """Return the ids that end a text by a generation_config.json; none if there is no such file."""
    ids = _read(path, _Ends).get("eos_token_id")
    return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])


def _read(path: Path, kind: Any) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is no file."""
    return dict(read_json(path, kind)) if path.exists() else {}


def load_transformers_tokenizer(model: str) -> Any:
    """Return the tokenizer that transformers makes of a folder, of one by its tokenizer.json, or of
    a name in its cache; `UserError` if it needs code that comes with it.
    """
    with importing(f"--tokenizer-model {model} is no tokenizer.json: it needs transformers"):
        from transformers import AutoTokenizer
    folder = Path(model).parent if Path(model).is_file() else Path(model)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not path.is_dir():
            check_regular(path, f"--tokenizer-model {path}")
    try:
        where = str(folder) if folder.is_dir() else model
        return AutoTokenizer.from_pretrained(where, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError, TypeError and more, depending on the folder
        if "trust_remote_code" in str(error):
            raise UserError(
                f"--tokenizer-model {model} needs code that comes with it (auto_map), which never "
                "runs here: give a tokenizer.json without it"
            ) from error
        raise UserError(
            f"--tokenizer-model {model} is neither a tokenizer.json nor a tokenizer that "
            f"transformers finds on this machine{how_to_fetch(model)}"
        ) from error


def bytes_of_pieces(tokenizer: Any, vocab_size: int) -> list[int] | None:
    """Count the bytes of text of every id; 0 for special and unknown tokens.

    None if the decoder inserts blanks that are not in the pieces, as WordPiece's does.
    """
    described = json.loads(tokenizer.to_str())
    decoder, model = described["decoder"] or {}, described["model"]
    steps = decoder.get("decoders", [decoder])
    spelled = [_spelling(step) for step in steps]
    kinds = {step.get("type") for step in steps}
    counts = [0] * vocab_size
    for piece, number in tokenizer.get_vocab(with_added_tokens=False).items():
        text = piece
        for pair in spelled:
            if pair is None:
                return None
            text = text.replace(*pair)
        if "ByteLevel" in kinds:  # each character of a piece stands for one byte
            counts[number] = len(text)
        elif "ByteFallback" in kinds and _ONE_BYTE.fullmatch(text):
            counts[number] = 1
        else:
            counts[number] = len(text.encode())
    for number, token in tokenizer.get_added_tokens_decoder().items():
        counts[number] = 0 if token.special else len(token.content.encode())
    unknown = model.get("unk_token")
    for number in (model.get("unk_id"), unknown and tokenizer.token_to_id(unknown)):
        if number is not None:
            counts[number] = 0
    return counts


def _spelling(step: dict[str, Any]) -> tuple[str, str] | None:
    """Return the text that a decoder step replaces and its replacement; None if not simple."""
    kind = step.get("type")
    if kind == "Metaspace":
        return step["replacement"], " "
    if kind == "Replace" and "String" in step["pattern"]:
        return step["pattern"]["String"], step["content"]
    return ("", "") if kind in _UNCHANGING else None
