"""Opens untrusted files of safetensors and torch.save lazily; writes safetensors in chunks."""

# The safetensors library only writes tensors that are all in memory. The format is a length of 8
# bytes, a JSON header and the tensors' bytes, so a file of any size can be written in chunks.

from __future__ import annotations

import json
import os
import pickle
from argparse import Namespace
from collections.abc import Iterator, Mapping
from functools import partial
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from paro.checkpoint.chunks import ChunkedState
from paro.checkpoint.convert.source import LazyTensor, finite_cast
from paro.checkpoint.metadata import InertObject
from paro.distributed.world import World
from paro.errors import UserError, describe, open_files_limit
from paro.files.regular_file import check_regular
from paro.layout import Shape

# The types that parameters may have, in the order in which the safetensors library writes tensors.
WEIGHT_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}
TensorFiles = Mapping[str, Mapping[str, LazyTensor]]  # by the file's name and the tensor's there
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


def write_safetensors(files: TensorFiles, directory: Path) -> None:
    """Write files as the library does, with one chunk of one tensor in memory at a time."""
    make_files(files, directory)
    write_parts(files, directory, {}, World())


def make_files(files: TensorFiles, directory: Path) -> None:
    """Make files with their headers and at full length."""
    for name, tensors in files.items():
        header, _ = safetensors_plan(tensors)
        with (directory / name).open("xb") as file:
            file.write(header)
            file.truncate(len(header) + sum(tensor.num_bytes for tensor in tensors.values()))


def write_parts(
    files: TensorFiles, directory: Path, held: Mapping[str, ChunkedState], world: World
) -> int:
    """Write a rank's part of all tensors into files that exist; return the number of bytes.

    `held` are this rank's chunks of tensors that ranks hold. Of the others, which are read, ranks
    take turns to write the chunks.
    """
    turns, written = cycle(range(world.size)), 0
    for file, tensors in files.items():
        _, places = safetensors_plan(tensors)
        # Not through a mapping: nodes would write back each other's parts of a page.
        with (directory / file).open("r+b") as out:
            for name in places:
                tensor = tensors[name]
                if name in held:
                    chunks = iter(held[name].chunks.items())
                else:
                    mine = (r for r in tensor.row_ranges() if next(turns) == world.rank)
                    chunks = (((begin,), tensor.rows(begin, end)) for begin, end in mine)
                for offsets, values in chunks:
                    rows = values.detach()[: max(0, tensor.shape[0] - offsets[0])].cpu()
                    if name in held:  # others are cast when they are read
                        rows = finite_cast(rows, tensor.dtype, tensor.name)
                    for at, content in _runs(tensor, offsets, rows):
                        out.seek(places[name] + at)
                        written += out.write(content)
            out.flush()
            os.fsync(out.fileno())  # a server's full disk is reported here
    return written


def _runs(tensor: LazyTensor, offsets: Shape, values: Tensor) -> Iterator[tuple[int, memoryview]]:
    """Yield each contiguous run of a chunk in a tensor: offset in bytes, and content.

    The chunk begins at `offsets` in the tensor; of whole rows only the first offset is needed.
    """
    row, size = tensor.num_bytes // tensor.shape[0], tensor.dtype.itemsize
    if values.shape[1:] == tensor.shape[1:]:
        yield offsets[0] * row, bytes_of(values)
    else:
        for index, part in enumerate(values, offsets[0]):
            yield index * row + offsets[1] * size, bytes_of(part)


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


def is_weight(value: object) -> TypeGuard[Tensor]:
    """Return whether a value can be a parameter: a vector or matrix of a type of weights."""
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.dtype in WEIGHT_TYPES
        and value.ndim in (1, 2)
    )
