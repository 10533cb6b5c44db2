"""Resolves flags: what checkpoints, ranks and the planner decide where flags leave it open."""

# Each decides once, in this order, and says so in a line of the log:
#
#   1. With --use-checkpoint-args the sizes, the tokenizer and Muon's settings are those of --load.
#   2. A run that continues on as many ranks keeps the strategy and the bits chosen for it.
#   3. With --paro-elastic groups, degrees and collectives become what these ranks can have.
#   4. --paro-machine has the groups, unless --paro-group-size gives them (paro/config/plan.py).
#   5. auto of context parallelism: as in a run that continues, or without a machine by heads.
#   6. The rest is the planner's (`decide`). Where it needs a machine that is not measured yet,
#      the answer is a stand-in, and the question stays open (`RunConfig.open`).

from __future__ import annotations

from argparse import Namespace
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from paro.arguments.megatron import changed_parts, ignored_lines
from paro.arguments.needed import missing_flags
from paro.arguments.parser import take
from paro.checkpoint.config import CheckpointConfig
from paro.config.checkpoint import (
    keeping_choice,
    resumed_arguments,
    saved_common,
    with_checkpoint_args,
    with_saved_muon,
)
from paro.config.checks import flags_without_effect
from paro.config.context_parallel import (
    ContextParallelConfig,
    data_parallel_size_of,
    take_context,
    without_machine,
)
from paro.config.context_search import (
    SIZE,
    auto_flag,
    choose,
    requested_options,
    requested_types,
    with_batches,
)
from paro.config.elastic import nodes_line
from paro.config.fitting import with_values
from paro.config.inter_bits import inter_bits_notices, take_inter_bits
from paro.config.parts import take_batches
from paro.config.plan import ShardingFlags, TrainingTask, check_measurable, plan_request_of
from paro.config.sharding import ShardingConfig
from paro.distributed.world import World
from paro.errors import UserError, check_multiple
from paro.machine.files import MEASURE
from paro.machine.machine import Machine
from paro.planning.description import bits_text, describe
from paro.planning.estimator import Estimator
from paro.planning.planner import plan
from paro.planning.remedies import why_nothing_fits
from paro.planning.search_space import PlanRequest, SearchSpace
from paro.precision import PrecisionConfig
from paro.schedule.batch_schedule import BatchSchedule
from paro.spec.context_layout import ContextLimits
from paro.strategy import FLAG, Strategy, parse_strategy


class Question(NamedTuple):
    """A choice that flags leave to the planner, with the facts of the run that it needs."""

    task: TrainingTask
    sharding_flags: ShardingFlags
    # The batches of every context-parallel layout and micro-batch size to choose from.
    batches_of: dict[tuple[ContextParallelConfig, int], BatchSchedule]
    flag: str | None  # of these, which says auto
    searches: bool = False  # whether the planner chooses among them
    lines: tuple[str, ...] = ()  # for the log

    def measured(self, machine: Machine) -> Question:
        """Return the question of a run whose machine is now measured."""
        sharding = replace(self.sharding_flags.sharding, machine=machine)
        return self._replace(
            sharding_flags=self.sharding_flags._replace(sharding=sharding, is_unmeasured=False)
        )


class Decision(NamedTuple):
    """The answer: fields of a RunConfig, log lines, and values of flags that said auto."""

    sharding: ShardingConfig
    strategy: Strategy
    precision: PrecisionConfig
    batches: BatchSchedule
    lines: tuple[str, ...]
    flags: dict[str, object]


def with_saved(
    args: Namespace, world: World
) -> tuple[Namespace, tuple[str, ...], dict[str, object]]:
    """Return the flags with what --load says of them, log lines, and what was read of the
    checkpoint."""
    notices = (*changed_parts(args), *ignored_lines(args))
    checkpoint = take(CheckpointConfig, args)
    common = saved_common(checkpoint)
    if checkpoint.use_checkpoint_args:
        if common is None:
            notices += (f"--load {args.load} holds no checkpoint: its sizes are the flags'",)
        else:
            args = with_saved_muon(with_checkpoint_args(args, common), checkpoint)
        if missing := missing_flags(args, loaded=True):
            raise UserError(*missing)
    args, lines = keeping_choice(args, world, checkpoint)
    notices += (*flags_without_effect(args), *lines)
    return args, notices, {"checkpoint": checkpoint, "common": common or {}}


