"""Profiles of chosen iterations and ranks, and CUDA memory history, by Megatron's flags."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

import torch

from paro.distributed.timers import record_ranges
from paro.errors import UserError, describe
from paro.files.atomic_file import replace_file
from paro.report.earlier import set_aside
from paro.report.log import Log
from paro.report.watchdog import Observer


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """Megatron's profiling flags."""

    profile: bool = False
    use_pytorch_profiler: bool = False
    profile_step_start: int = 10
    profile_step_end: int = 12
    profile_ranks: tuple[int, ...] = (0,)
    record_memory_history: bool = False
    memory_snapshot_path: str = "snapshot.pickle"

    def __post_init__(self) -> None:
        if not 0 <= self.profile_step_start < self.profile_step_end:
            raise UserError(
                f"--profile-step-start {self.profile_step_start} must be below --profile-step-end "
                f"{self.profile_step_end}, and not below 0"
            )
        if self.use_pytorch_profiler and not self.profile:
            raise UserError("--use-pytorch-profiler needs --profile")


class Profiler(Observer):
    """Profiler of iterations start + 1 to end on the selected ranks.

    torch's profiler writes a trace for chrome://tracing and TensorBoard. Without it the range is
    marked for an external profiler: nsys profile --capture-range cudaProfilerApi.
    """

    def __init__(self, config: ProfileConfig, log: Log, *, folder: str | None) -> None:
        self._config = config
        self._log = log
        self._folder = folder
        self._is_here = config.profile and log.rank in config.profile_ranks
        if self._is_here and not config.use_pytorch_profiler and not torch.cuda.is_available():
            log.show("--profile has no effect without a GPU: add --use-pytorch-profiler")
            self._is_here = False
        self._profile: torch.profiler.profile | None = None
        self._running = False

    def begins(self, what: str, iteration: int) -> None:
        if not self._is_here or what != "training":
            return
        if iteration == self._config.profile_step_start:
            self._start()
        elif iteration == self._config.profile_step_end:
            self._stop(iteration)
        elif self._profile is not None:
            self._profile.step()  # marks ProfilerStep#N, which trace viewers look for

    def ends(self) -> None:
        self._stop(self._config.profile_step_end)

    def _start(self) -> None:
        self._running = True
        if not self._config.use_pytorch_profiler:
            torch.cuda.profiler.start()
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(
            activities=activities,
            schedule=lambda _: torch.profiler.ProfilerAction.RECORD,  # step marks need a schedule
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        )
        record_ranges(True)
        self._profile.start()

    def _stop(self, iteration: int) -> None:
        if not self._running:
            return
        self._running = False
        if self._profile is None:
            torch.cuda.profiler.stop()
            return
        self._profile.stop()
        record_ranges(False)
        assert self._folder is not None, "a profile without a place"
        name = f"rank{self._log.rank}.steps{self._config.profile_step_start}-{iteration}"
        path = Path(self._folder) / f"{name}.pt.trace.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            set_aside(path)
            self._profile.export_chrome_trace(str(path))
            self._log.show(f"[Rank {self._log.rank}] profile written to {path}")
        except (OSError, RuntimeError) as error:
            self._log.show(f"[Rank {self._log.rank}] the profile is lost: {describe(error)}")
        self._profile = None


class MemoryHistory(Observer):
    """History of a GPU's allocations; written at saves, at out-of-memory and at the end."""

    def __init__(self, config: ProfileConfig, log: Log, device: torch.device) -> None:
        here = config.record_memory_history and log.rank in config.profile_ranks
        self._is_on = here and device.type == "cuda"
        if here and not self._is_on:
            log.show("--record-memory-history has no effect without a GPU")
        self._log = log
        self._is_ours = False  # True: this start wrote the file
        name = Path(config.memory_snapshot_path)
        # One file per rank.
        self._place = name if log.rank == 0 else name.with_name(f"rank{log.rank}.{name.name}")
        if self._is_on:
            # Not of frees: their stacks are taken while the exception is set by which torch ends a
            # recomputation early, and it is lost.
            torch.cuda.memory._record_memory_history(context="alloc")
            attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
            if attach is not None:
                attach(lambda *_: self._write())

    def begins(self, what: str, iteration: int) -> None:
        if self._is_on and what == "saving":
            self._write()

    def ends(self) -> None:
        if self._is_on:
            self._write()
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self) -> None:
        try:
            self._place.parent.mkdir(parents=True, exist_ok=True)
            if not self._is_ours:
                set_aside(self._place)
            self._is_ours = True
            replace_file(self._place, pickle.dumps(torch.cuda.memory._snapshot()))
        except OSError as error:
            self._log.show(f"[Rank {self._log.rank}] no memory snapshot: {describe(error)}")
