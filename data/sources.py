"""Text sources as chunks to read: files, folders, glob patterns and Hugging Face data sets."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from data.hub import HUB_NAME
from paro.errors import UserError, importing, reading

COMPRESSIONS = (".gz", ".zst", ".zstd")


class SourceKind(Enum):
    """The format of a source; for files given by the suffix."""

    TEXT = ".txt"
    JSON_LINES = ".jsonl"
    PARQUET = ".parquet"
    HUGGING_FACE = "datasets"


SUFFIXES = {kind.value: kind for kind in SourceKind} | {".json": SourceKind.JSON_LINES}
KINDS = ".txt (one document), .jsonl (a JSON object per line; both also .gz or .zst) or .parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceChunk:
    """A contiguous part of one source that can be read independently.

    `begin` and `end` count bytes of a plain .jsonl file (both where a line begins), row groups of
    a .parquet file, or rows of a Hugging Face data set; other files are read whole.
    """

    kind: SourceKind
    path: str
    begin: int = 0
    end: int
    num_bytes: int  # stored (compressed) bytes, for progress and balancing
    stamp: int = 0  # modification time of the file, in nanoseconds
    config: str | None = None  # configuration name of a Hugging Face data set
    split: str | None = None

    @property
    def compression(self) -> str | None:
        suffix = Path(self.path).suffix
        return suffix if suffix in COMPRESSIONS else None


def kind_of(path: Path) -> SourceKind | None:
    """Return the format of a file by its suffix, without a compression suffix."""
    name = path.with_suffix("") if path.suffix in COMPRESSIONS else path
    kind = SUFFIXES.get(name.suffix)
    return None if kind is SourceKind.PARQUET and name is not path else kind


def find_chunks(
    inputs: Sequence[str | Path], *, config: str | None = None, split: str = "train"
) -> list[SourceChunk]:
    """Return one chunk per source of --input, before any is read; `UserError` for bad ones.

    Files in a folder, and files that match a pattern, are sorted by name.
    """
    chunks: list[SourceChunk] = []
    for source in map(str, inputs):
        path = Path(source)
        with reading(f"--input {source}"):
            is_saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
            if path.is_file():
                chunks.append(_file_chunk(path))
            elif is_saved:
                chunks.append(_hub_chunk(source, None, split))
            elif path.is_dir():
                files = [file for file in path.rglob("*") if kind_of(file)]
                chunks += _file_chunks(files, f"--input {source} holds no file that is {KINDS}")
            elif glob.has_magic(source):
                files = [*map(Path, glob.glob(source, recursive=True))]
                chunks += _file_chunks(files, f"--input {source} matches no file")
            elif path.suffix not in (*SUFFIXES, *COMPRESSIONS) and HUB_NAME.fullmatch(source):
                chunks.append(_hub_chunk(source, config, split))
            else:
                raise UserError(f"--input {source} is missing or not a file")
    return chunks


def _file_chunks(paths: Sequence[Path], none_found: str) -> list[SourceChunk]:
    files = sorted(path for path in paths if path.is_file())
    if not files:
        raise UserError(none_found)
    return [_file_chunk(path) for path in files]


def _file_chunk(path: Path) -> SourceChunk:
    kind = kind_of(path)
    if kind is None:
        raise UserError(f"--input {path}: give {KINDS} files, a folder of them, or a data set")
    status, is_parquet = path.stat(), kind is SourceKind.PARQUET
    return SourceChunk(
        kind=kind,
        path=str(path),
        end=open_parquet(str(path)).num_row_groups if is_parquet else status.st_size,
        num_bytes=status.st_size,
        stamp=status.st_mtime_ns,
    )


def _hub_chunk(name: str, config: str | None, split: str) -> SourceChunk:
    rows = open_hugging_face(name, config, split)
    return SourceChunk(
        kind=SourceKind.HUGGING_FACE,
        path=name,
        end=len(rows),
        num_bytes=max(int(rows.data.nbytes), len(rows)),
        config=config,
        split=split,
    )


@cache
def open_hugging_face(name: str, config: str | None, split: str) -> Any:
    """Return the rows of a data set saved on disk, or of one that `datasets` finds by name."""
    with importing(f"--input {name} is no file, and a data set needs datasets"):
        import datasets
    datasets.disable_progress_bars()
    try:
        if Path(name).is_dir():
            rows = datasets.load_from_disk(name)
        else:
            rows = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # its own errors, OSError, ValueError, network library errors
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(
            f"--input {name} is no file or folder, and datasets does not find it: {reason}"
        ) from error
    if isinstance(rows, datasets.DatasetDict):
        if split not in rows:
            raise UserError(
                f"--input {name} has no split {split!r}: give --dataset-split, one of "
                f"{', '.join(rows)}"
            )
        rows = rows[split]
    return rows


def open_parquet(path: str) -> Any:
    """Open a `pyarrow.parquet.ParquetFile`."""
    with importing(f"--input {path} needs the package pyarrow"):
        from pyarrow import ArrowException, parquet
    try:
        return parquet.ParquetFile(path)
    except ArrowException as error:
        raise UserError(f"--input {path} is not a Parquet file, or it is truncated") from error


def share_out(chunks: Sequence[SourceChunk], parts: int) -> list[list[SourceChunk]]:
    """Cut documents, in their order, into `parts` lists of about equal size."""
    total = sum(chunk.num_bytes for chunk in chunks)
    shares: list[list[SourceChunk]] = [[] for _ in range(parts)]
    passed = 0
    for chunk in chunks:
        left: SourceChunk | None = chunk
        while left is not None:
            part = min(parts - 1, passed * parts // max(total, 1))
            limit = -(-(part + 1) * total // parts) - passed  # bytes until the next part begins
            head, left = _cut(left, limit) if limit < left.num_bytes else (left, None)
            shares[part].append(head)
            passed += head.num_bytes
    return shares


def _cut(chunk: SourceChunk, limit: int) -> tuple[SourceChunk, SourceChunk | None]:
    """Split a chunk after about `limit` bytes, at least one unit: the head and the rest."""
    if chunk.kind is SourceKind.TEXT or chunk.compression is not None:
        return chunk, None
    middle = chunk.begin + max(1, (chunk.end - chunk.begin) * limit // chunk.num_bytes)
    if chunk.kind is SourceKind.JSON_LINES:
        with reading(chunk.path), Path(chunk.path).open("rb") as stream:
            stream.seek(middle - 1)  # a line that begins at `middle` exactly belongs to the tail
            stream.readline()
            middle = stream.tell()
    if middle >= chunk.end:
        return chunk, None
    bytes_before = chunk.num_bytes * (middle - chunk.begin) // (chunk.end - chunk.begin)
    head = replace(chunk, end=middle, num_bytes=bytes_before)
    return head, replace(chunk, begin=middle, num_bytes=chunk.num_bytes - bytes_before)
