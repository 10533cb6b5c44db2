"""Reads DCP's metadata of a checkpoint: no code in it runs, and every field is checked."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, ClassVar

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
from paro.checkpoint.manifest import DamagedError
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
        metadata: Metadata = _MetadataUnpickler(read_bytes(path, max_bytes=MAX_BYTES)).load()
        _check(metadata)
    except Exception as error:  # an unpickler fails in many ways, and so do forged fields
        if open_files_limit(error) is not None:
            raise
        detail = describe(error).removeprefix(f"{path} ")
        raise DamagedError(
            f"{path} is missing or damaged ({detail}): resume from another iteration"
        ) from None
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


_METADATA_CLASSES = (
    *(BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta),
    *(TensorProperties, TensorStorageMetadata),
)


class _MetadataUnpickler(CheckedUnpickler):
    """An unpickler of DCP's metadata classes only."""

    classes: ClassVar[Mapping[tuple[str, str], Any]] = {
        **{
            ("torch", n): dtype
            for n, dtype in vars(torch).items()
            if isinstance(dtype, torch.dtype)
        },
        **{(_MODULE, kind.__name__): kind for kind in _METADATA_CLASSES},
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): _layout,
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
        (_MODULE, "_MEM_FORMAT_ENCODING"): _memory_format,
    }

    def is_key(self, key: object) -> bool:
        return super().is_key(key) or (
            isinstance(key, MetadataIndex)
            and type(key.fqn) is str
            and (key.offset is None or isinstance(key.offset, torch.Size))
        )


def _check(metadata: Metadata) -> None:
    """Raise an error unless every field of `metadata` can be relied on.

    A chunk's place has at most the bytes that the chunk needs: a reader allocates them.
    """
    for index, place in metadata.storage_data.items():
        path = place.relative_path
        if Path(path).name != path or "\0" in path:
            raise UserError(f"{index.fqn:.99} is in {path!r:.99}, no file in its folder")
        if not (_is_count(place.offset) and _is_count(place.length) and place.length > 0):
            raise UserError(f"{index.fqn:.99} is stored at no range of bytes")
    for name, state in metadata.state_dict_metadata.items():
        if not 0 < len(name) <= _MAX_NAME_CHARS:
            raise UserError("a state has no name, or one of more than 1,000 characters")
        if isinstance(state, BytesStorageMetadata):
            continue
        dtype, is_tensor = state.properties.dtype, isinstance(state, TensorStorageMetadata)
        is_typed = is_tensor and isinstance(dtype, torch.dtype)
        if not (is_typed and _is_shape(state.size) and prod(state.size) < 2**63):
            raise UserError(f"{name:.99} has no size or no type of a tensor")
        for chunk in state.chunks:
            corners = zip(chunk.offsets, chunk.sizes, state.size, strict=True)
            if not (_is_shape(chunk.offsets) and _is_shape(chunk.sizes)) or any(
                offset + size > whole for offset, size, whole in corners
            ):
                raise UserError(f"a chunk of {name:.99} is not inside it")
            place = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
            num_bytes = prod(chunk.sizes) * dtype.itemsize
            if place is None or place.length > num_bytes + _MAX_OVERHEAD_BYTES:
                stored = "is not stored" if place is None else f"has {place.length} bytes"
                raise UserError(f"a chunk of {num_bytes} bytes of {name:.99} {stored}")


def _is_shape(value: object) -> bool:
    return (
        isinstance(value, torch.Size)
        and len(value) <= _MAX_DIMENSIONS
        and all(size >= 0 for size in value)
    )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63
