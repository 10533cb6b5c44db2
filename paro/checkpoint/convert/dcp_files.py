"""Opens DCP's folders of other programs lazily, reading parts of chunks; writes in chunks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from operator import mul
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.default_planner import _validate_global_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from paro.checkpoint.agreement import one_process
from paro.checkpoint.chunks import ChunkedState
from paro.checkpoint.convert.source import LazyTensor
from paro.checkpoint.manifest import ChunkSums
from paro.checkpoint.metadata import read_metadata
from paro.checkpoint.save import write_files
from paro.checkpoint.storage import unpickled_tensor
from paro.errors import UserError, describe, open_files_limit
from paro.files.regular_file import RegularFile
from paro.layout import Shape


class _StoredChunk(NamedTuple):
    """The file and the first byte of a chunk's values, and its strides in elements."""

    path: Path
    begin: int
    strides: tuple[int, ...]

    def read(self, item: ReadItem, dtype: torch.dtype) -> Tensor:
        """Read the part of the chunk that an item needs, from its first to its last element."""
        first = sum(map(mul, item.storage_offsets, self.strides))
        span = 1 + sum(map(mul, (length - 1 for length in item.lengths), self.strides))
        begin = self.begin + first * dtype.itemsize
        content = RegularFile(self.path).read(begin, span * dtype.itemsize)
        return torch.frombuffer(bytearray(content), dtype=dtype).as_strided(
            item.lengths, self.strides
        )


class DcpFolder:
    """The tensors in DCP's files that another program wrote, checked before they are read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.metadata: Metadata = read_metadata(directory, others=True)
        self.states: dict[str, TensorStorageMetadata] = {}
        self._chunks: dict[str, dict[torch.Size, _StoredChunk]] = {}
        files = {info.relative_path for info in self.metadata.storage_data.values()}
        sizes = {name: RegularFile(directory / name).size for name in files}
        for index, info in self.metadata.storage_data.items():
            name = info.relative_path
            if info.offset + info.length > sizes[name]:
                raise UserError(
                    f"{directory / name} is truncated: {index.fqn:.99} ends at byte "
                    f"{info.offset + info.length} of {sizes[name]}"
                )
        for name, state in self.metadata.state_dict_metadata.items():
            if not isinstance(state, TensorStorageMetadata):
                continue
            total = sum(prod(chunk.sizes) for chunk in state.chunks)
            if total != prod(state.size):
                raise UserError(
                    f"{directory} has {total} of {prod(state.size)} elements of {name:.99}: it "
                    "was not written to its end, or not by all ranks"
                )
            # torch 2.11 returns whether chunks are valid, later versions return mistakes.
            if _validate_global_plan([], Metadata({name: state})) not in (True, []):
                raise UserError(
                    f"{directory} is damaged: chunks of {name:.99} overlap, or are outside of it"
                )
            self.states[name] = state

    def tensor(self, name: str, layer: int | None = None) -> LazyTensor:
        """Return a stored tensor, or the one at an index of its first dimension."""
        state = self.states[name]
        if name not in self._chunks:
            self._chunks[name] = {c.offsets: self._find(name, state, c) for c in state.chunks}
        lead = () if layer is None else (layer,)
        return LazyTensor(
            shape=tuple(state.size[len(lead) :]),
            dtype=state.properties.dtype,
            rows=partial(self._rows, name, lead),
            name=f"{self.directory}: {name}" + "".join(f"[{index}]" for index in lead),
        )

    def _find(
        self, name: str, state: TensorStorageMetadata, chunk: ChunkStorageMetadata
    ) -> _StoredChunk:
        """Find where a file has the values of a chunk, by its description there."""
        info = self.metadata.storage_data[MetadataIndex(name, chunk.offsets)]
        file = RegularFile(self.directory / info.relative_path)
        begins: list[int] = []

        def read(begin: int, length: int) -> bytes:
            return file.read(info.offset + begin, length)

        def storage_of(_: torch.dtype, num_bytes: int, begin: int) -> UntypedStorage:
            begins.append(info.offset + begin)
            if begin + num_bytes > info.length:
                raise UserError("its values end elsewhere")
            return UntypedStorage(num_bytes, device="meta")

        try:
            stored = unpickled_tensor(info.length, read, storage_of)
            if (stored.shape, stored.dtype) != (chunk.sizes, state.properties.dtype):
                raise UserError(f"a tensor of the shape {tuple(stored.shape)}")
            if not stored.is_contiguous() or stored.storage_offset() or len(begins) != 1:
                raise UserError("its rows are not in order")
        except Exception as error:  # an unpickler fails in many ways
            if open_files_limit(error) is not None:
                raise
            raise UserError(f"{file.path}: {name:.99} is damaged ({describe(error)})") from None
        path = self.directory / info.relative_path
        return _StoredChunk(path, begins[0], stored.stride())

    def _rows(self, name: str, lead: Shape, start: int, stop: int) -> Tensor:
        state = self.states[name]
        columns = state.size[len(lead) + 1 :]
        values = torch.empty((stop - start, *columns), dtype=state.properties.dtype)
        target = values.view(*(1 for _ in lead), *values.shape)
        corner = torch.Size((*lead, start, *(0 for _ in columns)))
        region = ChunkStorageMetadata(offsets=corner, sizes=target.shape)
        for item in create_read_items_for_chunk_list(name, state, [region]):
            chunk = self._chunks[name][torch.Size(item.storage_index.offset or ())]
            part = narrow_tensor_by_index(target, item.dest_offsets, item.lengths)
            part.copy_(chunk.read(item, values.dtype))
        return values


def write_dcp(
    directory: Path, tensors: Mapping[str, Mapping[Shape, LazyTensor]], blame: str
) -> dict[str, ChunkSums]:
    """Write tensors in ranges of rows into a folder; return the checksums of its files.

    A name has one tensor at the index `()`, or several of one shape at `(0,)`, `(1,)` and so on,
    which are stored as one with a dimension in front. An error begins with `blame`.
    """
    states: dict[str, ChunkedState] = {}
    ranges: dict[tuple[str, Shape], tuple[LazyTensor, int, int]] = {}
    for name, parts in tensors.items():
        for index, tensor in parts.items():
            shape, columns = (*(len(parts) for _ in index), *tensor.shape), tensor.shape[1:]
            state = states.setdefault(name, ChunkedState(shape=shape, dtype=tensor.dtype))
            for start, stop in tensor.row_ranges():
                offsets = (*index, start, *(0 for _ in columns))
                sizes = (*(1 for _ in index), stop - start, *columns)
                state.chunks[offsets] = torch.empty(sizes, dtype=tensor.dtype, device="meta")
                ranges[name, offsets] = tensor, start, stop

    def read(name: str, offsets: Shape, chunk: Tensor) -> Tensor:
        tensor, start, stop = ranges[name, offsets]
        return tensor.rows(start, stop).view(chunk.shape)

    return write_files(directory, states, one_process(), blame, read=read)
