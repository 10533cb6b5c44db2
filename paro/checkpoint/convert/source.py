"""Source: a model to convert, with its configuration, lazily read tensors, and adapters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.hugging_face_tokenizer import ends_in
from model.config import LlamaConfig, LoraConfig, down_name, up_name
from model.units import BY_VOCABULARY
from paro.checkpoint.directory import TokenIds
from paro.errors import UserError
from paro.layout import Shape, shape_text

# Bytes of a tensor that are read at once; a conversion holds a few times as much in memory.
CHUNK_BYTES = 2**27


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyTensor:
    """A tensor in a file; `rows` reads the rows [start, stop) of its first dimension."""

    shape: Shape
    dtype: torch.dtype
    rows: Callable[[int, int], Tensor]
    name: str = ""  # the tensor's file and its name in the file, for messages

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def row_ranges(self) -> Iterator[tuple[int, int]]:
        """Yield consecutive [start, stop) ranges of rows of about `CHUNK_BYTES` each."""
        row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        step = max(1, CHUNK_BYTES // max(1, row_bytes))
        for start in range(0, self.shape[0], step):
            yield start, min(start + step, self.shape[0])

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Return the whole tensor in memory, in this dtype."""
        values = torch.empty(self.shape, dtype=dtype)
        for start, stop in self.row_ranges():
            values[start:stop] = self.rows(start, stop)
        return values

    def cast(self, dtype: torch.dtype | None) -> LazyTensor:
        """Return the tensor in a type, or its own; `UserError` where a value read is not finite."""
        target = dtype or self.dtype

        def rows(start: int, stop: int) -> Tensor:
            return finite_cast(self.rows(start, stop), target, self.name)

        return replace(self, dtype=target, rows=rows)

    def counted(self, count: Callable[[int], object]) -> LazyTensor:
        """Return a tensor that calls `count` with the bytes of the rows whenever some are read."""

        def rows(start: int, stop: int) -> Tensor:
            values = self.rows(start, stop)
            count(values.nbytes)
            return values

        return replace(self, rows=rows)


def lazy(tensor: Tensor) -> LazyTensor:
    """Return a lazy tensor over a mapped tensor, whose rows are copied when they are read."""

    def rows(start: int, stop: int) -> Tensor:
        return tensor[start:stop].clone(memory_format=torch.contiguous_format)

    return LazyTensor(shape=tuple(tensor.shape), dtype=tensor.dtype, rows=rows)


