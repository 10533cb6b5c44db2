"""Starts and stops torch.distributed, picks the device, seeds; alone reads the environment."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from paro.mistakes import MistakesError
from paro.rendezvous import fresh_store


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process among all; read from torchrun's or SLURM's environment, or one process alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    ranks_per_node: int = 1


DEFAULT_RANKS_PER_NODE = 8  # of a dry run: a DGX
FLIGHT_PREFIX = "rank_"  # of the files in --flight-recorder-dir; the rank is the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """How ranks talk to each other."""

    distributed_backend: str = "nccl"  # or "gloo": CPU ranks
    distributed_timeout_minutes: int = 10
    flight_recorder_dir: str | None = None

    def __post_init__(self) -> None:
        if self.distributed_timeout_minutes <= 0:
            raise ValueError(
                f"--distributed-timeout-minutes {self.distributed_timeout_minutes} must be positive"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """The ranks of a dry run, which starts none; those of a real run are its launcher's affair."""

    dry_run: bool = False
    world_size: int | None = None
    ranks_per_node: int | None = None
    device_memory_gb: float | None = None

    def __post_init__(self) -> None:
        if not self.dry_run:
            for flag, value in self._given().items():
                if value is not None:
                    raise ValueError(
                        f"{flag} {value} is for --dry-run, which starts no rank: the ranks of a "
                        "training are those that torchrun or srun starts"
                    )
            return
        assert self.world_size is not None, "one of the flags that are needed"
        for flag, value in self._given().items():
            if value is not None and not value > 0:
                raise ValueError(f"{flag} {value} must be positive")
        if self.world_size % self._ranks_per_node():
            raise ValueError(
                f"--world-size {self.world_size} is no multiple of the {self._ranks_per_node()} "
                "ranks of a node: give --ranks-per-node, or another number of ranks"
            )

    def world(self) -> World:
        """The first rank among those of the dry run, or this one among those that were started."""
        if not self.dry_run:
            return read_world()
        assert self.world_size is not None, "a dry run has a world size"
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ValueError(
                "--dry-run is one plain process, here are "
                f"{os.environ['WORLD_SIZE']}: start it with python instead of torchrun"
            )
        return World(size=self.world_size, ranks_per_node=self._ranks_per_node())

    def _ranks_per_node(self) -> int:
        return self.ranks_per_node or min(DEFAULT_RANKS_PER_NODE, self.world_size or 1)

    def _given(self) -> dict[str, float | None]:
        return {
            "--world-size": self.world_size,
            "--ranks-per-node": self.ranks_per_node,
            "--device-memory-gb": self.device_memory_gb,
        }


# Ranks that start together may differ by this much until they have read their flags.
_SPEAKER_SECONDS = 20.0
_LAGGARD_SECONDS = 1.0


class UserMistakeError(Exception):
    """What a user can mend; its text is the one line that they see.

    All ranks raise it alike, and local rank 0 prints it; unless `on_this_rank`, where one rank
    met it alone and the launcher has to stop the others.
    """

    def __init__(self, text: str, *, on_this_rank: bool = False) -> None:
        super().__init__(text)
        self.on_this_rank = on_this_rank


def read_world() -> World:
    """The world that the launcher describes in the environment: torchrun's names, then SLURM's."""
    by_srun = "SLURM_STEP_TASKS_PER_NODE" in os.environ and not _is_torchrun()
    if "RANK" in os.environ and not by_srun:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif "SLURM_PROCID" in os.environ and "MASTER_ADDR" in os.environ:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    elif by_srun and int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        raise ValueError(
            f"srun started {os.environ['SLURM_STEP_NUM_TASKS']} tasks and MASTER_ADDR is not set: "
            "export MASTER_ADDR=$(scontrol show hostnames | head -1) and MASTER_PORT before srun, "
            "as examples/pretrain_llama_65b_slurm.sh does"
        )
    else:
        return World()
    alone = os.environ.get(names[1]) == "1"
    needed = names if alone else (*names, "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise ValueError(f"the launcher must set {', '.join(missing)} in the environment")
    # SLURM writes tasks per node as 8(x4), or 8(x3),4 where the last node has fewer.
    rank, size, local_rank, ranks_per_node = (
        int(re.split(r"[(,]", os.environ[name])[0]) for name in names
    )
    return World(rank=rank, size=size, local_rank=local_rank, ranks_per_node=ranks_per_node)


def _is_torchrun() -> bool:
    """Whether torchrun's names are more than what a container sets beside SLURM's own.

    Those are the same numbers, without LOCAL_WORLD_SIZE.
    """
    env = os.environ
    same = (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS"))
    differ = any(name in env and env[name] != env.get(slurms) for name, slurms in same)
    return "LOCAL_WORLD_SIZE" in env or differ


def device_for(config: RuntimeConfig, world: World) -> torch.device:
    """A GPU per local rank under nccl, the CPU under gloo."""
    if config.distributed_backend == "gloo":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            "--distributed-backend nccl needs CUDA devices and torch sees none; "
            "give --distributed-backend gloo to run on CPU ranks"
        )
    if world.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {world.local_rank} has no GPU: torch sees {torch.cuda.device_count()}; "
            "start one process per GPU, and under SLURM give GPUs to the node (--gpus-per-node) "
            "instead of one to each task, so that ranks see each other's"
        )
    return torch.device("cuda", world.local_rank)


