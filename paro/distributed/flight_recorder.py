"""Enables and reads torch's flight recorder, which logs the last collectives of this process."""

# torch has two recorders, with one buffer each: one for NCCL's groups, one for all other groups. A
# run under NCCL has both kinds; the collectives of model states are in the recorder for NCCL.

from __future__ import annotations

import importlib
import os
import pickle
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from paro.distributed.world import read_world

FLIGHT_PREFIX = "rank_"  # file names in --flight-recorder-dir are this prefix and the rank

_TIMEOUT_PREFIX = "timeout_of_rank_"

# The number of recent collectives that torch keeps in memory.
_RECORDED_COLLECTIVES = 2000


def record_flights(folder: str, rank: int) -> None:
    """Make torch record collectives, and write them to `folder` if an NCCL collective times out.

    Variables that are already set in the environment keep their values.
    """
    # torch appends to the name the rank in the first NCCL group that the process made. No NCCL
    # group has all ranks, so several ranks would write under the same number.
    directory = Path(folder).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in (
        ("TORCH_FR_BUFFER_SIZE", str(_RECORDED_COLLECTIVES)),
        ("TORCH_FR_DUMP_TEMP_FILE", str(directory / f"{_TIMEOUT_PREFIX}{rank}_in_group_")),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
    ):
        os.environ.setdefault(name, value)


def recorded_collectives() -> bytes | None:
    """Return the pickled flight-recorder data of this process; None without process groups."""
    if not dist.is_initialized():
        return None
    recorders = importlib.import_module("torch._C._distributed_c10d")
    backends = {backend for backend, _ in distributed_c10d._world.pg_map.values()}
    if "nccl" in backends:
        torch.cuda.set_device(read_world().local_rank)  # a new thread is on GPU 0
        return bytes(recorders._dump_nccl_trace())
    recorded = pickle.loads(recorders._dump_fr_trace())
    # For gloo groups torch omits the names by which its analysis tool looks up their ranks.
    groups = {group.group_name: group for group in distributed_c10d._world.pg_names}
    recorded["pg_config"] = {
        name: {
            "name": name,
            "desc": group.group_desc,
            "ranks": str(dist.get_process_group_ranks(group)),
        }
        for name, group in groups.items()
    }
    recorded["entries"] = [
        entry for entry in recorded["entries"] if entry["process_group"][0] in groups
    ]
    return pickle.dumps(recorded)
