"""Reads and writes DCP's tensor files: bounded memory, checksums, and no code execution."""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch._C import PyTorchFileReader
from torch._weights_only_unpickler import Unpickler
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import StorageType
from torch.storage import TypedStorage
from torch.utils.serialization import config

from paro.checkpoint.chunks import MAX_ITEM_BYTES, ChunkedState
from paro.checkpoint.directory import in_files
from paro.checkpoint.manifest import ChunkSum, ChunkSums, DamagedError, Manifest, damaged
from paro.checkpoint.metadata import read_metadata
from paro.errors import UserError
from paro.files.checksum import crc32
from paro.files.regular_file import RegularFile

Place = tuple[str, int, int]  # file name, offset and length in bytes

MAX_FILE_BYTES = 2**31

_SUFFIX = ".distcp"
_BLOCK_BYTES = 2**20
_READ_AHEAD = 4  # number of chunks that the disk reads ahead


class BoundedWriter(FileSystemWriter):
    """A writer of files of at most `MAX_FILE_BYTES`, chunk by chunk, with checksums.

    A chunk on the CPU is written without a copy, one on a GPU through a host copy.
    """

    def __init__(self, directory: Path, prefix: str = "") -> None:
        super().__init__(directory)
        self._prefix = prefix  # of the names of files
        self.sums: dict[str, ChunkSums] = {}

    def storage_meta(self) -> StorageMeta:
        """Return metadata without the folder's name: a complete checkpoint's folder is renamed."""
        return StorageMeta(save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        for number, items in enumerate(in_files(plan.items, _num_bytes, MAX_FILE_BYTES)):
            name = f"{self._prefix}{plan.storage_data.prefix}{number}{_SUFFIX}"
            results += self._write_file(name, items, planner)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_file(
        self, name: str, items: list[WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        results, sums = [], []
        end = flushed = 0  # bytes that were written, and for which writeback was started
        # No reader compares torch's own checksums, which cost as much as the manifest's.
        without_sums = config.patch("save.compute_crc32", False)  # type: ignore[attr-defined]
        with without_sums, (Path(self.path) / name).open("xb", buffering=0) as file:
            for item in items:
                stream, begin = _SummingStream(file), end
                values = planner.resolve_data(item)
                assert isinstance(values, Tensor), f"{item.index} is no tensor"
                # In a storage of its own, without a copy: torch.save writes entire storages.
                content = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
                alone = torch.frombuffer(content, dtype=values.dtype).view(values.shape)
                try:
                    torch.save(alone, stream)  # type: ignore[arg-type]
                except RuntimeError as error:
                    # torch hides an error of the stream, such as a full disk, behind its own.
                    if stream.failure is not None:
                        raise stream.failure from error
                    raise
                end = file.tell()
                sums.append(ChunkSum(end - begin, stream.checksum))
                info = _StorageInfo(name, begin, end - begin)
                results.append(WriteResult(item.index, end - begin, info))
                if end - flushed >= MAX_ITEM_BYTES:
                    # Linux cannot drop dirty pages yet: it starts to write them, without waiting.
                    os.posix_fadvise(file.fileno(), flushed, 0, os.POSIX_FADV_DONTNEED)
                    flushed = end
            os.fsync(file.fileno())
        self.sums[name] = tuple(sums)
        return results


class _SummingStream(io.RawIOBase):
    """A stream of one chunk into a file that computes the checksum during the writes."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self.checksum = 0
        self.failure: OSError | None = None

    def write(self, content: Any) -> int:
        """Write all of `content` by blocks; compute a block's checksum while it is in cache."""
        view = memoryview(content).cast("B")
        try:
            for begin in range(0, len(view), _BLOCK_BYTES):
                block = view[begin : begin + _BLOCK_BYTES]
                self.checksum = crc32(block, self.checksum)
                while len(block) > 0:
                    block = block[self._file.write(block) or 0 :]
        except OSError as error:
            self.failure = error
            raise
        return len(view)


class ChunkRead(NamedTuple):
    """A part of a stored chunk, and the memory that the part fills."""

    place: Place
    item: ReadItem
    target: Tensor


class CheckedReader:
    """A reader of untrusted checkpoints: no code in them can run, and data are verified."""

    def __init__(self, manifest: Manifest) -> None:
        self.directory = manifest.directory
        self.metadata = read_metadata(manifest.directory)
        self._manifest = manifest
        self._room = bytearray()

    def plan(self, states: Iterable[tuple[str, ChunkedState]]) -> list[ChunkRead]:
        """List the reads that fill states, each from the stored state of a name, by their place.

        `DamagedError` for missing elements and missing or truncated files, before any state is
        overwritten on any rank.
        """
        reads = []
        for name, state in states:
            saved = self.metadata.state_dict_metadata.get(name)
            assert isinstance(saved, TensorStorageMetadata), f"{name} is a {type(saved)}"
            chunks = [ChunkStorageMetadata(torch.Size(o), v.shape) for o, v in state.chunks.items()]
            items = create_read_items_for_chunk_list(name, saved, chunks)
            num_found = sum(item.lengths.numel() for item in items)
            num_wanted = sum(values.numel() for values in state.chunks.values())
            if num_found != num_wanted:
                raise DamagedError(
                    f"{name} has a hole: {num_found} of {num_wanted} elements found; nodes without "
                    "a shared file system have the rest if other nodes saved it: load with the "
                    "same ranks on the same nodes, under the same strategy"
                )
            for item in items:
                stored = self.metadata.storage_data[item.storage_index]
                place = str(stored.relative_path), stored.offset, stored.length
                values = state.chunks[tuple(item.dest_index.offset or ())]
                target = narrow_tensor_by_index(values, item.dest_offsets, item.lengths)
                reads.append(ChunkRead(place, item, target))
        self._manifest.check_sizes(sorted({read.place[0] for read in reads}))
        return sorted(reads, key=lambda read: read.place)

    def read(self, plan: Sequence[ChunkRead]) -> None:
        """Carry out a plan; read each chunk once even if several parts are used."""
        for name, of_file in groupby(plan, key=lambda read: read.place[0]):
            path = self.directory / name
            by_place = [(p, list(of)) for p, of in groupby(of_file, key=lambda read: read.place)]
            with damaged(path):
                file = RegularFile(path)
                num_hinted = 0
                for index, (place, reads) in enumerate(by_place):
                    # The disk reads ahead while this chunk is verified and copied.
                    while num_hinted < min(len(by_place), index + 1 + _READ_AHEAD):
                        file.read_soon(*by_place[num_hinted][0][1:])
                        num_hinted += 1
                    self._read_chunk(file, place, reads)

    def _read_chunk(self, file: RegularFile, place: Place, reads: Sequence[ChunkRead]) -> None:
        name, begin, length = place
        if len(self._room) < length:
            self._room = bytearray(length)
        room = memoryview(self._room)[:length]
        filled = checksum = 0
        while filled < length:
            count = file.read_into(room[filled : filled + _BLOCK_BYTES], begin + filled)
            if count == 0:
                break  # the file ends
            checksum = crc32(room[filled : filled + count], checksum)
            filled += count
        content = room[:filled]
        self._manifest.check_sum(name, begin, filled, checksum)
        with damaged(self.directory / name, Exception):  # an unpickler fails in many ways
            saved, items = tensor_in(content), [read.item for read in reads]
            parts = [narrow_tensor_by_index(saved, i.storage_offsets, i.lengths) for i in items]
            if any(part.shape != i.lengths for part, i in zip(parts, items, strict=True)):
                raise UserError(f"refused: a tensor of the shape {tuple(saved.shape)}")
        for read, part in zip(reads, parts, strict=True):
            assert read.target.shape == part.shape, f"{read.item.storage_index}: {part.shape}"
            read.target.copy_(part)


def _num_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None, f"{item.index} is no tensor"
    return prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def tensor_in(content: memoryview) -> Tensor:
    """Return the tensor in bytes of torch.save, as a view of them; no code in them is run."""

    # torch.load would copy each tensor into newly allocated memory: a fifth of the speed. Here its
    # own unpickler gets storages that are parts of the bytes.
    def storage_of(dtype: torch.dtype, num_bytes: int, begin: int) -> UntypedStorage:
        count = num_bytes // dtype.itemsize
        return torch.frombuffer(content, dtype=dtype, count=count, offset=begin).untyped_storage()

    return unpickled_tensor(
        len(content), lambda begin, length: content[begin : begin + length], storage_of
    )


def unpickled_tensor(
    size: int,
    read: Callable[[int, int], bytes | memoryview],
    storage_of: Callable[[torch.dtype, int, int], UntypedStorage],
) -> Tensor:
    """Return the tensor in `size` bytes of torch.save; no code in them is run.

    `read` returns a number of them from a first one on. `storage_of` makes the tensor's storage, of
    a type, a number of bytes and the first byte of its values.
    """
    window: Any = _Window(size, read)  # has the methods that torch uses
    archive: Any = PyTorchFileReader(window)

    def typed(record: tuple[str, StorageType, str, str, int]) -> TypedStorage:
        _, kind, key, _, numel = record
        begin = archive.get_record_offset(f"data/{key}")
        storage = storage_of(kind.dtype, numel * kind.dtype.itemsize, begin)
        return TypedStorage(wrap_storage=storage, dtype=kind.dtype, _internal=True)

    if archive.get_record("byteorder") != sys.byteorder.encode():
        raise UserError("refused: its bytes are in the order of another kind of machine")
    unpickler: Any = Unpickler(io.BytesIO(archive.get_record("data.pkl")), encoding="utf-8")
    unpickler.persistent_load = typed
    try:
        saved = unpickler.load()
    except pickle.UnpicklingError:
        # torch's own text explains how to run the code in a file.
        raise UserError("refused: not a tensor, and no code in it was run") from None
    if not isinstance(saved, Tensor):
        raise UserError(f"refused: not a tensor but a {type(saved).__name__}")
    return saved


class _Window(io.RawIOBase):
    """A read-only file object over bytes, without a copy."""

    def __init__(self, size: int, read: Callable[[int, int], bytes | memoryview]) -> None:
        self._size, self._read = size, read
        self._position = 0

    def readinto(self, room: Any) -> int:
        length = max(0, min(len(room), self._size - self._position))
        room[:length] = self._read(self._position, length)
        self._position += length
        return length

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}
        self._position = base[whence] + offset
        return self._position