def question_of(
    args: Namespace, task: TrainingTask, sharding_flags: ShardingFlags, checkpoint: CheckpointConfig
) -> Question:
    """Find the choice that flags leave to the planner, with the context-parallel layouts."""
    flag, given, sharding = auto_flag(args), take_context(args), sharding_flags.sharding
    world, machine, size = sharding.world, sharding.machine, args.micro_batch_size

    def batches(cp: ContextParallelConfig, size: int) -> BatchSchedule:
        readers = data_parallel_size_of(world, cp.context_parallel_size)
        return take_batches(with_values(args, {"micro_batch_size": size}), readers)

    def only(cp: ContextParallelConfig, size: int, *lines: str) -> Question:
        return Question(task, sharding_flags, {(cp, size): batches(cp, size)}, flag, lines=lines)

    if flag is None:
        return only(given, size)
    if sharding.materialize == "rotate":
        return only(replace(given, context_parallel_size=1), size)
    limits = ContextLimits(
        model=task.model,
        world_size=world.size,
        group_size=world.group_size,
        seq_length=args.seq_length,
    )
    types = requested_types(args, task.model, task.device.type, task.precision.compute)
    found = requested_options(args, types, limits)
    if not found:  # check_context says why
        return only(given, size)
    saved = resumed_arguments(checkpoint)
    for cp in found if saved.get("world_size") == world.size else ():
        if all(saved.get(name) == value for name, value in cp.flags.items()):
            kept = int(saved.get("micro_batch_size", 0)) if flag == SIZE else size
            with suppress(UserError):  # the batch is no multiple any more
                return only(cp, kept, f"{flag} auto: as in --load {checkpoint.load}")
    is_timed = machine is not None and machine.device is not None
    if flag != SIZE and not (is_timed or sharding_flags.is_unmeasured):
        cp = without_machine(found, world.group_size)
        return only(cp, size, f"{flag} auto: {cp.describe()}; --paro-machine would compare times")
    if machine is None and not sharding_flags.is_unmeasured:
        check_measurable([f"{flag} auto"], world, args.dry_run)
        raise UserError(f"{flag} auto: give --paro-machine, a shipped name, a file or {MEASURE}")
    if flag == SIZE and args.global_batch_size is args.step_batch_size_schedule is None:
        raise UserError(f"{flag} auto compares steps of one batch: give --global-batch-size")

    def whole(cp: ContextParallelConfig, size: int) -> BatchSchedule:
        made = batches(cp, size)
        batch, readers = made.global_batch_size, made.data_parallel_size
        check_multiple("--global-batch-size", batch, size, readers)
        return made

    batches_of = with_batches(found, size, whole, grows=flag == SIZE)
    return Question(task, sharding_flags, batches_of, flag, searches=True)


def decide(question: Question) -> Decision:
    """Decide by the planner what flags leave open; `UserError` if nothing fits.

    Until the machine is measured, a choice that no other flag refuses stands for auto.
    """
    task, (sharding, strategy, notices, is_unmeasured) = question.task, question.sharding_flags
    (context, batches), lines = _shared(question)
    sharding, world = replace(sharding, context=context), sharding.world
    flags = context.flags | {"micro_batch_size": batches.micro_batch_size} if question.flag else {}
    lines += notices
    if sharding.elastic:
        lines += nodes_line(batches, world, context.context_parallel_size)
    sharding, precision, notices = take_inter_bits(sharding, task.precision)
    lines += notices
    if is_unmeasured:
        # It rotates or not, and survives.
        letters = "III" if sharding.materialize == "rotate" else "NNN"
        stand_in = parse_strategy(letters, world_size=world.size, group_size=world.group_size)
        strategy = strategy or stand_in
        return Decision(sharding, strategy, precision, batches, lines, flags)
    if strategy is None or sharding.inter_bits is not None:
        request = plan_request_of(task._replace(precision=precision), batches, sharding)
        strategy, precision, notices = _chosen(request, strategy)
        lines += notices
    if sharding.inter_bits is None:
        lines += inter_bits_notices(precision, world.group_size, strategy, world.size)
    return Decision(sharding, strategy, precision, batches, lines, flags)


def _shared(
    question: Question,
) -> tuple[tuple[ContextParallelConfig, BatchSchedule], tuple[str, ...]]:
    """Return the ranks that share a sample, the batches with them, and log lines about a choice."""
    sharding, strategy, _, is_unmeasured = question.sharding_flags
    (cp, size), batches = next(iter(question.batches_of.items()))
    if question.flag is None or not question.searches or is_unmeasured:
        return (cp, batches), question.lines
    space = SearchSpace(
        strategies=None if strategy is None else (strategy,),
        collectives=(sharding.collective,),
        recomputes=(question.task.model.recompute,),
    )
    request = plan_request_of(question.task, batches, replace(sharding, context=cp))
    cp, size, lines = choose(question.flag, request, question.batches_of, space)
    return (cp, question.batches_of[cp, size]), lines


def _chosen(
    request: PlanRequest, strategy: Strategy | None
) -> tuple[Strategy, PrecisionConfig, tuple[str, ...]]:
    """Return the fastest strategy that fits, unless one is given, its bits, and lines that explain
    them.

    `UserError` if no strategy fits.
    """
    if strategy is not None:
        own, other = Estimator(request).estimate_bits(request.candidate(strategy))
        lines = () if other is None else (f"planner: {bits_text(own, other)}",)
        return strategy, own.precision, lines
    found = plan(request, request.as_given())
    if found.best is None:
        raise UserError(f"{FLAG} auto: {why_nothing_fits(request, found)}")
    return found.best.candidate.strategy, found.best.precision, describe(found)
