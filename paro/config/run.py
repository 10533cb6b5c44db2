"""RunConfig: builds and checks the whole configuration of a run from the parsed flags."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from data.config import DataConfig
from data.tokenizer_config import TokenizerConfig
from model.config import LlamaConfig
from model.fusion import Fusions
from model.trainable import Trainable
from paro.arguments.megatron import changed_parts, ignored_lines
from paro.arguments.needed import missing_flags, missing_sizes
from paro.arguments.parser import check_flags, take
from paro.checkpoint.config import CheckpointConfig
from paro.config.batch_schedule import BatchSchedule
from paro.config.checkpoint import (
    keeping_choice,
    resumed_samples,
    saved_common,
    with_checkpoint_args,
    with_saved_muon,
)
from paro.config.checks import (
    CHECKS,
    check_load,
    check_local_copies,
    check_save,
    check_trackers,
    flags_without_effect,
)
from paro.config.context_choice import with_context
from paro.config.context_parallel import ContextParallelConfig, sharing
from paro.config.fitting import fitting_batches, with_values
from paro.config.inter_bits import take_loss_scale, take_precision
from paro.config.model import take_model
from paro.config.parts import (
    take_batches,
    take_data,
    take_profile,
    take_schedule,
    take_tokenizer,
    take_train,
)
from paro.config.plan import RankDevice, Task, take_sharding, take_states
from paro.config.planned_checks import needs_of
from paro.config.sharding import ShardingConfig
from paro.config.train import TrainConfig
from paro.distributed.process_group import RuntimeConfig
from paro.distributed.world import LaunchConfig, World
from paro.errors import UserError
from paro.machine.files import find_machine
from paro.machine.machine import Machine
from paro.optim.loss_scale import LossScaleConfig
from paro.optim.lr_schedule import ScheduleConfig
from paro.optim.muon_config import MuonConfig
from paro.optim.optimizer import OptimConfig
from paro.optim.step_checks import StepChecksConfig
from paro.precision import PrecisionConfig
from paro.report.config import ReportConfig
from paro.report.profiler import ProfileConfig
from paro.report.watchdog import WatchConfig
from paro.strategy import Strategy

Part = TypeVar("Part")
# Parts that are filled from the flags of the same names.
_FILLED: Mapping[str, type[Any]] = {
    "checkpoint": CheckpointConfig,
    "fusions": Fusions,
    "optim": OptimConfig,
    "checks": StepChecksConfig,
    "report": ReportConfig,
    "watch": WatchConfig,
    "runtime": RuntimeConfig,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The checked configuration of a run; no code below this file sees the argparse namespace."""

    model: LlamaConfig
    trainable: Trainable
    batches: BatchSchedule
    sharding: ShardingConfig
    strategy: Strategy
    precision: PrecisionConfig
    fusions: Fusions | None  # None: some rank has no Triton
    optim: OptimConfig
    muon: MuonConfig
    schedule: ScheduleConfig
    loss_scale: LossScaleConfig
    train: TrainConfig
    checks: StepChecksConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    vocab_size: int  # the tokenizer's; the model's is padded
    eod: int  # id of the token that ends a document
    checkpoint: CheckpointConfig
    report: ReportConfig
    profile: ProfileConfig
    watch: WatchConfig
    runtime: RuntimeConfig
    launch: LaunchConfig
    notices: tuple[str, ...]  # log lines for the start: flags without effect, choices of auto
    # The namespace, only to be recorded; values of --use-checkpoint-args and ranks filled in.
    given: Mapping[str, Any] = field(compare=False, repr=False)

    @property
    def world(self) -> World:
        """All ranks of the run, and this one's place among them."""
        return self.sharding.world

    @property
    def context(self) -> ContextParallelConfig:
        """The ranks that share samples."""
        return self.sharding.context

    @property
    def seq_length(self) -> int:
        """The tokens of a sample."""
        return self.data.seq_length

    @property
    def device_type(self) -> str:
        """The kind of device that the backend sends from."""
        return RankDevice.of(self.runtime.distributed_backend, None).type

    @property
    def local_copies_interval(self) -> int | None:
        """Every how many iterations the states are copied to the node's memory; None: never."""
        flags = self.checkpoint
        if flags.non_persistent_ckpt_type is None and not self.sharding.needs_local_copies:
            return None
        return flags.non_persistent_save_interval or 1

    @classmethod
    def from_args(cls, args: Namespace, world: World, measured: Machine | None = None) -> RunConfig:
        """The configuration for `world`, whose ranks need not exist; `UserError` for mistakes.

        It names all values that are wrong, as far as one does not hide another. `measured` is the
        machine where --paro-machine names none.
        """
        check_flags(args)
        try:
            return cls._of_known_flags(args, world, measured)
        except UserError as error:
            lines = distinct([*error.args, *value_mistakes(args, world)])
            if len(lines) <= len(error.args) or args.use_checkpoint_args:
                raise
            raise UserError(*lines) from error

    @classmethod
    def _of_known_flags(cls, args: Namespace, world: World, measured: Machine | None) -> RunConfig:
        notices = (*changed_parts(args), *ignored_lines(args))
        checkpoint = take(CheckpointConfig, args)
        common = saved_common(checkpoint)
        if checkpoint.use_checkpoint_args:
            args, lines = _with_saved_args(args, checkpoint, common)
            notices += lines
        args, lines = keeping_choice(args, world, checkpoint)
        notices += (*flags_without_effect(args), *lines)
        data, (tokenizer, built) = take_data(args), take_tokenizer(args)
        model = take_model(args, built.vocab_size)
        trainable = Trainable.of_flag(args.trainable)
        trainable.names(model)  # refuses patterns that match no parameter
        runtime, launch = take(RuntimeConfig, args), take(LaunchConfig, args)
        as_given = take_precision(args)
        device = RankDevice.of(runtime.distributed_backend, launch.device_memory_gb)
        muon = take(MuonConfig, args)
        apart = data.reset_attention_mask
        task = Task(model, trainable, as_given, muon, data.seq_length, device, apart)
        taken = partial(take_sharding, world=world, model=model, measured=measured)
        args, lines = with_context(args, taken, task, checkpoint)
        notices += lines
        world = sharing(world, args.context_parallel_size)
        batches = take_batches(args, world)
        train = take_train(args, batches)
        sharded = take_sharding(args, world, model, measured)
        sharding, strategy, precision, lines = take_states(sharded, batches, task)
        notices += lines
        # Not what one group makes of the bits: a restart may have more groups.
        check_local_copies(checkpoint, sharding, as_given)
        config = cls(
            **{name: take(kind, args) for name, kind in _FILLED.items()},
            model=model,
            trainable=trainable,
            batches=batches,
            sharding=sharding,
            strategy=strategy,
            precision=precision,
            muon=muon,
            schedule=take_schedule(args, batches, train, common),
            loss_scale=take_loss_scale(args),
            train=train,
            data=data,
            tokenizer=tokenizer,
            vocab_size=built.vocab_size,
            eod=built.eod,
            profile=take_profile(args),
            launch=launch,
            notices=notices,
            given=vars(args) | {"world_size": world.size, "ranks_per_node": world.ranks_per_node},
        )
        config.check()
        return config

    def check(self) -> None:
        """`UserError` for fields that contradict each other, the model or this machine."""
        for check in CHECKS:
            check(*(getattr(self, name) for name in needs_of(check)))
        if self.batches.changes and (self.launch.dry_run or self.local_copies_interval is None):
            # Else the run may continue from local copies, and checks it when it knows where.
            self.batches.check_from(resumed_samples(self.checkpoint))
        if not self.launch.dry_run:  # they concern the machine that trains
            check_load(self.checkpoint)
            check_save(self.checkpoint, self.train)
            check_trackers(self.report, self.runtime)

    @property
    def trained(self) -> frozenset[str]:
        """The names of the parameters that train; with --skip-train none."""
        return frozenset() if self.train.skip_train else self.trainable.names(self.model)


