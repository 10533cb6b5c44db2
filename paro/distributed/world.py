"""All ranks and this rank, from the launcher's environment or a dry run's flags."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from paro.errors import UserError, check_positive, flag_of
from paro.topology import MOST_RANKS, Topology, count_nodes, make_topology


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All ranks, their groups and nodes, and this process among them.

    Ranks of a node and of a group are neighbours. The defaults are a single process.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    ranks_per_node: int = 1
    group: int | None = None  # number of ranks joined by fast links; None: all ranks of a node

    @property
    def group_size(self) -> int:
        return self.ranks_per_node if self.group is None else self.group

    @property
    def num_nodes(self) -> int:
        return count_nodes(self.size, self.ranks_per_node)

    def topology(self, *degrees: int) -> Topology:
        """Return the topology: the axes between sharding degrees, in the groups of this world."""
        return make_topology(world_size=self.size, group_size=self.group_size, degrees=degrees)


DEFAULT_RANKS_PER_NODE = 8  # default of a dry run: the GPUs of a DGX


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """The ranks that a dry run plans for; in a real run the launcher sets the ranks."""

    dry_run: bool = False
    world_size: int | None = None
    ranks_per_node: int | None = None
    device_memory_gb: float | None = None
    show_step: bool = False

    def __post_init__(self) -> None:
        if not self.dry_run:
            if self.show_step:
                raise UserError("--show-step is for --dry-run --world-size N: give both")
            for name, value in self._given().items():
                if value is not None:
                    flag = flag_of(name)
                    raise UserError(
                        f"{flag} {value} is for --dry-run, which starts no rank: the ranks of a "
                        "training are those that torchrun or srun starts"
                    )
            return
        assert self.world_size is not None, "one of the flags that are needed"
        check_positive(**self._given())
        if self.world_size > MOST_RANKS:
            raise UserError(f"--world-size {self.world_size} must be at most {MOST_RANKS}")

    def world(self, default_ranks_per_node: int = DEFAULT_RANKS_PER_NODE) -> World:
        """Return the world of a dry run, as rank 0, or the launcher's; `UserError` if invalid."""
        if not self.dry_run:
            return read_world()
        assert self.world_size is not None, "a dry run has a world size"
        if "WORLD_SIZE" in os.environ and _number_in("WORLD_SIZE") > 1:
            raise UserError(
                "--dry-run is one plain process, here are "
                f"{os.environ['WORLD_SIZE']}: start it with python instead of torchrun"
            )
        ranks_per_node = self.ranks_per_node or min(default_ranks_per_node, self.world_size)
        if self.world_size % ranks_per_node:
            raise UserError(
                f"--world-size {self.world_size} is no multiple of the {ranks_per_node} ranks of a "
                "node: give --ranks-per-node, or another number of ranks"
            )
        return World(size=self.world_size, ranks_per_node=ranks_per_node)

    def _given(self) -> dict[str, float | None]:
        return {
            "world_size": self.world_size,
            "ranks_per_node": self.ranks_per_node,
            "device_memory_gb": self.device_memory_gb,
        }


def read_world() -> World:
    """Return the world from torchrun's or SLURM's variables; `UserError` if some are missing."""
    by_srun = "SLURM_STEP_TASKS_PER_NODE" in os.environ and not _is_torchrun()
    if "RANK" in os.environ and not by_srun:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif "SLURM_PROCID" in os.environ and "MASTER_ADDR" in os.environ:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    elif by_srun and os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        raise UserError(
            f"srun started {os.environ['SLURM_STEP_NUM_TASKS']} tasks and MASTER_ADDR is not set: "
            "export MASTER_ADDR=$(scontrol show hostnames | head -1) and MASTER_PORT before srun, "
            "as examples/pretrain_llama_65b_slurm.sh does"
        )
    elif not by_srun and os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']!r} in the environment and RANK is not set: "
            "start with torchrun or srun, or unset WORLD_SIZE"
        )
    else:
        return World()
    alone = os.environ.get(names[1]) == "1"
    needed = names if alone else (*names, "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not os.environ.get(name)]
    if missing:
        raise UserError(f"the launcher must set {', '.join(missing)} in the environment")
    rank, size, local_rank, ranks_per_node = map(_number_in, names)
    _check_below(names[0], rank, names[1], size)
    if names[2] == "LOCAL_RANK":  # SLURM: tasks of the first node
        _check_below(names[2], local_rank, names[3], ranks_per_node)
    if not alone:
        read_address()
    return World(rank=rank, size=size, local_rank=local_rank, ranks_per_node=ranks_per_node)


def world_or_alone() -> World:
    """Return the world, or a single process if the environment is wrong (reported elsewhere)."""
    try:
        return read_world()
    except UserError:
        return World()


def read_address() -> tuple[str, int]:
    """Return the address at which ranks meet; `UserError` unless the port is one."""
    text = os.environ["MASTER_PORT"]
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 0 < int(text) < 2**16:
        raise UserError(f"MASTER_PORT is {text!r} in the environment: give a port, 1 to 65535")
    return os.environ["MASTER_ADDR"], int(text)


def local_rank_to_print() -> int:
    """Return the local rank; 0 if the environment holds none or an invalid one."""
    text = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", ""))
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0


def is_started_by_agent() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launcher_ends_ranks() -> bool:
    """Return whether a launcher ends the other ranks as soon as one has left."""
    return is_started_by_agent() or "SLURM_STEP_ID" in os.environ


def has_agent_store() -> bool:
    """Return whether torchrun's own store is at MASTER_ADDR; otherwise rank 0 opens a store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def read_error_file() -> str:
    """Return the file from which torchrun reports a failed rank; empty without torchrun."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE", "")


def _check_below(name: str, number: int, limit_name: str, limit: int) -> None:
    if limit < 1:
        raise UserError(f"{limit_name} is {limit} in the environment: it must be 1 or more")
    if number >= limit:
        raise UserError(
            f"{name} is {number} and {limit_name} {limit} in the environment: ranks count from 0 "
            f"to {limit - 1}",
            on_this_rank=True,
        )


def _number_in(name: str) -> int:
    """Return the number in a variable; for SLURM the first number, as in 8(x4) or 8(x3),4."""
    text = os.environ[name]
    pattern = r"([0-9]{1,9})(\(x|,|$)" if name.startswith("SLURM_") else r"([0-9]{1,9})$"
    number = re.match(pattern, text)
    if number is None:
        raise UserError(
            f"{name} is {text!r} in the environment, and not a number", on_this_rank=True
        )
    return int(number[1])


def _is_torchrun() -> bool:
    """Return whether torchrun set the variables, not a container under SLURM.

    A container sets the same numbers as SLURM and no LOCAL_WORLD_SIZE.
    """
    env = os.environ
    same = (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS"))
    differ = any(name in env and env[name] != env.get(slurms) for name, slurms in same)
    return "LOCAL_WORLD_SIZE" in env or differ


def read_rendezvous_id() -> str:
    """Return torchrun's --rdzv-id, which survives restarts; empty if it is "none"."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if run_id == "none" else run_id


def read_cache_folder() -> Path:
    """Return the folder of this user for files that a later start reuses."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(caches) / "llama-paro"


def read_job_id() -> str:
    """Return the SLURM job ID; empty outside SLURM."""
    return os.environ.get("SLURM_JOB_ID", "")
