"""Calls the planner for the configuration: --paro-machine and --paro-strategy auto."""

from __future__ import annotations

from collections.abc import Sequence

from model.config import LlamaConfig
from paro.config.batch_schedule import BatchSchedule
from paro.config.sharding import ShardingConfig
from paro.distributed.world import World
from paro.errors import UserError
from paro.planning.machine.files import find_machine
from paro.planning.machine.machine import Machine
from paro.planning.search.description import describe
from paro.planning.search.planner import SearchResult, plan
from paro.planning.search.remedies import why_nothing_fits
from paro.planning.search.search_space import Materialize, SearchSpace, Workload
from paro.precision import PrecisionConfig
from paro.strategy import FLAG, Strategy

AUTO = "auto"


def take_machine(text: str | None, world: World, group_size: int) -> Machine | None:
    """The machine of --paro-machine (a name or a file), scaled to this world size.

    `UserError` if it was measured on other ranks or its groups do not nest with ours.
    """
    if text is None:
        return None
    machine = find_machine(text)
    if machine.measured and (machine.world_size, machine.group_size) != (world.size, group_size):
        raise UserError(
            f"--paro-machine {text} was measured on {machine.world_size} ranks in groups of "
            f"{machine.group_size}, this run has {world.size} in groups of {group_size}: measure "
            "it here with tools/bench_collectives.py --machine-file"
        )
    machine = machine.for_world(world.size, subject="--paro-machine")
    small, large = sorted((group_size, machine.group_size))
    if large % small != 0:
        raise UserError(
            f"--paro-machine {text} has groups of {machine.group_size}, which do not nest with "
            f"--paro-group-size {group_size}: choose {machine.group_size}, or one that divides it"
        )
    return machine


def case_of(
    model: LlamaConfig,
    batches: BatchSchedule,
    sharding: ShardingConfig,
    precision: PrecisionConfig,
    *,
    seq_length: int,
    device_type: str,
    memory_gb: float | None,
) -> Workload:
    """The planner's workload for this run; `UserError` without --paro-machine.

    Devices have `memory_gb` of memory (GB) if given, else the machine's own.
    """
    if sharding.machine is None:
        raise UserError(
            f"{FLAG} {AUTO} plans for a machine: give --paro-machine, a shipped name or a file "
            "that tools/bench_collectives.py --machine-file wrote"
        )
    return Workload(
        model=model,
        machine=sharding.machine,
        group_size=sharding.group_size,
        seq_length=seq_length,
        micro_batch_size=batches.micro_batch_size,
        global_batch_size=batches.global_batch_size,
        precision=precision,
        prefetch_units=sharding.prefetch_units,
        collective=sharding.collective,
        materialize=Materialize.of_flags(sharding.materialize, sharding.rotate_in_place),
        device_type=device_type,
        memory_bytes=None if memory_gb is None else round(memory_gb * 1e9),
    )


def choose_strategy(workload: Workload) -> tuple[Strategy, Sequence[str]]:
    """The fastest strategy that fits with all other flags as given, and log lines that explain it.

    `UserError` if no strategy fits.
    """
    found: SearchResult = plan(
        workload,
        SearchSpace(
            micro_batch_sizes=(workload.micro_batch_size,),
            collectives=(workload.collective,),
            recomputes=(workload.model.recompute,),
        ),
    )
    if found.best is None:
        raise UserError(f"{FLAG} {AUTO}: {why_nothing_fits(workload, found)}")
    return found.best.candidate.strategy, describe(found)
