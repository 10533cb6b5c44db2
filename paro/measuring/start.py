"""Finds or measures the machine at the start of a run, and plans by it, where a flag says auto."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from data.atomic_file import replace_file
from model.block_attention import gpu_of
from paro.collectives.schedule import Op
from paro.config.run import RunConfig
from paro.distributed.control import Control
from paro.distributed.rendezvous import first_difference
from paro.distributed.world import read_cache_folder
from paro.errors import UserError, describe
from paro.machine.files import MEASURE, machine_to_json, read_machine
from paro.machine.machine import Machine
from paro.measuring.measure import SECONDS, algorithms_of, measure_machine, one_rank, spans_of
from paro.report.log import Log
from paro.report.memory import give_back_freed_memory
from paro.report.watchdog import Watchdog
from paro.spec.run_spec import RunSpec
from paro.text import listed, ranks_text
from paro.topology import axes_of
from paro.training.exit_signal import ExitSignal


class ExitRequestedError(Exception):
    """Error on all ranks: a signal has asked one of the ranks to end the run."""


@dataclass(eq=False, kw_only=True)
class InterruptibleControl(Control):
    """Control whose gathers raise `ExitRequestedError` on all ranks once one rank has a signal."""

    exit_signal: ExitSignal

    def gather(self, value: object) -> list[Any]:
        by_rank = super().gather((value, self.exit_signal.name))
        if names := [name for _, name in by_rank if name is not None]:
            raise ExitRequestedError(f"receiving {names[0]}")
        return [value for value, _ in by_rank]


def plan_on_this_machine(
    config: RunConfig, control: Control, watchdog: Watchdog
) -> RunConfig | None:
    """Replace values of auto in `config` by those of a plan for this machine; collective.

    Returns `config` itself if nothing is to be measured, None if a signal asks to exit meanwhile.
    `UserError` on all ranks if nothing fits, or if ranks would choose differently.
    """
    if config.open is None:
        return config
    exit_signal = ExitSignal()
    try:
        with exit_signal.caught(config.train):
            gathering = InterruptibleControl(**vars(control), exit_signal=exit_signal)
            machine = find_measured(config, gathering, watchdog)
    except ExitRequestedError as reason:
        log = Log(rank=control.world.rank, world_size=control.world.size)
        where = "while its machine was measured, before it trained"
        log.log0(f"[exiting program after {reason} {where}] datetime: {datetime.now()}")
        return None
    watchdog.begins("planning", 0)
    with control.raise_on_all_ranks():
        config = config.on_measured(machine)
    bits = config.precision.inter_param_bits, config.precision.inter_grad_bits
    chosen = {"--paro-strategy": config.strategy.name, "--paro-inter-bits": str(bits)}
    by_rank = dict(enumerate(control.gather(chosen)))
    if any(choice != chosen for choice in by_rank.values()):
        raise UserError(f"{first_difference(by_rank)}, by the same plan: give the flag a value")
    return config


def find_measured(config: RunConfig, control: Control, watchdog: Watchdog) -> Machine:
    """Return the machine from an earlier start's file, or measure it now; collective."""
    log = Log(rank=control.world.rank, world_size=control.world.size)
    depends_on = conditions(config, control)
    # Machine files are kept with the run's checkpoints, else with the user's caches.
    path = (config.save_folder or read_cache_folder()) / f"{file_stem(depends_on)}.json"
    machine: Machine | None = None
    if control.world.rank == 0 and config.arguments["paro_machine"] != MEASURE:
        machine = earlier_machine(path, partial(misfit, config.spec, depends_on), log.log0)
    machine = control.gather(machine)[0]
    if machine is not None:
        return machine

    def say(what: str) -> None:
        watchdog.begins(f"measuring {what}", 0)
        log.log0(f"> measuring this machine, about {SECONDS:.0f} s: {what}")

    begin = time.monotonic()
    source = f"measured at the start of a run: {listed([*map(str, depends_on.values())][:6])}"
    machine = measure_machine(config, control, name=path.stem, source=source, say=say)
    machine = replace(machine, conditions=depends_on)
    _forget(control.device)
    took = time.monotonic() - begin
    if control.world.rank == 0:
        log.log0(f"> measured in {took:.0f} s: {write_machine(path, machine)}")
    return machine


