"""Reads DCP's metadata of a checkpoint: no code in it runs, and every field is checked."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.serialization import _get_layout

from paro.checkpoint.manifest import METADATA, damaged
from paro.errors import UserError
from paro.files.regular_file import read_bytes

MAX_BYTES = 2**30  # largest file: 7 million chunks, 405 billion parameters on 10,000 ranks
_MAX_NAME_CHARS = 1000
_MAX_DIMENSIONS = 8
_MAX_OVERHEAD_BYTES = 2**16  # bytes that torch.save may add to a chunk's values; it adds 2 KiB

_MODULE = "torch.distributed.checkpoint.metadata"
# Opcodes that a pickle of metadata needs. Left out: sets, byte arrays, out-of-band buffers,
# and the old ways to make an instance.
_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINBYTES, pickle.SHORT_BINBYTES),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
    *(pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.NEWOBJ, pickle.REDUCE, pickle.BUILD),
)


def read_metadata(directory: Path, *, others: bool = False) -> Metadata:
    """Read DCP's metadata, the place of every chunk; `DamagedError` if they are inconsistent.

    With `others` another program may have written it: objects of other classes are inert.
    """
    path = directory / METADATA
    with damaged(path, Exception):  # an unpickler fails in many ways, and so do forged fields
        content = read_bytes(path, max_bytes=MAX_BYTES)
        unpickler = _MetadataUnpickler(BytesIO(content))
        unpickler.others = others
        metadata: Metadata = unpickler.load()
        _check(metadata)
    return metadata


_METADATA_CLASSES = (
    *(BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta),
    *(TensorProperties, TensorStorageMetadata),
)


class _Dispatch(dict[int, Callable[[Any], None]]):
    def __missing__(self, code: int) -> Callable[[Any], None]:
        raise pickle.UnpicklingError(f"it holds the opcode {code}")


class _MetadataUnpickler(pickle._Unpickler):
    """An unpickler that makes only DCP's metadata classes, and changes nothing that exists.

    It is Python's unpickler in Python, of half the speed. In the one in C a file of 8 bytes takes
    64 GB for its memo, and a key nested a million times overflows the stack as it is hashed.
    """

    dispatch: ClassVar[Any] = _Dispatch(
        {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES}
    )
    classes: ClassVar[Mapping[tuple[str, str], Any]] = {
        **{("torch", n): kind for n, kind in vars(torch).items() if isinstance(kind, torch.dtype)},
        **{(_MODULE, kind.__name__): kind for kind in _METADATA_CLASSES},
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): _get_layout,
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
        (_MODULE, "_MEM_FORMAT_ENCODING"): _MEM_FORMAT_ENCODING,
    }
    stack: list[Any]
    others: bool  # whether all other classes become inert objects, and are no error

    def find_class(self, module: str, name: str) -> Any:
        if not self.others and (module, name) not in self.classes:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return self.classes.get((module, name), InertObject)


class InertObject:
    """A substitute for a class or function of another program: takes anything, does nothing."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __setstate__(self, _state: Any) -> None:
        pass


def _checked(opcode: bytes, check: Callable[[list[Any]], bool], fault: str) -> None:
    """Let the unpickler execute an opcode only if the stack passes a check."""
    load = pickle._Unpickler.dispatch[opcode[0]]

    def checked(unpickler: Any) -> None:
        if not check(unpickler.stack):
            raise pickle.UnpicklingError(fault)
        load(unpickler)

    _MetadataUnpickler.dispatch[opcode[0]] = checked


def _is_key(key: object) -> bool:
    """Return whether a dict may have this key, which is then hashed."""
    return type(key) is str or (
        isinstance(key, MetadataIndex)
        and type(key.fqn) is str
        and (key.offset is None or isinstance(key.offset, torch.Size))
    )


_OTHER_KEYS = "it holds a dict with keys of other types"
_checked(pickle.SETITEM, lambda stack: _is_key(stack[-2]), _OTHER_KEYS)
_checked(pickle.SETITEMS, lambda stack: all(map(_is_key, stack[::2])), _OTHER_KEYS)
# A layout and a memory format are looked up by their argument, which is then hashed.
_checked(
    pickle.REDUCE,
    lambda stack: stack[-2] is torch.Size or {*map(type, stack[-1])} <= {str, int},
    "it calls a function of other arguments than names and numbers",
)
# The lookup of an enum's member hashes its argument, too; instances of metadata are made without.
_checked(pickle.NEWOBJ, lambda stack: stack[-1] == (), "it makes an instance with arguments")
# On a class or a constant it would change the whole process.
_checked(
    pickle.BUILD,
    lambda stack: isinstance(stack[-2], (*_METADATA_CLASSES, _StorageInfo, InertObject)),
    "it sets fields of other objects than metadata",
)


def _check(metadata: Metadata) -> None:
    """Raise an error unless every field of `metadata` can be relied on.

    A chunk's place has at most the bytes that the chunk needs: a reader allocates them.
    """
    for index, info in metadata.storage_data.items():
        path = info.relative_path
        if Path(path).name != path or "\0" in path:
            raise UserError(f"{index.fqn:.99} is in {path!r:.99}, no file in its folder")
        if not (_is_count(info.offset) and _is_count(info.length) and info.length > 0):
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
            info = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
            num_bytes = prod(chunk.sizes) * dtype.itemsize
            if info is None or info.length > num_bytes + _MAX_OVERHEAD_BYTES:
                stored = "is not stored" if info is None else f"has {info.length} bytes"
                raise UserError(f"a chunk of {num_bytes} bytes of {name:.99} {stored}")


def _is_shape(value: object) -> bool:
    return (
        isinstance(value, torch.Size)
        and len(value) <= _MAX_DIMENSIONS
        and all(size >= 0 for size in value)
    )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63
