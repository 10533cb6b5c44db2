"""The files of a checkpoint: DCP's own, written with bounded memory and read without trust."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from paro.checkpoint.directory import METADATA, CheckpointError, describe

# DCP keeps a copy on the host of all that it writes into one file until that file is complete.
MAX_FILE_BYTES = 2**29

COPY_AHEAD_BYTES = 10_000_000  # from a GPU, while the bytes before are written

_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_TRUSTED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    (_METADATA_MODULE, "BytesStorageMetadata"),
    (_METADATA_MODULE, "ChunkStorageMetadata"),
    (_METADATA_MODULE, "Metadata"),
    (_METADATA_MODULE, "MetadataIndex"),
    (_METADATA_MODULE, "StorageMeta"),
    (_METADATA_MODULE, "TensorProperties"),
    (_METADATA_MODULE, "TensorStorageMetadata"),
    (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"),
}


class BoundedWriter(FileSystemWriter):
    """Writes files of at most `MAX_FILE_BYTES`, or of one rectangle."""

    def __init__(self, directory: Path, *, from_gpu: bool) -> None:
        # Copying ahead would start CUDA even for tensors on the CPU.
        super().__init__(directory, per_thread_copy_ahead=COPY_AHEAD_BYTES if from_gpu else 0)

    def storage_meta(self) -> StorageMeta:
        """Without the folder's name, which is another once the checkpoint is complete."""
        return StorageMeta(save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        prefix = plan.storage_data.prefix
        for number, items in enumerate(_files(plan.items)):
            place = replace(plan.storage_data, prefix=f"{prefix}{number}_")
            part = replace(plan, items=items, storage_data=place)
            try:
                results += super().write_data(part, planner).wait()
            except Exception as error:
                raise CheckpointError(f"cannot write: {describe(_root_cause(error))}") from error
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


class CheckedReader(FileSystemReader):
    """Reads a checkpoint that anybody may have written: no code in it can run.

    A missing or truncated file fails the plan, before anything was overwritten on any rank.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_metadata(Path(self.path))

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        check_files(Path(self.path), [self._place(item) for item in plan.items])
        return plan

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """File by file, so that a failure names the file; from its begin to its end."""

        def place(item: ReadItem) -> tuple[str, int]:
            return self._file(item), self._place(item).offset

        for name, items in groupby(sorted(plan.items, key=place), key=self._file):
            try:
                super().read_data(replace(plan, items=list(items)), planner).wait()
            except Exception as error:
                path = Path(self.path) / name
                raise CheckpointError(f"{path} is damaged ({describe(error)})") from error
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _place(self, item: ReadItem) -> Any:
        return self.storage_data[item.storage_index]

    def _file(self, item: ReadItem) -> str:
        return str(self._place(item).relative_path)


def read_metadata(directory: Path) -> Metadata:
    """What a checkpoint holds and where; `CheckpointError` if that cannot be read."""
    path = directory / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except Exception as error:  # an unpickler fails in many ways
        raise CheckpointError(
            f"{path} is missing or damaged ({describe(error)}): resume from another iteration"
        ) from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{path} holds a {type(metadata).__name__} and no metadata")
    return metadata


def check_files(directory: Path, places: list[Any]) -> None:
    """Raises `CheckpointError` unless the files of these places are there and long enough."""
    needed: dict[str, int] = {}
    for place in places:
        stop = place.offset + place.length
        needed[place.relative_path] = max(stop, needed.get(place.relative_path, 0))
    for name, num_bytes in needed.items():
        path = directory / name
        try:
            found = path.stat().st_size
        except OSError as error:
            raise CheckpointError(describe(error)) from None
        if found < num_bytes:
            raise CheckpointError(f"{path} is truncated: {found} bytes of at least {num_bytes}")


class _MetadataUnpickler(pickle.Unpickler):
    """Makes DCP's metadata and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _TRUSTED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def _root_cause(error: BaseException) -> BaseException:
    """The exception below all others: a full disk makes a zip file fail to close."""
    below = error.__cause__ or error.__context__
    return _root_cause(below) if below else error


def _files(items: list[WriteItem]) -> Iterator[list[WriteItem]]:
    """Cuts a rank's items into what goes into one file each."""
    bunch: list[WriteItem] = []
    num_bytes = 0
    for item in items:
        assert item.tensor_data is not None, f"{item.index} is no tensor"
        size = prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
        if bunch and num_bytes + size > MAX_FILE_BYTES:
            yield bunch
            bunch, num_bytes = [], 0
        bunch.append(item)
        num_bytes += size
    if bunch:
        yield bunch
