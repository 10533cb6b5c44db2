"""Hugging Face tokenizers, which transformers reads and the tokenizers library runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypedDict

from data.hub import how_to_fetch
from paro.errors import UserError, importing, type_and_message
from paro.untrusted.regular_file import check_regular, read_bytes
from paro.untrusted.schema import read_json

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
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))

    def token_bytes(self) -> list[int] | None:
        return bytes_of_pieces(self._tokenizer, self.vocab_size)


class _PythonTokenizer(LibraryTokenizer):
    """A tokenizer that transformers implements in Python."""

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        # No warnings: a corpus has texts longer than the model's maximum length.
        encoded = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)
        return list(encoded.input_ids)

    def decode(self, ids: Iterable[int]) -> str:
        decode = self._tokenizer.decode
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(decode(list(ids), **options))

    def token_bytes(self) -> None:
        return None


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
    tokenizer = _load_tokenizer_json(file) if file.exists() else load_transformers_tokenizer(model)
    eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
    if eos is None:
        eos = _model_says(file.parent, "eos_token_id")
    if bos is None:
        bos = _model_says(file.parent, "bos_token_id")
    if not tokenizer.is_fast:
        return _PythonTokenizer(tokenizer, source, eos=eos, bos=bos)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # tokenizer.json may enable truncation
    backend.no_padding()
    return LibraryTokenizer(backend, source, eos=eos, bos=bos)


def _load_tokenizer_json(file: Path) -> Any:
    """Return a tokenizer.json as it is, with the tokens that the files next to it add."""
    with importing("--tokenizer-type HuggingFaceTokenizer needs the package transformers"):
        from transformers import PreTrainedTokenizerFast
    read_bytes(file, f"--tokenizer-model {file}")  # refuses a device, or a file without an end
    for path in (file.parent / name for name in ADDING_FILES):
        _read(path, dict[str, Any])
    try:
        return PreTrainedTokenizerFast.from_pretrained(
            str(file.parent), tokenizer_file=str(file), local_files_only=True
        )
    except Exception as error:  # whatever a wrong field leads to
        raise UserError(
            f"--tokenizer-model {file} is not a tokenizer.json that transformers reads, with the "
            f"{', '.join(ADDING_FILES)} next to it: {type_and_message(error)}"
        ) from error


def _model_says(folder: Path, field: str) -> int | None:
    """Return a special id from config.json or generation_config.json, if it is a single id."""
    for name in ("config.json", "generation_config.json"):
        value = _read(folder / name, dict[str, Any]).get(field)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


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
    with importing(
        f"--tokenizer-model {model} is no file, and a folder or a name needs transformers"
    ):
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
