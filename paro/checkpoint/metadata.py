"""Reads DCP's metadata of a checkpoint: no code in it runs, and every field is checked."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.serialization import _get_layout

from paro.checkpoint.directory import METADATA
from paro.checkpoint.manifest import DamagedError, damaged
from paro.errors import UserError, describe, open_files_limit
from paro.untrusted.pickled import CheckedUnpickler
from paro.untrusted.regular_file import read_bytes

MAX_BYTES = 2**30  # largest file: 7 million chunks, 405 billion parameters on 10,000 ranks
_MAX_NAME_CHARS = 1000
_MAX_DIMENSIONS = 8
_MAX_OVERHEAD_BYTES = 2**16  # bytes that torch.save may add to a chunk's values; it adds 2 KiB

_MODULE = "torch.distributed.checkpoint.metadata"


def read_metadata(directory: Path) -> Metadata:
    """Read DCP's metadata, the place of every chunk; `DamagedError` if they are inconsistent."""
    path = directory / METADATA
    try:
        metadata = _MetadataUnpickler(read_bytes(path, max_bytes=MAX_BYTES)).load()
    except Exception as error:  # an unpickler fails in many ways
        if open_files_limit(error) is not None:
            raise
        detail = describe(error).removeprefix(f"{path} ")
        raise DamagedError(
            f"{path} is missing or damaged ({detail}): resume from another iteration"
        ) from None
    with damaged(path):
        if not isinstance(metadata, Metadata):
            raise UserError(f"it holds a {type(metadata).__name__} and no metadata")
        states, places = _fields(metadata)
        for name, state in states.items():
            _check_state(name, state)
            if isinstance(state, TensorStorageMetadata):
                _check_places(name, state, places)
    return metadata


def _layout(name: object) -> Any:
    """Return the tensor layout with this name; reject arguments that are no names."""
    if type(name) is not str:
        raise pickle.UnpicklingError("a layout has no name")
    return _get_layout(name)


def _memory_format(number: object) -> Any:
    if type(number) is not int:
        raise pickle.UnpicklingError("a memory format has no number")
    return _MEM_FORMAT_ENCODING(number)


_CLASSES = {
    **{
        ("torch", name): dtype
        for name, dtype in vars(torch).items()
        if isinstance(dtype, torch.dtype)
    },
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    (_MODULE, "BytesStorageMetadata"): BytesStorageMetadata,
    (_MODULE, "ChunkStorageMetadata"): ChunkStorageMetadata,
    (_MODULE, "Metadata"): Metadata,
    (_MODULE, "MetadataIndex"): MetadataIndex,
    (_MODULE, "StorageMeta"): StorageMeta,
    (_MODULE, "TensorProperties"): TensorProperties,
    (_MODULE, "TensorStorageMetadata"): TensorStorageMetadata,
    (_MODULE, "_MEM_FORMAT_ENCODING"): _memory_format,
}


class _MetadataUnpickler(CheckedUnpickler):
    """An unpickler of DCP's metadata classes only."""

    classes = _CLASSES

    def is_key(self, key: object) -> bool:
        return super().is_key(key) or (
            isinstance(key, MetadataIndex)
            and type(key.fqn) is str
            and (key.offset is None or isinstance(key.offset, torch.Size))
        )


def _fields(metadata: Metadata) -> tuple[dict[str, Any], Mapping[MetadataIndex, Any]]:
    """Return the states and the places of the states' chunks."""
    states = getattr(metadata, "state_dict_metadata", None)
    places = getattr(metadata, "storage_data", None)
    if not isinstance(states, dict) or not isinstance(places, dict):
        raise UserError("it lists no states or no places")
    for index, place in places.items():
        if not isinstance(index, MetadataIndex):
            raise UserError("a place belongs to no chunk")
        with_name = isinstance(getattr(place, "relative_path", None), str)
        if not isinstance(place, _StorageInfo) or not with_name:
            raise UserError(f"{index.fqn:.99} has no place")
        if Path(place.relative_path).name != place.relative_path or "\0" in place.relative_path:
            raise UserError(
                f"{index.fqn:.99} is in {place.relative_path!r:.99}, no file in its folder"
            )
        offset, length = getattr(place, "offset", None), getattr(place, "length", 0)
        if not (_is_count(offset) and _is_count(length) and length > 0):
            raise UserError(f"{index.fqn:.99} is stored at no range of bytes")
    return states, places


def _check_state(name: object, state: object) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_CHARS:
        raise UserError("a state has no name, or one of more than 1,000 characters")
    if isinstance(state, BytesStorageMetadata):
        return
    size, chunks = getattr(state, "size", None), getattr(state, "chunks", None)
    dtype = getattr(getattr(state, "properties", None), "dtype", None)
    if (
        not isinstance(state, TensorStorageMetadata)
        or not isinstance(dtype, torch.dtype)
        or not isinstance(chunks, list)
        or not _is_shape(size)
        or prod(size) >= 2**63
    ):
        raise UserError(f"{name:.99} has no size or no type of a tensor")
    for chunk in chunks:
        offsets, sizes = getattr(chunk, "offsets", None), getattr(chunk, "sizes", None)
        if (
            not (
                isinstance(chunk, ChunkStorageMetadata) and _is_shape(offsets) and _is_shape(sizes)
            )
            or not len(offsets) == len(sizes) == len(size)
            or any(o + s > n for o, s, n in zip(offsets, sizes, size, strict=True))
        ):
            raise UserError(f"a chunk of {name:.99} is not inside it")


def _check_places(
    name: str, state: TensorStorageMetadata, places: Mapping[MetadataIndex, Any]
) -> None:
    """Check that every chunk is stored, in at most the needed bytes: a reader allocates them."""
    for chunk in state.chunks:
        place = places.get(MetadataIndex(name, chunk.offsets))
        if place is None:
            raise UserError(f"a chunk of {name:.99} is not stored")
        num_bytes = prod(chunk.sizes) * state.properties.dtype.itemsize
        if place.length > num_bytes + _MAX_OVERHEAD_BYTES:
            raise UserError(f"{name:.99} has {place.length} bytes for a chunk of {num_bytes}")


def _is_shape(value: object) -> TypeGuard[torch.Size]:
    return (
        isinstance(value, torch.Size)
        and len(value) <= _MAX_DIMENSIONS
        and all(size >= 0 for size in value)
    )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63