def finite_cast(values: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return values of the tensor `name` in a type; `UserError` if one is not finite there."""
    cast = values.to(dtype)
    if _is_finite(cast):
        return cast
    if not _is_finite(values):
        raise UserError(f"{name} holds infinity or NaN: take a checkpoint that holds none")
    text, most = str(dtype).removeprefix("torch."), torch.finfo(dtype).max
    largest = float(values.abs().max())
    raise UserError(
        f"{name} holds {largest:g}, and {text} has no number above {most:g}: choose another type"
    )


def _is_finite(values: Tensor) -> bool:
    """Tell whether all values are finite, by the least and the largest: both are NaN if any is."""
    return values.numel() == 0 or all(bool(end.isfinite()) for end in values.aminmax())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model to convert: tensors under this project's names, without padding.

    `companions` are other files by their names in a Hugging Face folder: tokenizer,
    generation_config.json and, if the source has one, config.json.
    """

    config: LlamaConfig
    tensors: Mapping[str, LazyTensor]
    companions: Mapping[str, Path] = field(default_factory=dict)
    tokenizer: Mapping[str, Any] | None = None  # fields of TokenizerConfig, if known
    origin: str | None = None  # the Hugging Face folder with these weights, without adapters
    begins_with_bos: bool = False  # whether training texts began with BOS
    token_ids: TokenIds = field(default_factory=dict)  # special tokens in the first config.json
    notes: tuple[str, ...] = ()
    adapters: Mapping[str, LazyTensor] = field(default_factory=dict)  # merged into `tensors` too
    lora: LoraConfig | None = None  # the adapters' flags; None: no run can have such adapters
    # The optimizer's moments of all parameters, by their kind; `tensors` are its masters then.
    moments: Mapping[str, Mapping[str, LazyTensor]] = field(default_factory=dict)
    progress: Mapping[str, Any] = field(default_factory=dict)  # fields for a run that continues

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end a text in addition to the tokenizer's, from the generation config."""
        path = self.companions.get("generation_config.json")
        return frozenset() if path is None else ends_in(path)

    def copy_companions(self, directory: Path) -> None:
        """Copy the companions into a folder, which is made if it is missing."""
        directory.mkdir(exist_ok=True)
        for name, path in self.companions.items():
            shutil.copyfile(path, directory / name)

    @property
    def num_bytes(self) -> int:
        stored = (self.tensors, *self.moments.values())
        return sum(tensor.num_bytes for tensors in stored for tensor in tensors.values())

    def with_each(self, change: Callable[[LazyTensor], LazyTensor]) -> ModelSource:
        """Return the model with every tensor, moment and part of its adapters changed."""

        def changed(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
            return {name: change(tensor) for name, tensor in tensors.items()}

        moments = {kind: changed(tensors) for kind, tensors in self.moments.items()}
        tensors, adapters = changed(self.tensors), changed(self.adapters)
        return replace(self, tensors=tensors, adapters=adapters, moments=moments)

    def with_adapters(
        self,
        lora: LoraConfig | None,
        adapters: Mapping[str, LazyTensor],
        scalings: Mapping[str, float],
    ) -> ModelSource:
        """Return the model with adapters: kept, and merged into its tensors, which become fp32.

        `scalings` are by the weights with adapters; `lora` is None if no run has such adapters.
        """
        tensors = dict(self.tensors)
        for weight, scaling in scalings.items():
            parts = (tensors[weight], adapters[down_name(weight)], adapters[up_name(weight)])
            whole, down, up = (part.cast(None) for part in parts)
            tensors[weight] = _sum(whole, down, up, scaling)
        return replace(self, tensors=tensors, lora=lora, adapters=adapters)


def write_json(path: Path, fields: Mapping[str, Any]) -> None:
    """Write a configuration as Hugging Face's libraries do."""
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def joined(parts: Sequence[LazyTensor], dim: int | None) -> LazyTensor:
    """Join tensors along rows (0) or columns (1); with None all are equal: take the first."""
    if dim is None or len(parts) == 1:
        return parts[0]

    def rows(start: int, stop: int) -> Tensor:
        if dim:
            return torch.cat([part.rows(start, stop) for part in parts], dim=1)
        pieces, base = [], 0
        for part in parts:
            low, high = max(start, base), min(stop, base + part.shape[0])
            if low < high:
                pieces.append(part.rows(low - base, high - base))
            base += part.shape[0]
        return torch.cat(pieces)

    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return LazyTensor(shape=tuple(shape), dtype=parts[0].dtype, rows=rows)


def picked(tensor: LazyTensor, index: Tensor) -> LazyTensor:
    """Return a tensor of the rows `index` of another; consecutive rows are read at once."""

    def rows(start: int, stop: int) -> Tensor:
        wanted, order = index[start:stop].sort()
        values = torch.empty((stop - start, *tensor.shape[1:]), dtype=tensor.dtype)
        for places in order.tensor_split((wanted.diff() != 1).nonzero().flatten() + 1):
            first = int(index[start + places[0]])
            values[places] = tensor.rows(first, first + len(places))
        return values

    return replace(tensor, shape=(len(index), *tensor.shape[1:]), rows=rows)


def checked_tensors(
    shapes: Mapping[str, Shape],
    stored: Mapping[str, LazyTensor],
    where: Path,
    called: Callable[[str], str] = str,
) -> dict[str, LazyTensor]:
    """Return the tensors that must have these shapes; `called` names a tensor as its file does.

    Raises `UserError` for a tensor that is missing or has another shape.
    """
    tensors = {}
    for name, shape in shapes.items():
        if name not in stored:
            raise UserError(f"{where} has no {called(name)}: a file is missing or damaged")
        if stored[name].shape != shape:
            there, here = map(shape_text, (stored[name].shape, shape))
            raise UserError(f"{where}: {called(name)} is {there}, and {here} by its configuration")
        tensors[name] = replace(stored[name], name=stored[name].name or f"{where}: {called(name)}")
    return tensors


def with_vocabulary(tensors: Mapping[str, LazyTensor], rows: int) -> dict[str, LazyTensor]:
    """Return the tensors with `rows` rows in embedding and output layer; further ones are zero."""
    changed = dict(tensors)
    for name in BY_VOCABULARY:
        if name in tensors and tensors[name].shape[0] != rows:
            shape = (rows, *tensors[name].shape[1:])
            zeros = lazy(torch.zeros((), dtype=tensors[name].dtype).expand(shape))
            longer = joined([tensors[name], zeros], 0)
            changed[name] = replace(tensors[name], shape=shape, rows=longer.rows)
    return changed


def _sum(weight: LazyTensor, down: LazyTensor, up: LazyTensor, scaling: float) -> LazyTensor:
    def rows(start: int, stop: int) -> Tensor:
        product = up.rows(start, stop).float() @ down.whole(torch.float32)
        return weight.rows(start, stop).float().add_(product, alpha=scaling)

    return replace(weight, dtype=torch.float32, rows=rows)
