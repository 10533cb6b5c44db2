"""The manifest of a checkpoint: its files, their sizes and checksums, and library versions."""

# Checksums are CRC-32 (zlib's), 4 GB/s a core: they detect damage by disks, networks and crashes,
# and do not protect against forgery. Every chunk of a file has a checksum and is read at once: a
# rank verifies a chunk while reading it, and no byte is read twice.

from __future__ import annotations

import json
import os
import platform
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

from paro.errors import UserError, describe, open_files_limit
from paro.files.checksum import crc32, crc32_of_file
from paro.files.object_store import StorePath
from paro.files.regular_file import RegularFile, read_bytes
from paro.files.schema import Count, conform, read_json

MANIFEST = "manifest.json"
METADATA = ".metadata"  # DCP's file
FOREIGN = "metadata.json"  # a file of Megatron-LM's checkpoints, whose other names are like ours
FORMAT_VERSION = 2  # version of the format that is written and read

_PACKAGES = ("torch", "numpy", "safetensors", "sentencepiece", "tokenizers", "transformers")


class DamagedError(UserError):
    """A checkpoint is incomplete or damaged; an older one may be complete."""


class _Versions(TypedDict):
    """The fields of a manifest of any format."""

    format_version: int
    versions: NotRequired[dict[str, Any]]


class _File(TypedDict):
    crc32: list[tuple[Count, Count]]  # length and checksum of every chunk


class _Facts(TypedDict):
    """The fields of a manifest that are read."""

    iteration: Count
    arguments: dict[str, Any]
    files: dict[str, _File]


class ChunkSum(NamedTuple):
    """The length in bytes and the checksum of a chunk, consecutive bytes of a file."""

    length: int
    checksum: int


ChunkSums = tuple[ChunkSum, ...]  # the chunks of a file, in order and without gaps


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The other files of a checkpoint's folder, with the arguments of the run."""

    directory: Path
    iteration: int
    arguments: Mapping[str, Any]
    files: Mapping[str, ChunkSums]
    checksum: int  # checksum of the manifest, and so of all files

    @cached_property
    def _by_place(self) -> dict[tuple[str, int], ChunkSum]:
        files = self.files.items()
        return {(name, begin): chunk for name, sums in files for begin, chunk in _placed(sums)}

    def check_sizes(self, names: Collection[str]) -> None:
        """Raise `DamagedError` unless the files exist with the written sizes."""
        for name in names:
            if name not in self.files:
                raise DamagedError(f"{self.directory / name} is not in {MANIFEST}")
        check_sizes(self.directory, {name: self.files[name] for name in names})

    def check_sum(self, name: str, begin: int, length: int, checksum: int) -> None:
        """Raise `DamagedError` unless the file has such a chunk with this checksum."""
        if self._by_place.get((name, begin)) != (length, checksum):
            where = f"bytes {begin} to {begin + length}"
            raise DamagedError(f"{self.directory / name} is damaged (wrong checksum of {where})")

    def read_file(self, name: str) -> bytes:
        """Return the contents of a small file, verified."""
        self.check_sizes([name])
        content = read_bytes(self.directory / name)
        self.check_sum(name, 0, len(content), crc32(content))
        return content

    def verify(self) -> int:
        """Verify every file; return the bytes read. `DamagedError` names the first bad file."""
        check_sizes(self.directory, self.files)
        for name, sums in self.files.items():
            file = RegularFile(self.directory / name)
            for begin, (length, _) in _placed(sums):
                self.check_sum(name, begin, length, crc32_of_file(file, begin, begin + length))
        return sum(map(_num_bytes, self.files.values()))


def check_sizes(directory: Path, files: Mapping[str, ChunkSums]) -> None:
    """Raise `DamagedError` unless the files of a folder exist with the written sizes."""
    for name, sums in files.items():
        path = directory / name
        with damaged(path):
            status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError(f"{path} is no regular file")
        num_bytes = _num_bytes(sums)
        if status.st_size != num_bytes:
            what = "truncated" if status.st_size < num_bytes else "too long"
            raise DamagedError(f"{path} is {what}: {status.st_size} bytes of {num_bytes}")


def sum_of(content: bytes) -> ChunkSums:
    """Return the checksums of a small file, which is a single chunk."""
    return (ChunkSum(len(content), crc32(content)),)


