"""torch's flight recorder: the last collectives of this process."""

from __future__ import annotations

import importlib
import os
import pickle
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d

FLIGHT_PREFIX = "rank_"  # of the files in --flight-recorder-dir; the rank is the rest

# torch keeps this many of its last collectives in memory.
_RECORDED_COLLECTIVES = 2000


def record_flights(folder: str) -> None:
    """Lets torch record collectives, and NCCL write them down where one times out.

    What the environment says about it already stands.
    """
    place = Path(folder).absolute()
    place.mkdir(parents=True, exist_ok=True)
    for name, value in (
        ("TORCH_FR_BUFFER_SIZE", str(_RECORDED_COLLECTIVES)),
        ("TORCH_FR_DUMP_TEMP_FILE", str(place / FLIGHT_PREFIX)),  # torch appends the rank
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
    ):
        os.environ.setdefault(name, value)


def recorded_collectives() -> bytes | None:
    """What torch's flight recorder has of this process, pickled; None without process groups."""
    if not dist.is_initialized():
        return None
    recorders = importlib.import_module("torch._C._distributed_c10d")
    if dist.get_backend() == "nccl":
        return bytes(recorders._dump_nccl_trace())
    recorded = pickle.loads(recorders._dump_fr_trace())
    # Of gloo's groups torch leaves out their names, by which its tool looks their ranks up.
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