def distinct(lines: Iterable[str]) -> tuple[str, ...]:
    """The first line about each value: one that two parts refuse is one mistake."""
    found: dict[tuple[str, ...], str] = {}
    for line in lines:
        found.setdefault(tuple(line.split()[:2]), line)
    return tuple(found.values())


def value_mistakes(args: Namespace, world: World) -> tuple[str, ...]:
    """A line for each part of the configuration that cannot be made, as far as it is known."""
    wrong: list[str] = []

    def part(make: Callable[..., Part], *needs: object) -> Part | None:
        if any(need is None for need in needs):
            return None
        try:
            return make(*needs)
        except UserError as error:
            wrong.extend(error.args)
            return None

    found = {name: part(partial(take, kind), args) for name, kind in _FILLED.items()}
    world = part(sharing, world, args.context_parallel_size) or world
    batches = part(take_batches, args, world)
    if batches is None and None not in (args.step_batch_size_schedule, args.global_batch_size):
        batches = part(take_batches, with_values(args, {"global_batch_size": None}), world)
    if batches is None:  # which others need
        better = with_values(args, fitting_batches(args, world.data_parallel_size))
        batches = part(take_batches, better, world)
    part(_check_sizes, batches, found["checkpoint"])
    train, data = part(take_train, args, batches), part(take_data, args)
    tokenizer = part(take_tokenizer, args)
    model = sharding = strategy = None
    if tokenizer is not None and data is not None and not missing_sizes(args):
        model = part(take_model, args, tokenizer[1].vocab_size)
        sharding, strategy, *_ = part(take_sharding, args, world, model) or (None, None)
    part(lambda sizes, whole: take_schedule(args, sizes, whole, None), batches, train)
    part(take_loss_scale, args)
    trainable = part(Trainable.of_flag, args.trainable)
    part(lambda kind, whole: kind.names(whole), trainable, model)
    found |= {"batches": batches, "train": train, "data": data, "model": model}
    found |= {"sharding": sharding, "strategy": strategy, "trainable": trainable}
    found |= {"precision": part(take_precision, args), "profile": part(take_profile, args)}
    found["seq_length"] = None if data is None else data.seq_length
    found["device_type"] = RankDevice.of(args.distributed_backend, None).type
    for check in (*CHECKS, check_local_copies):
        part(check, *(found[name] for name in needs_of(check)))
    return distinct(wrong)


def _check_sizes(batches: BatchSchedule, checkpoint: CheckpointConfig) -> None:
    if batches.changes:
        batches.check_from(resumed_samples(checkpoint))


def take_world(args: Namespace) -> World:
    """The ranks to configure for: those started by the launcher, or those of --dry-run.

    A node of a dry run is a group of --paro-machine, unless --ranks-per-node says otherwise.
    """
    check_flags(args)
    launch = take(LaunchConfig, args)
    if not launch.dry_run or args.paro_machine is None:
        return launch.world()
    return launch.world(find_machine(args.paro_machine).group_size)


def _with_saved_args(
    args: Namespace, checkpoint: CheckpointConfig, common: dict[str, Any] | None
) -> tuple[Namespace, tuple[str, ...]]:
    """The flags under --use-checkpoint-args, and a log line if there is no checkpoint."""
    lines: tuple[str, ...] = ()
    if common is None:
        lines = (f"--load {args.load} holds no checkpoint: its sizes are the flags'",)
    else:
        args = with_saved_muon(with_checkpoint_args(args, common), checkpoint)
    if missing := missing_flags(args, loaded=True):
        raise UserError(*missing)
    return args, lines
