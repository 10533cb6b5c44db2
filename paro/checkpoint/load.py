"""Loads a run into shards of any strategy and world size, or its parameters as whole tensors."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, TensorStorageMetadata

from paro.checkpoint.agreement import Ranks
from paro.checkpoint.boxes import (
    MISMATCH,
    PARAM,
    BoxedState,
    BoxLoadPlanner,
    boxed_states,
    check_states,
)
from paro.checkpoint.directory import CheckpointError, common_of, find_checkpoint
from paro.checkpoint.storage import CheckedReader, read_metadata
from paro.sharding.buffers import FlatShard


def load_checkpoint(
    directory_root: str | Path,
    shards: Iterable[FlatShard],
    *,
    model: Mapping[str, Any] | None = None,
    iteration: int | None = None,
    log: Callable[[str], None] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any] | None:
    """Fills `shards` in place and returns what was saved beside them; None if nothing was saved.

    Collective, on the thread that owns the group. Every rank passes a shard of every unit and of
    each state it wants; states left out are not read, nor moments of a converted model, which has
    none. `model` holds the fields that must equal
    `common["model"]`. On `CheckpointError`, which all ranks raise alike, shards are untouched
    unless a file turned out to be damaged while it was read.
    """
    ranks = Ranks(process_group)
    blame = f"--load {directory_root}"
    states = boxed_states(shards, to_write=False)
    found = ranks.first_decides(lambda: _find(directory_root, iteration, states, model), blame)
    if found is None:
        return None
    directory, common = found
    states = _present(states, common)
    with ranks.share_failure(blame):
        _read(directory, states, BoxLoadPlanner(), ranks)
    if ranks.is_first and log:
        log(
            f"  successfully loaded checkpoint from {directory_root} "
            f"at iteration {common['iteration']}"
        )
    return common


def load_parameters(directory_root: str | Path, iteration: int | None = None) -> dict[str, Tensor]:
    """Every parameter whole, in fp32 on the CPU, read by this process alone."""
    alone = Ranks(None, alone=True)
    blame = f"--load {directory_root}"
    with alone.share_failure(blame):
        directory = find_checkpoint(directory_root, iteration)
        if directory is None:
            raise CheckpointError("there is no checkpoint")
        saved = read_metadata(directory).state_dict_metadata
        tensors = {
            name: torch.empty(state.size, dtype=torch.float32)
            for name, state in saved.items()
            if isinstance(state, TensorStorageMetadata) and name.startswith(f"{PARAM}.")
        }
        _read(directory, tensors, DefaultLoadPlanner(), alone)
    return {name.removeprefix(f"{PARAM}."): tensor for name, tensor in tensors.items()}


def _find(
    root: str | Path,
    iteration: int | None,
    states: dict[str, BoxedState],
    model: Mapping[str, Any] | None,
) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint to load, known to fit these states, and its common part."""
    directory = find_checkpoint(root, iteration)
    if directory is None:
        return None
    common = common_of(directory)
    _check_model(common.get("model", {}), model or {})
    check_states(_present(states, common), read_metadata(directory))
    return directory, common


def _present(states: dict[str, BoxedState], common: Mapping[str, Any]) -> dict[str, BoxedState]:
    """What is to be read: of a converted model the parameters alone, as it has nothing else."""
    if not common.get("parameters_only"):
        return states
    return {name: state for name, state in states.items() if name.startswith(f"{PARAM}.")}


def _check_model(there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Names the first field that differs; shapes alone do not tell 8 heads of 16 from 4 of 32."""
    for name, value in json.loads(json.dumps(dict(here))).items():
        if name in there and there[name] != value:
            raise CheckpointError(f"{MISMATCH}: {name} is {there[name]} there and {value} here")


def _read(directory: Path, states: dict[str, Any], planner: DefaultLoadPlanner, by: Ranks) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(
            states,
            storage_reader=CheckedReader(directory),
            planner=planner,
            process_group=by.group,
            no_dist=by.alone,
        )
