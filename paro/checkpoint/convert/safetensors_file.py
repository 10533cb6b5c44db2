"""Opens a safetensors file without reading its tensors; writes one in chunks."""

# The library only writes tensors that are all in memory. The format is a length of 8 bytes, a JSON
# header and the tensors' bytes, so a file of any size can be written in chunks.

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from paro.checkpoint.convert.source import LazyTensor
from paro.errors import UserError, describe, open_files_limit
from paro.untrusted.regular_file import check_regular

_DTYPES = {  # in the order in which the library writes tensors
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


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
        raise UserError(f"{path} is missing, truncated or damaged ({describe(error)})") from (None)
    return tensors


def write_safetensors(
    path: Path, tensors: Mapping[str, LazyTensor], advance: Callable[[int], None]
) -> None:
    """Write the same file as the library, with one chunk of one tensor in memory at a time."""
    # Wide types first, for alignment, then by name.
    order = [*_NAMES]
    tensors = dict(sorted(tensors.items(), key=lambda item: (order.index(item[1].dtype), item[0])))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.num_bytes
        kind = _NAMES[tensor.dtype]
        header[name] = {"dtype": kind, "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            for start, stop in tensor.row_ranges():
                rows = tensor.rows(start, stop).contiguous()
                file.write(rows.view(torch.uint8).numpy().data)
                advance(rows.nbytes)


def _read_rows(path: Path, name: str, start: int, stop: int) -> Tensor:
    """Read rows [start, stop); reopens the file, so that earlier reads do not stay mapped."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        rows: Tensor = file.get_slice(name)[start:stop]
    return rows.clone()
