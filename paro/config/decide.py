"""Decides what resolved flags leave to the planner: ranks that share a sample, strategy, bits."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from paro.config.batch_schedule import BatchSchedule
from paro.config.context_parallel import ContextParallelConfig
from paro.config.context_search import choose
from paro.config.elastic import nodes_line
from paro.config.inter_bits import inter_bits_notices, take_inter_bits
from paro.config.plan import Taken, Task, case_of
from paro.config.sharding import ShardingConfig
from paro.errors import UserError
from paro.machine.machine import Machine
from paro.planning.search.description import bits_text, describe
from paro.planning.search.estimator import Estimator
from paro.planning.search.planner import SearchResult, plan
from paro.planning.search.remedies import why_nothing_fits
from paro.planning.search.search_space import SearchSpace, Workload
from paro.precision import PrecisionConfig
from paro.strategy import FLAG, Strategy, parse_strategy


class Question(NamedTuple):
    """What resolved flags leave to the planner, and what it needs to know of the run."""

    task: Task
    taken: Taken
    # The ways to share samples with their batches, by micro-batch size.
    sharings: dict[tuple[ContextParallelConfig, int], BatchSchedule]
    flag: str | None  # of these, which says auto
    searches: bool = False  # whether the planner chooses among them
    lines: tuple[str, ...] = ()  # for the log


class Decision(NamedTuple):
    """The answer: fields of a RunConfig, log lines, and values of flags that said auto."""

    sharding: ShardingConfig
    strategy: Strategy
    precision: PrecisionConfig
    batches: BatchSchedule
    lines: tuple[str, ...]
    flags: dict[str, object]


def decide(question: Question) -> Decision:
    """What the planner chooses, all else as given; `UserError` if nothing fits.

    Until the machine is measured, auto stands for what no other flag refuses.
    """
    task, (sharding, strategy, told, is_unmeasured) = question.task, question.taken
    (context, batches), lines = _shared(question)
    sharding, world = replace(sharding, context=context), sharding.world
    flags = context.flags | {"micro_batch_size": batches.micro_batch_size} if question.flag else {}
    lines += told
    if sharding.elastic:
        lines += nodes_line(batches, world, context.context_parallel_size)
    sharding, precision, told = take_inter_bits(sharding, task.precision)
    lines += told
    if is_unmeasured:
        strategy = strategy or _unplanned(sharding)
        return Decision(sharding, strategy, precision, batches, lines, flags)
    if strategy is None or sharding.inter_bits is not None:
        workload = case_of(task._replace(precision=precision), batches, sharding)
        strategy, precision, told = _chosen(workload, strategy)
        lines += told
    if sharding.inter_bits is None:
        lines += inter_bits_notices(precision, world.group_size, strategy, world.size)
    return Decision(sharding, strategy, precision, batches, lines, flags)


def measured(question: Question, machine: Machine) -> Question:
    """The question of a run whose machine is now measured."""
    sharding = replace(question.taken.sharding, machine=machine)
    return question._replace(taken=question.taken._replace(sharding=sharding, is_unmeasured=False))


def _shared(
    question: Question,
) -> tuple[tuple[ContextParallelConfig, BatchSchedule], tuple[str, ...]]:
    """The ranks that share a sample, the batches with them, and log lines about a choice."""
    sharding, strategy, _, is_unmeasured = question.taken
    (way, size), batches = next(iter(question.sharings.items()))
    if question.flag is None or not question.searches or is_unmeasured:
        return (way, batches), question.lines
    space = SearchSpace(
        strategies=None if strategy is None else (strategy,),
        collectives=(sharding.collective,),
        recomputes=(question.task.model.recompute,),
    )
    workload = case_of(question.task, batches, replace(sharding, context=way))
    way, size, lines = choose(question.flag, workload, question.sharings, space)
    return (way, question.sharings[way, size]), lines


def _unplanned(sharding: ShardingConfig) -> Strategy:
    """What stands for a strategy until it is chosen: it rotates or not, and survives."""
    letters = "III" if sharding.materialize == "rotate" else "NNN"
    world = sharding.world
    return parse_strategy(letters, world_size=world.size, group_size=world.group_size)


def _chosen(
    workload: Workload, strategy: Strategy | None
) -> tuple[Strategy, PrecisionConfig, tuple[str, ...]]:
    """The fastest strategy that fits, unless one is given, its bits, and lines that explain them.

    `UserError` if no strategy fits.
    """
    if strategy is not None:
        own, other = Estimator(workload).estimate_bits(workload.candidate(strategy))
        lines = () if other is None else (f"planner: {bits_text(own, other)}",)
        return strategy, own.precision, lines
    found: SearchResult = plan(workload, workload.as_given())
    if found.best is None:
        raise UserError(f"{FLAG} auto: {why_nothing_fits(workload, found)}")
    return found.best.candidate.strategy, found.best.precision, describe(found)
