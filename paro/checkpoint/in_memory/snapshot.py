"""Snapshots of a rank: files in node memory, each with its states after one iteration."""

# A rank writes its snapshots into two slots in turn, so that a process that dies at any instant
# leaves one complete snapshot. A slot is a data file, allocated once and mapped, and a record, a
# small file. A write removes the record, overwrites the data, and renames a new record into place.
# Pages of a file in memory survive the writer, so nothing is synced. All have checksums.

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from paro.checkpoint.background import cut_up, starts_of
from paro.checkpoint.chunks import ChunkedState, chunks_of
from paro.errors import UserError
from paro.files.checksum import crc32
from paro.files.regular_file import RegularFile, read_bytes
from paro.files.schema import Count, parse_json
from paro.layout import Chunk

NUM_SLOTS = 2
RECORD, DATA = ".json", ".data"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunk:
    """A chunk of a state and where its values begin in the data file."""

    state: str  # name of the state as in checkpoints: exp_avg.<parameter>
    dtype: Literal["float32", "bfloat16", "float16"]
    corner: tuple[Count, ...]
    extent: tuple[Count, ...]
    offset: Count  # first byte of the values in the data file

    @property
    def chunk(self) -> Chunk:
        return Chunk(self.corner, self.extent)

    @property
    def num_bytes(self) -> int:
        return prod(self.extent) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRecord:
    """The states that one rank held after one iteration."""

    format: Literal[1]
    iteration: Count
    rank: Count
    flags: dict[str, str]  # the run's flags, to recognize snapshots of another run
    regions: list[StoredChunk]
    checksums: list[Count]  # [chunk] -> checksum of the values
    group: Count = 0  # of the rank, where groups train alone
    met: tuple[Count, Count] | None = None  # `Snapshot.met` of groups that train alone
    common: dict[str, Any]  # contents of a checkpoint's common.json


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A record that was read, and its data file, which is unverified."""

    path: Path  # path of the data file
    record: SnapshotRecord

    @property
    def age(self) -> tuple[int, int]:
        """The iteration, and the number of the run's start, which grows from start to start."""
        return self.record.iteration, int(self.path.name.split("-")[2].split(".")[0], 16)

    @property
    def met(self) -> tuple[int, int]:
        """The age at which all groups last agreed on parameters; its own if all are synchronous."""
        return self.record.met or self.age

    @classmethod
    def read(cls, path: Path) -> Snapshot:
        """Return the snapshot whose record is at `path`; `UserError` if it is damaged."""
        checksum, _, body = read_bytes(path).partition(b"\n")
        if checksum != _sum_line(body):
            raise UserError(f"{path} is damaged: its checksum is wrong")
        record: SnapshotRecord = parse_json(body, SnapshotRecord, str(path))
        if len(record.checksums) != len(record.regions):
            raise UserError(f"{path} is damaged: checksums are missing")
        return cls(path.with_suffix(DATA), record)

    def check(self) -> None:
        """Raise `UserError` unless all data are as they were written."""
        for index in range(len(self.record.regions)):
            self._read(index)

    def values(self, index: int) -> Tensor:
        """Return the values of chunk `index`, verified."""
        stored = self.record.regions[index]
        flat = torch.frombuffer(bytearray(self._read(index)), dtype=getattr(torch, stored.dtype))
        return flat.view(stored.extent)

    def _read(self, index: int) -> bytes:
        stored, file = self.record.regions[index], RegularFile(self.path)
        if stored.offset + stored.num_bytes > file.size:
            raise UserError(f"{self.path} is damaged: it is truncated")
        content = file.read(stored.offset, stored.num_bytes)
        if crc32(content) != self.record.checksums[index]:
            raise UserError(f"{self.path} is damaged: the checksum of {stored.state} is wrong")
        return content


class SnapshotWriter:
    """A writer of the states of one rank into two slots in turn, allocated at their first use.

    `states` are views of shards, whose storage must stay. States named in `constant` never change
    and are copied into each slot once.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        rank: int,
        states: Mapping[str, ChunkedState],
        flags: Mapping[str, str],
        constant: Collection[str] = (),
        group: int = 0,
    ) -> None:
        self._stem = folder / name
        sources = chunks_of(states)
        self._sources = [*sources.values()]
        self._constant = [name in constant for name, _ in sources]
        *starts, self.num_bytes = starts_of(self._sources)
        regions = [
            {
                "state": name,
                "dtype": str(values.dtype).removeprefix("torch."),
                "corner": corner,
                "extent": tuple(values.shape),
                "offset": start,
            }
            for start, ((name, corner), values) in zip(starts, sources.items(), strict=True)
        ]
        # The head is equal in all records and serialized once.
        head = {"format": 1, "rank": rank, "group": group, "flags": {**flags}, "regions": regions}
        self._head = json.dumps(head)[:-1]
        # The mapped files as tensors, and the checksums of the chunks copied into them.
        self._slots: list[tuple[list[Tensor], list[int | None]]] = []
        self.num_written = 0

    def write(
        self,
        iteration: int,
        common: Mapping[str, Any],
        copy: Callable[[Tensor, Tensor], object],
        met: tuple[int, int] | None = None,
    ) -> None:
        """Overwrite the older snapshot; `copy(target, source)` returns when target is filled."""
        slot = self.num_written % NUM_SLOTS
        record = Path(f"{self._stem}.{slot}{RECORD}")
        if slot == len(self._slots):
            room = self._allocate(Path(f"{self._stem}.{slot}{DATA}"))
            self._slots.append((room, [None] * len(self._sources)))
        targets, checksums = self._slots[slot]
        record.unlink(missing_ok=True)
        for index, source in enumerate(self._sources):
            if self._constant[index] and checksums[index] is not None:
                continue
            copy(targets[index], source)
            checksums[index] = crc32(targets[index].view(-1).view(torch.uint8).numpy())
        ages = {"iteration": iteration, "met": met}
        changing = {**ages, "checksums": checksums, "common": dict(common)}
        body = f"{self._head}, {json.dumps(changing)[1:]}".encode()
        written = record.with_suffix(".new")
        written.write_bytes(_sum_line(body) + b"\n" + body)
        os.replace(written, record)
        self.num_written += 1

    def _allocate(self, path: Path) -> list[Tensor]:
        """Map a file for a snapshot; return its chunks as tensors, pinned where CUDA is used."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Allocate all pages now: a full file system would be a SIGBUS in a mapped page.
            num_bytes = max(1, self.num_bytes)
            os.posix_fallocate(descriptor, 0, num_bytes)
            room = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
        except OSError:
            with suppress(OSError):
                path.unlink()
            raise
        finally:
            os.close(descriptor)
        return cut_up(room, self._sources)


def _sum_line(body: bytes) -> bytes:
    return f"{crc32(body):08x}".encode()
