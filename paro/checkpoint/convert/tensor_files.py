"""Opens untrusted files of safetensors and torch.save lazily; writes safetensors in chunks."""

# The safetensors library only writes tensors that are all in memory. The format is a length of 8
# bytes, a JSON header and the tensors' bytes, so a file of any size can be written in chunks.

from __future__ import annotations

import json
import mmap
import pickle
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.serialization import (
    get_unsafe_globals_in_checkpoint,
    safe_globals,
    set_default_mmap_options,
)

from paro.checkpoint.convert.source import LazyTensor
from paro.checkpoint.metadata import InertObject
from paro.errors import UserError, describe, open_files_limit
from paro.files.regular_file import check_regular

# The types that parameters may have, in the order in which the safetensors library writes tensors.
WEIGHT_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}
_DTYPES = {name: dtype for dtype, name in WEIGHT_TYPES.items()}


def open_safetensors(path: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a file, each read when its rows are requested.

    The library checks the header against the file size, so `UserError` for a truncated file.
    """
    from safetensors import SafetensorError, safe_open

    check_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {}
            for name in file.keys():  # noqa: SIM118 - not a dict
                view = file.get_slice(name)
                kind = view.get_dtype()
                if kind not in _DTYPES:
                    raise UserError(f"{path}: {name} is {kind}, which is no weight's type")
                tensors[name] = LazyTensor(
                    shape=tuple(view.get_shape()),
                    dtype=_DTYPES[kind],
                    rows=partial(_read_rows, path, name),
                    name=f"{path}: {name}",
                )
    except (OSError, SafetensorError) as error:
        if open_files_limit(error) is not None:
            raise
        raise UserError(f"{path} is missing, truncated or damaged ({describe(error)})") from None
    return tensors


def safetensors_plan(tensors: Mapping[str, LazyTensor]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file, and the first byte of each tensor, in the order of the file."""
    # Wide types first, for alignment, then by name: as the library writes tensors.
    order = [*WEIGHT_TYPES]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    offset = 0
    for name in sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name)):
        shape, kind = tensors[name].shape, WEIGHT_TYPES[tensors[name].dtype]
        begins[name], offset = offset, offset + tensors[name].num_bytes
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": (begins[name], offset)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    text = len(text).to_bytes(8, "little") + text
    return text, {name: len(text) + begin for name, begin in begins.items()}


def write_safetensors(path: Path, tensors: Mapping[str, LazyTensor]) -> None:
    """Write a file as the library does, with one chunk of one tensor in memory at a time."""
    header, places = safetensors_plan(tensors)
    with path.open("wb") as file:
        file.write(header)
        for name in places:
            for start, stop in tensors[name].row_ranges():
                file.write(bytes_of(tensors[name].rows(start, stop)))


def bytes_of(values: Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory, without a copy if it is contiguous."""
    return values.contiguous().view(-1).view(torch.uint8).numpy().data


def _read_rows(path: Path, name: str, start: int, stop: int) -> Tensor:
    """Read rows [start, stop); reopens the file, so that earlier reads do not stay mapped."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        rows: Tensor = file.get_slice(name)[start:stop]
    return rows.clone()


def load_torch_file(path: Path, content: bytes | None = None) -> Any:
    """Return the contents of a file, with its tensors memory-mapped; or `content`, a part of it.

    torch's weights-only unpickler makes plain data, tensors and namespaces. Everything else that
    the file names, functions included, becomes an inert object. `UserError` for bad files.
    """
    check_regular(path)
    try:
        source: Any = str(path) if content is None else BytesIO(content)
        names = get_unsafe_globals_in_checkpoint(source)
        inert = [(InertObject, name) for name in names if name != "argparse.Namespace"]
        with safe_globals([Namespace, *inert]):
            is_mapped = content is None
            if not is_mapped:
                source.seek(0)
            return torch.load(source, map_location="cpu", mmap=is_mapped, weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(
            f"{path} names code that cannot be left out: nothing of it was run, and it is not read"
        ) from None
    except Exception as error:  # damage causes many kinds of errors
        if open_files_limit(error) is not None:
            raise
        raise UserError(f"{path} is missing, truncated or damaged ({describe(error)})") from None


def map_torch_file(path: Path) -> Any:
    """Map the contents of this project's own file: writes to its tensors change the file."""
    with safe_globals([Namespace]), set_default_mmap_options(mmap.MAP_SHARED):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def is_weight(value: object) -> TypeGuard[Tensor]:
    """Return whether a value can be a parameter: a vector or matrix of a type of weights."""
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.dtype in WEIGHT_TYPES
        and value.ndim in (1, 2)
    )
