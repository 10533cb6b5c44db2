"""Raw documents from .txt and .jsonl files, each with the place it came from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

TEXT_SUFFIXES = (".txt",)
JSON_LINES_SUFFIXES = (".jsonl", ".json")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class RawDocument(NamedTuple):
    """Bytes as they lie in the file; reading them is left to `parse`, in whatever process."""

    place: str  # file, and line for JSON lines
    content: bytes
    is_json: bool


def check_inputs(paths: Sequence[Path]) -> None:
    """Raise unless every file is there and of a kind that is known, before any work is done."""
    for path in paths:
        if path.suffix not in TEXT_SUFFIXES + JSON_LINES_SUFFIXES:
            raise ValueError(
                f"--input {path}: give .txt files (one document each) or .jsonl files (one JSON "
                "object per line)"
            )
        if not path.is_file():
            raise FileNotFoundError(f"--input {path} is missing or not a file")


def raw_documents(paths: Iterable[Path]) -> Iterator[RawDocument]:
    """A .txt file is one document, a .jsonl file one per line; blank lines are passed over."""
    for path in paths:
        if path.suffix in TEXT_SUFFIXES:
            content = path.read_bytes().removeprefix(BYTE_ORDER_MARK)
            yield RawDocument(str(path), content, is_json=False)
            continue
        with path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if number == 1:
                    line = line.removeprefix(BYTE_ORDER_MARK)
                if line.strip():
                    yield RawDocument(f"{path}, line {number}", line, is_json=True)


def parse(document: RawDocument, keys: Sequence[str]) -> dict[str, list[str]]:
    """The texts under each key: one, or several where the value is a list of sentences.

    `ValueError` names file and line. A .txt document lies under every key.
    """
    try:
        text = document.content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{document.place} is not UTF-8 (byte {error.start + 1}): convert it first"
        ) from error
    if not document.is_json:
        return {key: [text] for key in keys}
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{document.place} is not valid JSON: {error}") from error
    if not isinstance(entry, dict):
        raise ValueError(f"{document.place} is not a JSON object such as {{{keys[0]!r}: ...}}")
    return {key: _texts(entry, key, document.place) for key in keys}


def _texts(entry: dict[str, object], key: str, place: str) -> list[str]:
    if key not in entry:
        present = ", ".join(sorted(entry)) or "none"
        raise ValueError(f"{place} has no key {key!r}; its keys are: {present}")
    value = entry[key]
    texts: list[str] = []
    for text in value if isinstance(value, list) else [value]:
        if not isinstance(text, str):
            raise ValueError(f"{place}: the value of {key!r} is no text but {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can spell what no text may hold
            raise ValueError(
                f"{place}: the value of {key!r} holds half a surrogate pair"
            ) from error
        texts.append(text)
    return texts