class Control:
    """Scalars, agreements and barriers among all ranks, from the training thread alone.

    They use the default process group and are not counted as traffic.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self.world = world
        self.device = device

    def sum(self, values: list[float]) -> list[float]:
        """Each value summed over the ranks, in fp64; every rank gets the same bits."""
        if self.world.size == 1:
            return values
        on_device = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(on_device)
        return [float(value) for value in on_device.tolist()]

    def barrier(self) -> None:
        if self.world.size > 1:
            self.sum([0.0])

    def gather(self, value: object) -> list[Any]:
        """What every rank passed, by rank; for small things at the start of a run."""
        if self.world.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world.size
        dist.all_gather_object(gathered, value)
        return gathered

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Runs a block that a user's mistake may stop on any rank: then it stops on all.

        `ValueError` and `OSError` are a user's; every rank raises the first failing rank's text.
        """
        mistake: str | None = None
        try:
            yield
        except (ValueError, OSError) as error:
            mistake = one_line(error)
        first = next((text for text in self.gather(mistake) if text is not None), None)
        if first is not None:
            raise UserMistakeError(first)


class PlannedControl(Control):
    """Among ranks that nobody started: all of them are taken to say what this one does."""

    def sum(self, values: list[float]) -> list[float]:
        return [value * self.world.size for value in values]

    def gather(self, value: object) -> list[Any]:
        return [value] * self.world.size


@contextmanager
def user_mistakes() -> Iterator[None]:
    """Turns what a user can mend into their one line, before there are any peers."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UserMistakeError(one_line(error)) from error


def read_job_id() -> str:
    """SLURM's number of this job; empty where there is none."""
    return os.environ.get("SLURM_JOB_ID", "")


# torch keeps this many of its last collectives in memory.
_RECORDED_COLLECTIVES = 2000


def _record_flights(folder: str) -> None:
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


def _store_of_this_attempt(world: World, timeout: timedelta) -> dist.Store | None:
    """Where the ranks of a torchrun that restarts find each other; else None: torch's own way."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
    return fresh_store(store, rank=world.rank, world_size=world.size, timeout=timeout)


@contextmanager
def distributed(config: RuntimeConfig, world: World) -> Iterator[Control]:
    """The process group of a run, for as long as the block lasts; none for one process."""
    with user_mistakes():
        device = device_for(config, world)
        if config.flight_recorder_dir is not None:
            _record_flights(config.flight_recorder_dir)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world.size > 1:
        dist.init_process_group(
            config.distributed_backend,
            store=_store_of_this_attempt(world, timeout_of(config)),
            rank=world.rank,
            world_size=world.size,
            timeout=timeout_of(config),
            device_id=device if device.type == "cuda" else None,
        )
    control = Control(world, device)
    yield control
    # Only after a run that ended well: with a dead peer this would hang. A gloo group is left to
    # the end of the process: its destructor, which holds Python's lock, now and then waits for ever
    # for a thread of its own that wants the lock to drop its last tensor (torch 2.13).
    if world.size > 1:
        control.barrier()
        if device.type == "cuda":
            dist.destroy_process_group()


def timeout_of(config: RuntimeConfig) -> timedelta:
    """After how long a collective gives up on a peer."""
    return timedelta(minutes=config.distributed_timeout_minutes)


def seed_everything(seed: int) -> None:
    """Seeds what libraries may draw from; model and data have generators of their own."""
    random.seed(seed)
    torch.manual_seed(seed)


def one_line(error: BaseException) -> str:
    """What an error says without its line breaks; of several mistakes each keeps its line."""
    if isinstance(error, MistakesError):
        return str(error)
    return " ".join(str(error).split()) or type(error).__name__


def run_script(name: str, main: Callable[[], None]) -> NoReturn:
    """Runs an entry script and exits: 0, or 2 after a user's mistake, or 1 after any failure.

    A mistake is one line, printed by local rank 0, and once more in torchrun's report at the end;
    so is Ctrl-C, with 130. The process leaves at once in any case: after a failure threads may hang
    in a collective with a peer that is gone, and after a good end the interpreter's own tear-down
    now and then aborts among the threads of gloo.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0)))
    try:
        main()
    except UserMistakeError as mistake:
        line = f"{name}: error: {mistake}"
        _write_for_torchrun(line)
        if local_rank != 0 and not mistake.on_this_rank:
            _wait_for_the_speaker()
        else:
            print(line, file=sys.stderr, flush=True)
            if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1 and not mistake.on_this_rank:
                time.sleep(_LAGGARD_SECONDS)  # so that the others come to the mistake too
        _leave(2)
    except KeyboardInterrupt:
        if local_rank == 0:
            print(f"{name}: interrupted", file=sys.stderr, flush=True)
        _leave(130)
    except SystemExit as leaving:
        _leave(leaving.code if isinstance(leaving.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        _leave(1)
    _leave(0)


def _write_for_torchrun(line: str) -> None:
    """Writes the file from which torchrun takes what its report says of a rank that failed."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))


def _wait_for_the_speaker() -> None:
    """Gives local rank 0 the time to come to the mistake and print it.

    A launcher ends all ranks as soon as one has left; then this one leaves with the same status.
    """
    signal.signal(signal.SIGTERM, lambda *_: _leave(2))
    time.sleep(_SPEAKER_SECONDS)


def _leave(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
