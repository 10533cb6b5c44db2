"""Saves a checkpoint: every rank writes its part; a failure leaves the previous one intact."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from paro.checkpoint.agreement import CheckpointRanks
from paro.checkpoint.chunks import ChunkedState
from paro.checkpoint.directory import (
    STORE_SECONDS,
    begin_checkpoint,
    discard_checkpoint,
    finish_checkpoint,
)
from paro.checkpoint.folder_lock import LockLostError
from paro.checkpoint.manifest import (
    METADATA,
    ChunkSums,
    DamagedError,
    check_sizes,
    sum_of,
    write_durably,
)
from paro.checkpoint.metadata import read_metadata
from paro.checkpoint.storage import BoundedWriter
from paro.errors import StorageError, UserError, writing
from paro.files.object_cache import FLAG, staging_folder
from paro.files.object_store import StorePath, store_timeout
from paro.layout import Shape

# Returns the values to write, of a state's name, the offsets of a chunk and the chunk.
ReadChunk = Callable[[str, Shape, Tensor], Tensor]


def write_states(
    root: Path,
    iteration: int,
    states: dict[str, ChunkedState],
    common: Mapping[str, Any],
    *,
    ranks: CheckpointRanks,
    log: Callable[[str], None],
) -> None:
    """Save states, which may be copies, and `common` as `iteration`; collective.

    Every rank passes its chunks of every state; each folder gets the chunks of the ranks that see
    the folder. `common` must be JSON; the iteration, the format and the versions are added. `log`
    is called on every rank. After an error, raised on all ranks, the previous checkpoint is
    unchanged. If the lock of `ranks` is lost, nothing is renamed or removed.
    """
    blame = f"--save {root}"
    log(f"saving checkpoint at iteration {iteration:7d} to {root} in torch_dist format")
    token = "" if ranks.lock is None else ranks.lock.holder.token
    begin = partial(begin_checkpoint, root, iteration, check=ranks.check_lock, token=token)
    folder = ranks.first_decides(begin, blame)
    try:
        # Each line raises on all ranks or on none: no folder is completed if any rank failed.
        files = write_files(folder, states, ranks, blame)
        finish = partial(finish_checkpoint, folder, iteration, common, files, ranks.check_lock)
        ranks.first_decides(finish, blame)
    except Exception as error:
        if ranks.is_first_of_folder:
            discard_checkpoint(folder, ranks.check_lock)
        is_shared = isinstance(error, (UserError, StorageError))  # raised on all ranks
        if is_shared and not isinstance(error, LockLostError):
            # Another run may hold the folder and have removed this run's files; of a removed
            # folder none does.
            quietly = ranks.raise_on_all_ranks(blame, name_rank=False)
            with quietly, suppress(OSError), store_timeout(STORE_SECONDS):
                ranks.check_lock()
        raise
    log(f"  successfully saved checkpoint from iteration {iteration:7d} to {root}")


def write_files(
    folder: Path,
    states: dict[str, ChunkedState],
    ranks: CheckpointRanks,
    blame: str,
    *,
    read: ReadChunk = lambda _name, _offsets, values: values,
) -> dict[str, ChunkSums]:
    """Write the tensor files and their metadata; return the checksums of this rank's folder.

    Collective; an error begins with `blame`, and is raised on all ranks. `read` returns the values
    of a chunk when they are written.
    """
    with (
        ranks.raise_on_all_ranks(blame),
        _place_of(folder, ranks) as (place, prefix),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        writer = BoundedWriter(place, prefix)
        try:
            dcp.save(
                states,
                storage_writer=writer,
                planner=ChunkSavePlanner(whole=ranks.share_one_folder, read=read),
                process_group=ranks.near.group,
                no_dist=ranks.everyone.world.size == 1,
            )
        except CheckpointException as error:  # has all ranks' failures; raise this rank's
            near = ranks.near.world  # its ranks are the keys of the failures
            if near.rank in error.failures:
                raise error.failures[near.rank][0] from error
            if not error.failures.keys() <= set(range(near.size)):
                raise RuntimeError("DCP names ranks that do not save here") from error
    files = {name: file for sums in ranks.near.gather(writer.sums) for name, file in sums.items()}
    # Every rank gets room for the result from each: the sums of all files would be too large.
    of_metadata = ranks.first_decides(lambda: _read_back(folder, files), blame)
    return {**files, METADATA: of_metadata}


@contextmanager
def _place_of(folder: Path, ranks: CheckpointRanks) -> Iterator[tuple[Path, str]]:
    """Give where a rank writes its files: the folder, or a local one that is then uploaded.

    Also a prefix of their names, which in a store no other save has, but for the metadata: a run
    that has lost the folder without noticing yet overwrites no file of its successor.
    """
    if not isinstance(folder, StorePath):
        yield folder, ""
        return
    with staging_folder() as local:
        with writing(f"{FLAG} {local.parent}"):  # its disk is full, not the store
            yield local, f"{secrets.token_hex(4)}_"
        ranks.check_lock()
        for path in sorted(local.iterdir()):
            if path.name == METADATA:
                write_durably(folder / METADATA, path.read_bytes())
            else:
                (folder / path.name).upload(path)


def _read_back(folder: Path, files: Mapping[str, ChunkSums]) -> ChunkSums:
    """Check that this rank can load the files of all ranks; return sums of the metadata."""
    try:
        check_sizes(folder, files)
        read_metadata(folder)
        return sum_of((folder / METADATA).read_bytes())
    except DamagedError as error:
        raise UserError(
            "what was just written is gone or not seen by all ranks, which need one and the same "
            f"folder: {error}"
        ) from None


class ChunkSavePlanner(DefaultSavePlanner):
    """A planner that writes every chunk of a dict of chunked states.

    With `whole` the ranks that save together must hold every state completely. `read` returns the
    values of a chunk when they are written.
    """

    def __init__(self, *, whole: bool, read: ReadChunk) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.whole = whole
        self.read = read

    def create_local_plan(self) -> SavePlan:
        states: dict[str, ChunkedState] = self.state_dict
        items = [
            WriteItem(
                index=MetadataIndex(name, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), values.shape),
                    properties=TensorProperties(dtype=values.dtype),
                    size=torch.Size(state.shape),
                ),
            )
            for name, state in states.items()
            for offsets, values in state.chunks.items()
        ]
        self.plan = SavePlan(items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Join the plans; with `whole` reject overlaps, as the base class does, and holes."""
        join = super().create_global_plan if self.whole else create_default_global_save_plan
        plans, metadata = join(all_plans)
        for name, state in self.state_dict.items():
            properties, size = TensorProperties(dtype=state.dtype), torch.Size(state.shape)
            held_elsewhere = TensorStorageMetadata(properties=properties, size=size, chunks=[])
            saved: Any = metadata.state_dict_metadata.setdefault(name, held_elsewhere)
            num_elements = sum(chunk.sizes.numel() for chunk in saved.chunks)
            is_whole = num_elements == prod(state.shape)
            assert is_whole or not self.whole, f"{name}: {num_elements} of {state.shape}"
        return plans, metadata

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        name, offsets = write_item.index.fqn, tuple(write_item.index.offset or ())
        return self.read(name, offsets, self.state_dict[name].chunks[offsets])
