"""Reads raw documents of a corpus in batches from its sources, and extracts their texts."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

from data.sources import SourceChunk, SourceKind, open_hugging_face, open_parquet
from paro.errors import UserError, importing, reading

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BATCH_BYTES = 2**18  # size of a batch of lines or rows; a longer line is a batch of its own
TEXT_BYTES = 2**22  # longer .txt files are encoded in parts, cut at ends of lines
ROWS = 4096  # rows of a batch at most
# Where a long text is cut: after the last line end before a non-blank, else after the last one.
_CUT = re.compile(rb".*\n(?=\S)|.*\n", re.DOTALL)
_LIST, _OBJECT = re.compile(r"\s*\[\s*({|$)"), re.compile(r"\s*{\s*$")
_TOO_LONG = "requires too much memory"  # zstd's message for a window above the allowed size

Rows = Mapping[str, list[Any]]
OnBad = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RawBatch:
    """Documents as stored, not yet parsed; `texts_of` parses them, in any process."""

    chunk: SourceChunk
    first: int  # lines or rows of the chunk before this batch; bytes for a .txt file
    content: bytes | Rows  # lines of JSON, (a part of) one text, or columns of rows
    advance: int  # bytes of chunk.num_bytes that this batch accounts for, as progress
    unfinished: bool = False  # True: the text continues in the next batch


class DocumentTexts(NamedTuple):
    """A document: for each key the text, a list of sentences, or the unconverted value."""

    number: int  # number of the line or row in its chunk, from 1
    by_key: tuple[Any, ...]
    num_bytes: int


def read_batches(
    chunks: Iterable[SourceChunk], keys: Sequence[str], *, skip_malformed: bool = False
) -> Iterator[RawBatch]:
    """Yield all documents of the chunks in order, in batches; of rows only the columns `keys`.

    With `skip_malformed`, a long text that is not UTF-8 yields only the first bad part.
    """
    for chunk in chunks:
        if chunk.kind is SourceKind.JSON_LINES:
            yield from _lines(chunk)
        elif chunk.kind is SourceKind.TEXT:
            bad = _first_bad_part(chunk) if skip_malformed else None
            yield from _text(chunk) if bad is None else [bad]
        else:
            yield from _rows(chunk, keys)


@contextmanager
def open_binary(chunk: SourceChunk) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """Open a file's decompressed bytes, with a function that counts the file's bytes read."""
    with reading(chunk.path), Path(chunk.path).open("rb") as raw:
        try:
            yield _decompressed(chunk, raw), raw.tell
        except (EOFError, zlib.error, OSError) as error:
            if chunk.compression is None:
                raise
            if _TOO_LONG in str(error):
                raise UserError(
                    f"{chunk.path} has a zstd window above 128 MiB, which pyarrow does not take: "
                    "compress it again, zstd -dc --long=31 OLD | zstd -o NEW"
                ) from error
            raise UserError(f"{chunk.path} is damaged or truncated: {error}") from error


def _decompressed(chunk: SourceChunk, raw: IO[bytes]) -> IO[bytes]:
    if chunk.compression is None:
        raw.seek(chunk.begin)
        return raw
    if chunk.compression == ".gz":
        return gzip.open(raw)  # type: ignore[return-value]
    with importing(f"--input {chunk.path} needs the package pyarrow"):
        import pyarrow
    # pyarrow detects a truncated file; the package zstandard takes it for the end of the file.
    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd"))


def _lines(chunk: SourceChunk) -> Iterator[RawBatch]:
    """Yield batches of whole lines."""
    with open_binary(chunk) as (stream, tell):
        number, position, left = 0, chunk.begin, chunk.end - chunk.begin
        while True:
            size = BATCH_BYTES if chunk.compression else min(BATCH_BYTES, left)
            block = stream.read(size)
            if not block:
                break
            if not block.endswith(b"\n"):
                block += stream.readline()
            left -= len(block)
            if number == chunk.begin == 0:
                block = block.removeprefix(BYTE_ORDER_MARK)
            reached = min(tell(), chunk.end)
            yield RawBatch(chunk, number, block, reached - position)
            position = reached
            number += block.count(b"\n")


def _text(chunk: SourceChunk) -> Iterator[RawBatch]:
    """Yield the single document of a .txt file, in parts if it is long."""
    with open_binary(chunk) as (stream, tell):
        rest, offset, position, unfinished = b"", 0, 0, True
        while unfinished:
            block = rest + stream.read(TEXT_BYTES - len(rest))
            following = stream.read(1) if len(block) == TEXT_BYTES else b""
            cut = _good_cut(block) if following else len(block)
            content, rest = block[:cut], block[cut:] + following
            if offset == 0:
                content = content.removeprefix(BYTE_ORDER_MARK)
            unfinished, reached = bool(following), tell()
            yield RawBatch(chunk, offset, content, reached - position, unfinished)
            offset, position = offset + cut, reached


def _first_bad_part(chunk: SourceChunk) -> RawBatch | None:
    """Return the first part of a text that is not UTF-8, as a whole text; None without one."""
    for part in _text(chunk):
        assert isinstance(part.content, bytes), "a text is bytes"
        try:
            part.content.decode("utf-8")
        except UnicodeDecodeError:
            return replace(part, advance=chunk.num_bytes, unfinished=False)
    return None


def _good_cut(block: bytes) -> int:
    if (found := _CUT.match(block)) is not None:
        return found.end()
    for cut in range(len(block), len(block) - 4, -1):
        if block[cut - 1] & 0xC0 != 0x80:  # a UTF-8 character begins here
            return cut - 1 if block[cut - 1] >= 0xC0 else cut
    return len(block)


def _rows(chunk: SourceChunk, keys: Sequence[str]) -> Iterator[RawBatch]:
    rows_of = _parquet_rows if chunk.kind is SourceKind.PARQUET else _saved_rows
    number, total = 0, max(1, chunk.end - chunk.begin)
    share, passed = 0, 0
    for units, rows in rows_of(chunk, keys):
        share += units
        reached = chunk.num_bytes * min(share, total) // total
        yield RawBatch(chunk, number, rows, reached - passed)
        passed = reached
        number += len(rows[keys[0]])


def _parquet_rows(chunk: SourceChunk, keys: Sequence[str]) -> Iterator[tuple[int, Rows]]:
    """Yield the number of row groups that a batch completes, and its rows."""
    source = open_parquet(chunk.path)  # raises `UserError` if pyarrow is missing
    from pyarrow import ArrowException

    _check_columns(chunk, keys, source.schema_arrow.names)
    for group in range(chunk.begin, chunk.end):
        batches = source.iter_batches(ROWS, row_groups=[group], columns=list(dict.fromkeys(keys)))
        try:
            for batch in batches:
                step = max(1, len(batch) * BATCH_BYTES // max(1, batch.nbytes))
                for begin in range(0, len(batch), step):
                    yield 0, batch.slice(begin, step).to_pydict()
        except UnicodeDecodeError as error:
            raise UserError(f"{chunk.path}, row group {group + 1} is not UTF-8") from error
        except (OSError, ArrowException) as error:
            raise UserError(f"{chunk.path}, row group {group + 1} is damaged: {error}") from error
        yield 1, {key: [] for key in keys}


def _saved_rows(chunk: SourceChunk, keys: Sequence[str]) -> Iterator[tuple[int, Rows]]:
    source = open_hugging_face(chunk.path, chunk.config, chunk.split or "train")
    _check_columns(chunk, keys, source.column_names)
    # Values as stored, as in a .parquet file: JSON in a column stays a text.
    source = source.select_columns(list(dict.fromkeys(keys))).with_format("arrow")
    num_rows = chunk.end - chunk.begin
    step = min(ROWS, max(1, num_rows * BATCH_BYTES // max(1, chunk.num_bytes)))
    for rows in source.select(range(chunk.begin, chunk.end)).iter(step):
        yield len(rows), rows.to_pydict()


def _check_columns(chunk: SourceChunk, keys: Sequence[str], names: Sequence[str]) -> None:
    for key in keys:
        if key not in names:
            raise UserError(
                f"{chunk.path} has no column {key!r}; its columns are: {', '.join(names)}"
            )


def texts_of(
    batch: RawBatch,
    keys: Sequence[str],
    on_bad: OnBad | None = None,
    *,
    as_they_are: bool = False,
    optional: Collection[str] = (),
    flag: str = "--json-keys",
) -> Iterator[DocumentTexts]:
    """Yield the documents of a batch; `UserError` gives file and line of a bad one.

    With `on_bad`, bad documents are reported to it and skipped. A .txt document is under every key.
    With `as_they_are` values need not be texts. The value of a missing `optional` key is None.
    `flag` names the flag of the keys, for messages.
    """

    def value_of(entry: Mapping[str, Any], key: str) -> Any:
        if key in entry:
            value = entry[key]
            texts = value if isinstance(value, list) else [value]
            return value if as_they_are else [_checked(text, key) for text in texts]
        if key in optional:
            return None
        present = ", ".join(sorted(entry)) or "none"
        raise _BadError(f" has no key {key!r}; its keys are: {present} ({flag} says which to read)")

    for number, raw in enumerate(_raw_documents(batch), start=batch.first + 1):
        if raw is None:
            continue
        try:
            entry = raw if isinstance(raw, dict) else _parsed(batch, raw, keys)
            texts = tuple(value_of(entry, key) for key in keys)
        except _BadError as error:
            message = f"{place_of(batch.chunk, number)}{error}"
            if on_bad is None:
                raise UserError(message) from error
            on_bad(message)
            continue
        if isinstance(raw, dict):
            num_bytes = sum(len(str(text).encode()) for by_key in texts for text in by_key or ())
        else:
            num_bytes = len(raw)
        yield DocumentTexts(number, texts, num_bytes)


def place_of(chunk: SourceChunk, number: int) -> str:
    """Return the location of a document, for messages; `number` starts at 1 in its chunk."""
    if chunk.kind is SourceKind.TEXT:
        return chunk.path
    if chunk.kind is SourceKind.JSON_LINES:
        return f"{chunk.path}, line {_lines_before(chunk.path, chunk.begin) + number}"
    if chunk.kind is SourceKind.PARQUET:
        groups = open_parquet(chunk.path).metadata
        before = sum(groups.row_group(group).num_rows for group in range(chunk.begin))
        return f"{chunk.path}, row {before + number}"
    return f"{chunk.path}, split {chunk.split}, row {chunk.begin + number}"


@cache
def _lines_before(path: str, end: int) -> int:
    with Path(path).open("rb") as stream:
        blocks = (stream.read(min(2**20, end - begin)) for begin in range(0, end, 2**20))
        return sum(block.count(b"\n") for block in blocks)


class _BadError(Exception):
    """The reason why a document is malformed, as words that follow its location."""


def _raw_documents(batch: RawBatch) -> Iterable[Any]:
    """Return the parsed content of each line or row; None for a blank line."""
    content = batch.content
    if not isinstance(content, bytes):
        columns = list(content.values())
        return (dict(zip(content, values, strict=True)) for values in zip(*columns, strict=True))
    if batch.chunk.kind is SourceKind.TEXT:
        return [content]
    return (line if line.strip() else None for line in content.split(b"\n"))


def _parsed(batch: RawBatch, raw: bytes, keys: Sequence[str]) -> dict[str, Any]:
    is_text = batch.chunk.kind is SourceKind.TEXT
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        offset = error.start + (batch.first if is_text else 0)
        raise _BadError(f" is not UTF-8 (byte {offset + 1}): convert it first") from error
    if is_text:
        return {key: [text] for key in keys}
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _BadError(f" is not valid JSON: {error}{_way_to_lines(text)}") from error
    if not isinstance(entry, dict):
        raise _BadError(f" is not a JSON object such as {{{keys[0]!r}: ...}}{_way_to_lines(text)}")
    return entry


def _way_to_lines(text: str) -> str:
    """Say how to convert multi-line JSON to lines if this line begins such JSON; else ''."""
    for begun, query in (_LIST, "'.[]'"), (_OBJECT, "."):
        if begun.match(text):
            return f": one JSON object a line is wanted; jq -c {query} FILE prints that"
    return ""


def _checked(text: Any, key: str) -> str:
    if isinstance(text, bytes):  # a Parquet column of bytes, not marked as UTF-8
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as error:
            reason = f": the value of {key!r} is not UTF-8 (byte {error.start + 1})"
            raise _BadError(reason) from error
    if not isinstance(text, str):
        raise _BadError(f": the value of {key!r} is no text but {type(text).__name__}")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON escapes can encode invalid text
            raise _BadError(f": the value of {key!r} holds half a surrogate pair") from error
    return text
