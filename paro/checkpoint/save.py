"""Saves a run: every rank writes what it alone holds, and a failure leaves the old checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from paro.checkpoint.agreement import Ranks
from paro.checkpoint.boxes import BoxSavePlanner, boxed_states
from paro.checkpoint.directory import (
    CheckpointError,
    begin_checkpoint,
    discard_checkpoint,
    finish_checkpoint,
)
from paro.checkpoint.storage import BoundedWriter, check_files, read_metadata
from paro.sharding.buffers import FlatShard


def save_checkpoint(
    directory_root: str | Path,
    iteration: int,
    shards: Iterable[FlatShard],
    common: Mapping[str, Any],
    *,
    log: Callable[[str], None] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Saves `shards` and `common` as `iteration`; collective, on the thread that owns the group.

    Every rank passes a shard of every unit and state, settled on the current stream. `common` is
    what JSON can hold; the iteration, the format and the versions are added. `log` is called on
    the first rank. On `CheckpointError`, which all ranks raise alike, the folder is as before.
    """
    ranks = Ranks(process_group)
    blame = f"--save {directory_root}"
    if ranks.is_first and log:
        place = f"{directory_root} in torch_dist format"
        log(f"saving checkpoint at iteration {iteration:7d} to {place}")
    partial = ranks.first_decides(lambda: begin_checkpoint(directory_root, iteration), blame)
    try:
        _write(partial, list(shards), ranks, blame)
        ranks.first_decides(lambda: _finish(partial, iteration, common), blame)
    except Exception:
        if ranks.is_first:
            discard_checkpoint(partial)
        raise
    if ranks.is_first and log:
        log(f"  successfully saved checkpoint from iteration {iteration:7d} to {directory_root}")


def _write(partial: Path, shards: Sequence[FlatShard], ranks: Ranks, blame: str) -> None:
    writer = BoundedWriter(partial, from_gpu=any(shard.values.is_cuda for shard in shards))
    with ranks.share_failure(blame), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(
            boxed_states(shards, to_write=True),
            storage_writer=writer,
            planner=BoxSavePlanner(),
            process_group=ranks.group,
            no_dist=ranks.alone,
        )


def _finish(partial: Path, iteration: int, common: Mapping[str, Any]) -> None:
    """Reads back where everything lies, sees that it is there, and puts it in its place."""
    try:
        check_files(partial, list(read_metadata(partial).storage_data.values()))
    except CheckpointError as error:
        raise CheckpointError(f"{error}: all ranks must see one and the same folder") from None
    finish_checkpoint(partial, iteration, common)
