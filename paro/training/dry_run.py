"""The dry run: what one rank would hold, compute, send and read, without starting the launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paro.arguments.parser import given
from paro.config.record import recorded_arguments
from paro.config.run import RunConfig
from paro.errors import UserError
from paro.planning.search.description import bits_text, describe, describe_launch, describe_time
from paro.planning.search.planner import TIE, SearchResult
from paro.planning.search.planner import plan as search
from paro.planning.search.remedies import why_nothing_fits
from paro.planning.search.traffic import sent_per_step
from paro.report.log import Log
from paro.report.log_line import arguments_block
from paro.text import count_text, size_text
from paro.training.dry_run_sections import SECTIONS
from paro.training.memory_check import plan_of, remedy_of
from paro.training.planned_run import PlannedRun, plan_run


def run_dry(config: RunConfig) -> None:
    """Prints a summary and the details; `UserError` if the launch would fail."""
    plan = plan_run(config)
    found = None if plan.workload is None or plan.launch is None else search(plan.workload)
    details: list[str] = []
    mistakes: list[str] = []
    for section in SECTIONS:
        try:
            for line in section(plan):
                details.append(line)
        except UserError as mistake:
            mistakes.append(str(mistake))
    if not plan.fits:
        mistakes.append(_why_not(plan, found))
    log = Log()
    recorded = recorded_arguments(config)
    for line in (
        *_answer(plan, found, mistakes),
        arguments_block({name: recorded[name] for name in given(config.given)}),
        "> all other arguments have their defaults",
        *config.notices,
        *details,
        *_planner(plan, found),
    ):
        log.log0(line)
    if mistakes:
        raise UserError("; ".join(mistakes))


# The summary


def _answer(plan: PlannedRun, found: SearchResult | None, mistakes: Sequence[str]) -> Iterator[str]:
    """The first lines: does it start, does it fit, what does it send, how long is a step."""
    world, backend = plan.config.world, plan.config.runtime.distributed_backend
    ranks = count_text(world.size, "rank")
    nodes = count_text(world.num_nodes, "node")
    yield f"> dry run of {ranks} on {nodes} of {world.ranks_per_node}, {backend}"
    for mistake in mistakes:
        yield f"> the launch would fail: {mistake}"
    if not mistakes:
        yield "> the launch is sound; nothing was started and nothing written"
    yield f"> memory of a rank: {size_text(plan.memory.total)} at most, at {plan.memory.name}"
    if plan.device_bytes is None:
        yield "> --device-memory-gb GB, or --paro-machine NAME, would say whether that fits"
    elif plan.fits:
        yield f"> fits into the {plan.device_bytes / 1e9:g} GB of a device"
    yield from _traffic(plan)
    yield from _time(plan, found)


def _traffic(plan: PlannedRun) -> Iterator[str]:
    config, run = plan.config, plan_of(plan.config, plan.training.device.type)
    sent = sent_per_step(run, plan.units, plan.num_micro_batches)
    inside, between = (size_text(size) if size else "nothing" for size in (sent.intra, sent.inter))
    yield f"> sent by a rank in a step: {inside} inside its group, {between} between groups"
    if config.sharding.collective in ("flat", "ring"):
        yield f">   axis by axis; {config.sharding.collective} sends more of it between groups"


def _time(plan: PlannedRun, found: SearchResult | None) -> Iterator[str]:
    machine, launch = plan.config.sharding.machine, plan.launch
    if machine is None:
        yield "> --paro-machine NAME would say how long a step takes, and what is faster"
    elif machine.device is None:
        yield f"> machine {machine.name} names no device, without which no step can be timed"
    elif launch is None:
        yield "> steps that train nothing are not timed"
    else:
        yield f"> a step on machine {machine.name} {describe_time(launch)}"
        if plan.config.context.context_parallel_size > 1:
            yield ">   without what attention waits for among the ranks that share a sample"
        if plan.other_bits is not None:
            yield f"> {bits_text(launch, plan.other_bits)}"
        best = None if found is None else found.best
        gain = 0.0 if best is None else launch.seconds / best.seconds - 1
        if best is not None and gain > TIE:
            yield f"> {gain:.1%} faster there, and it fits: {best.candidate.describe()}"
        elif plan.fits:
            yield f"> of {_candidates(found)} none that fits is faster there"


def _candidates(found: SearchResult | None) -> str:
    assert found is not None, "a launch that is timed was searched for"
    return f"{found.num_candidates} candidates, which differ in {found.searched},"


def _why_not(plan: PlannedRun, found: SearchResult | None) -> str:
    """How much memory a launch that does not fit needs, and what would make it fit."""
    assert plan.device_bytes is not None, "it fits"
    if found is not None and plan.workload is not None and found.best is None:
        return why_nothing_fits(plan.workload, found)
    gigabytes, workload = plan.config.launch.device_memory_gb, plan.workload
    whose = f"the {plan.device_bytes / 1e9:g} GB of a device"
    if workload is not None:
        whose += f" of {workload.machine.name}"
    if gigabytes is not None:
        whose = f"--device-memory-gb {gigabytes:g}"
    limit, device = plan.device_bytes, plan.training.device.type
    advice = remedy_of(plan.config, device, lambda other: other.total <= limit)
    if found is not None and found.best is not None:
        advice += f"; the fastest that fits is {found.best.candidate.describe()}"
    return (
        f"a rank needs {size_text(plan.memory.total)} at {plan.memory.name}, more than "
        f"{whose}: {advice}"
    )


def _planner(plan: PlannedRun, found: SearchResult | None) -> Iterator[str]:
    """Where the launch spends its time on --paro-machine, and what would be faster there."""
    if plan.launch is None or found is None:
        return
    yield f"> plan: {describe_launch(plan.launch)}"
    for line in describe(found, chose="of all candidates that fit the best is"):
        yield f"> {line}"