def conditions(config: RunConfig, control: Control) -> dict[str, str]:
    """Return everything on which a measurement depends, equal on all ranks; collective."""
    device = control.device
    on_gpu = device.type == "cuda"
    kind = torch.cuda.get_device_name(device) if on_gpu else f"CPU, {platform.machine()}"
    share = f"{len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads"
    hosts = control.gather((platform.node(), kind, share))
    alone, world = one_rank(config), config.world
    return {
        "ranks": ranks_text(world.size, world.group_size),
        "hosts": f"hosts {', '.join(dict.fromkeys(host for host, *_ in hosts))}",
        "device": ", ".join(dict.fromkeys(kind for _, kind, _ in hosts)),
        "torch": f"torch {torch.__version__}",
        "backend": config.runtime.distributed_backend,
        "collectives": ", ".join(algorithms_of(config.spec)),
        "launch_order": config.runtime.paro_nccl_launch_order
        + ", copy engine" * config.runtime.paro_nccl_copy_engine,
        "places": str(hosts),
        "model": str(alone.model),
        "tokens": f"{alone.batches.micro_batch_size} x {alone.data.seq_length} of "
        f"{config.data.seq_length}",
        "types": f"{asdict(alone.precision)}, {alone.fusions}, {alone.optim.adam_implementation}",
        "materialize": config.sharding.materialize,
        "cudnn": str(gpu_of(device).cudnn) if on_gpu else "none",
    }


def file_stem(depends_on: dict[str, str]) -> str:
    """Return the name of the machine file for the conditions of a measurement."""
    return f"machine-{hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()[:12]}"


def earlier_machine(
    path: Path, misfit: Callable[[Machine], str | None], say: Callable[[str], None]
) -> Machine | None:
    """Read the machine of an earlier start from `path` or its folder; None if there is none.

    The content of a file decides, not the name; `misfit` says why a file cannot be used.
    """
    for file in (path, *sorted({*path.parent.glob("*.json")} - {path})):
        try:
            age = timedelta(seconds=max(0, round(time.time() - file.stat().st_mtime)))
            machine = read_machine(file)
        except FileNotFoundError:
            continue
        except (OSError, UserError) as error:
            why: str | None = describe(error)
        else:
            why = misfit(machine)
        if why is None:
            say(f"> machine file {file}, {age} old, is of these ranks and flags: taken again")
            return machine
        if file == path:
            say(f"> {path} is measured again: {why}")
    return None


def misfit(run: RunSpec, depends_on: Mapping[str, str], machine: Machine) -> str | None:
    """Say why `machine` does not hold for this run; None if it holds."""
    if (machine.world_size, machine.group_size) != (run.world_size, run.group_size):
        return f"it is of {ranks_text(machine.world_size, machine.group_size)}"
    earlier = machine.conditions
    for name, now in depends_on.items():
        if earlier.get(name) != now:
            before = earlier.get(name, "not in the file")
            return f"its conditions.{name} is {before}, and here it is {now}"
    measured = {(row.axes, row.op, row.algorithm) for row in machine.measured}
    for span, op, name in product(spans_of(run), Op, algorithms_of(run)):
        if (axes_of(span), op, name) not in measured:
            return f"it has no {op.value} over {axes_of(span).value} axes by {name}"
    return "it has no device" if machine.device is None else None


def write_machine(path: Path, machine: Machine) -> str:
    """Write the machine file for the next start; return a line about it, also about an error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, machine_to_json(machine))
    except OSError as error:
        return f"the next start measures again, {path} cannot be written: {describe(error)}"
    return f"machine file {path}, which --paro-machine takes"


def _forget(device: torch.device) -> None:
    """Free the memory of the measurement, and reset the peak, which counts for the run alone."""
    give_back_freed_memory()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of resident memory
