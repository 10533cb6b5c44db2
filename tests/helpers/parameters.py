"""Reads a checkpoint's parameters as whole tensors with DCP's own planner."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, TensorStorageMetadata

from paro.checkpoint.agreement import one_process
from paro.checkpoint.boxes import PARAM
from paro.checkpoint.directory import find_checkpoint
from paro.checkpoint.manifest import read_manifest
from paro.checkpoint.metadata import read_metadata
from paro.checkpoint.storage import CheckedReader
from paro.errors import UserError


def load_parameters(root: Path, iteration: int | None = None) -> dict[str, Tensor]:
    """Every parameter whole, in fp32 on the CPU, read by this process only."""
    with one_process().raise_on_all_ranks(f"--load {root}"):
        directory = find_checkpoint(root, iteration)
        if directory is None:
            raise UserError("there is no checkpoint")
        saved = read_metadata(directory).state_dict_metadata
        tensors = {
            name: torch.empty(state.size, dtype=torch.float32)
            for name, state in saved.items()
            if isinstance(state, TensorStorageMetadata) and name.startswith(f"{PARAM}.")
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(
                tensors,
                storage_reader=CheckedReader(directory, read_manifest(directory)),
                planner=DefaultLoadPlanner(),
                no_dist=True,
            )
    return {name.removeprefix(f"{PARAM}."): tensor for name, tensor in tensors.items()}
