"""Reads a checkpoint's parameters as whole tensors, and its other facts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import TensorStorageMetadata

from paro.checkpoint.agreement import one_process
from paro.checkpoint.chunks import PARAM, ChunkedState
from paro.checkpoint.directory import common_of, find_checkpoint, latest_iteration
from paro.checkpoint.manifest import read_manifest
from paro.checkpoint.storage import CheckedReader


def load_parameters(root: Path, iteration: int | None = None) -> dict[str, Tensor]:
    """Every parameter whole, in fp32 on the CPU, read by this process only."""
    with one_process().raise_on_all_ranks(f"--load {root}"):
        directory = find_checkpoint(root, iteration)
        reader = CheckedReader(read_manifest(directory))
        tensors = {
            name: torch.empty(state.size, dtype=torch.float32)
            for name, state in reader.metadata.state_dict_metadata.items()
            if isinstance(state, TensorStorageMetadata) and name.startswith(f"{PARAM}.")
        }
        states = {
            name: ChunkedState(shape=tensor.shape, chunks={(0,) * tensor.dim(): tensor})
            for name, tensor in tensors.items()
        }
        reader.read(reader.plan(states.items()))
    return {name.removeprefix(f"{PARAM}."): tensor for name, tensor in tensors.items()}


def read_common(directory_root: str | Path, iteration: int | None = None) -> dict[str, Any] | None:
    """Return the contents of common.json; None if nothing was saved."""
    if iteration is None and latest_iteration(directory_root) is None:
        return None
    return common_of(find_checkpoint(directory_root, iteration))