def _placed(sums: ChunkSums) -> Iterator[tuple[int, ChunkSum]]:
    """Yield (first byte, checksum) of each chunk of a file."""
    return zip(accumulate((chunk.length for chunk in sums), initial=0), sums, strict=False)


def _num_bytes(sums: ChunkSums) -> int:
    return sum(chunk.length for chunk in sums)


@cache
def library_versions() -> Mapping[str, str]:
    """Return the versions of Python and of the libraries that a checkpoint depends on."""
    from importlib.metadata import PackageNotFoundError, version  # slow, and plans need none

    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def write_manifest(
    directory: Path, iteration: int, files: Mapping[str, ChunkSums], arguments: Mapping[str, Any]
) -> None:
    """Write the manifest, the last file: without a manifest a folder counts as incomplete."""
    facts = {
        "format_version": FORMAT_VERSION,
        "iteration": iteration,
        "versions": library_versions(),
        "arguments": dict(arguments),
        "files": {
            name: {"bytes": _num_bytes(sums), "crc32": sums} for name, sums in sorted(files.items())
        },
    }
    text = json.dumps({**facts, "crc32": crc32(_canonical(facts))}, default=str)
    write_durably(directory / MANIFEST, text.encode())


def read_manifest(directory: Path) -> Manifest:
    """Read an iteration's manifest; `DamagedError` if it is damaged, or of an unfinished save."""
    path = directory / MANIFEST
    if (directory / FOREIGN).exists():
        raise UserError(
            f"{directory} is a checkpoint of Megatron-LM: convert it with "
            "tools/convert_checkpoint.py --from megatron"
        )
    with damaged(path):
        if not path.exists():
            raise DamagedError(
                f"{path} is missing: the save was not finished, or it is of a format before "
                f"{FORMAT_VERSION}, which this version does not read"
            )
        facts = read_json(path, _Versions)
    if facts["format_version"] > FORMAT_VERSION:
        named = facts.get("versions", {}).items()
        with_them = ", with " * bool(named) + ", ".join(f"{name} {v}" for name, v in named)
        raise UserError(
            f"{directory} has format {facts['format_version']}, and this version reads format "
            f"{FORMAT_VERSION}: use the version that wrote it{with_them}"
        )
    with damaged(path):
        checksum = facts.pop("crc32", None)
        if checksum != crc32(_canonical(facts)):
            raise UserError(f"{path}: wrong checksum")
        facts = conform(facts, _Facts, str(path))
        for name in facts["files"]:
            if Path(name).name != name:
                raise UserError(f"{path}: files.{name}: is no name of a file in this folder")
    return Manifest(
        directory=directory,
        iteration=facts["iteration"],
        arguments=facts["arguments"],
        files={
            name: tuple(ChunkSum(*pair) for pair in file["crc32"])
            for name, file in facts["files"].items()
        },
        checksum=checksum,
    )


@contextmanager
def damaged(path: Path, others: type[Exception] = OSError) -> Iterator[None]:
    """Turn an error of the block, which reads a file of a checkpoint, into a `DamagedError`.

    It is a `UserError` or of the class `others`. One that is not of the file itself stays as it is,
    so that no older file is read in its place: access may be refused, a store may not answer, or
    too many files may be open.
    """
    try:
        yield
    except DamagedError:
        raise
    except (UserError, others) as error:
        cause = error.__cause__ if isinstance(error, UserError) else error
        if isinstance(cause, PermissionError):
            raise UserError(f"{path} cannot be read: {cause.strerror or cause}") from cause
        if isinstance(error, TimeoutError) or open_files_limit(error) is not None:
            raise
        state = "missing" if isinstance(cause, FileNotFoundError) else "damaged"
        detail = describe(error).removeprefix(str(path)).removeprefix(":").strip()
        raise DamagedError(f"{path} is {state} ({detail})") from None


def write_durably(path: Path, content: bytes) -> ChunkSums:
    """Write and fsync a small file, so that it survives a crash of the machine; or an object.

    `UserError` if another run has written the object meanwhile: a run that lost the folder while it
    was stopped overwrites nothing when it is woken.
    """
    if not isinstance(path, StorePath):
        path.write_bytes(content)
        sync(path)
    elif not path.create(content):
        raise UserError(f"{path} was written by another run meanwhile: is {path.parent} its, too?")
    return sum_of(content)


def sync(path: Path) -> None:
    """Fsync a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _canonical(facts: Mapping[str, Any]) -> bytes:
    return json.dumps(facts, sort_keys=True, default=str).encode()
