"""RunConfig: the whole configuration of a run, made once from flags that are resolved."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from data.config import DataConfig
from data.tokenizer_config import TokenizerConfig
from model.config import LlamaConfig
from model.fusion import Fusions
from model.trainable import Trainable
from paro.arguments.parser import check_flags, take
from paro.checkpoint.config import CheckpointConfig
from paro.config.checks import (
    CHECKS,
    check_in_memory,
    check_load,
    check_save,
    check_trackers,
    needs_of,
)
from paro.config.context_parallel import ContextParallelConfig, data_parallel_size_of
from paro.config.data import take_data, take_tokenizer
from paro.config.model import take_model
from paro.config.parts import (
    fitting_batches,
    take_batches,
    take_loss_scale,
    take_precision,
    take_schedule,
    take_train,
    with_values,
)
from paro.config.resolve import PlannerInput, decide, planner_input, with_saved
from paro.config.sharding import (
    ShardingConfig,
    TrainingTask,
    plan_request_of,
    take_inter_bits,
    take_sharding,
)
from paro.config.train import TrainConfig
from paro.distributed.process_group import RuntimeConfig
from paro.distributed.world import LaunchConfig, World
from paro.errors import UserError
from paro.machine.files import find_machine
from paro.machine.machine import Machine
from paro.planning.search_space import PlanRequest
from paro.precision import PrecisionConfig
from paro.report.config import ReportConfig
from paro.report.profiler import ProfileConfig
from paro.report.watchdog import WatchConfig
from paro.schedule.batch_schedule import BatchSchedule
from paro.schedule.loss_scale import LossScaleConfig
from paro.schedule.lr_schedule import ScheduleConfig
from paro.schedule.step_checks import StepChecksConfig
from paro.spec.optim_config import MuonConfig, OptimConfig
from paro.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The checked configuration of a run; no code below this file sees the argparse namespace."""

    model: LlamaConfig
    trainable: Trainable
    batches: BatchSchedule
    sharding: ShardingConfig
    strategy: Strategy
    precision: PrecisionConfig
    fusions: Fusions | None  # flags of fused kernels; None: some rank has no Triton
    optim: OptimConfig
    muon: MuonConfig
    schedule: ScheduleConfig
    loss_scale: LossScaleConfig
    train: TrainConfig
    checks: StepChecksConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    vocab_size: int  # ids of the tokenizer, without the padding rows of the model
    eod: int  # id of the token that ends a document
    checkpoint: CheckpointConfig
    report: ReportConfig
    profile: ProfileConfig
    watch: WatchConfig
    runtime: RuntimeConfig
    launch: LaunchConfig
    notices: tuple[str, ...]  # log lines for the start: flags without effect, choices of auto
    # The argparse namespace for the record of the run, with values that checkpoints filled in.
    arguments: Mapping[str, Any] = field(compare=False, repr=False)
    # The argparse namespace before --load and the planner fill values in; equal at every restart.
    command_line: Mapping[str, Any] = field(compare=False, repr=False)
    # Input for `decide` once the machine is measured; None: every choice is made.
    open: PlannerInput | None = field(default=None, compare=False, repr=False)

    @property
    def world(self) -> World:
        """All ranks of the run, and this one's place among them."""
        return self.sharding.world

    @property
    def context(self) -> ContextParallelConfig:
        """The context-parallel configuration: how many ranks share a sample, and how."""
        return self.sharding.context

    @property
    def seq_length(self) -> int:
        """The number of tokens in a sample."""
        return self.data.seq_length

    @property
    def device_type(self) -> str:
        """The torch device type of training: cuda under NCCL, else cpu."""
        return "cuda" if self.runtime.by_nccl else "cpu"

    @property
    def save_folder(self) -> Path | None:
        """The folder of --save; None if the run saves no checkpoints."""
        save = self.checkpoint.save
        return None if save is None or self.train.skip_train else Path(save)

    @property
    def in_memory_interval(self) -> int | None:
        """The number of iterations between in-memory checkpoints; None if they are off."""
        flags = self.checkpoint
        if flags.non_persistent_ckpt_type is None and not self.sharding.needs_in_memory_checkpoints:
            return None
        return flags.non_persistent_save_interval or 1

    @property
    def plan_request(self) -> PlanRequest | None:
        """The planner's request; None unless --paro-machine names a device."""
        machine = self.sharding.machine
        if machine is None or machine.device is None:
            return None
        trained = self.model, self.trainable, self.precision, self.muon
        task = _task(*trained, self.data, self.runtime, self.launch)
        return plan_request_of(task, self.batches, self.sharding)

    def on_measured(self, machine: Machine) -> RunConfig:
        """Build the configuration with a machine that was just measured; `UserError`."""
        assert self.open is not None, "the machine was known before"
        if self.device_type == "cuda":
            machine = replace(machine, launch_order=self.runtime.paro_nccl_launch_order)
        changes = decide(self.open.measured(machine))._asdict()
        notices = self.notices + changes.pop("lines")
        arguments = {**self.arguments, **changes.pop("flags")}
        config = replace(self, **changes, notices=notices, arguments=arguments, open=None)
        for check in CHECKS:
            check(*(getattr(config, name) for name in needs_of(check)))
        return config

    @property
    def trained(self) -> frozenset[str]:
        """The names of the trainable parameters; empty with --skip-train."""
        return frozenset() if self.train.skip_train else self.trainable.names(self.model)


def configure(args: Namespace, world: World) -> RunConfig:
    """Build the configuration for `world`, whose ranks need not exist; `UserError` for mistakes.

    The error names all wrong values, except values that another mistake hides.
    """
    check_flags(args)
    command_line = vars(args)
    try:
        args, notices, saved = with_saved(args, world)
    except UserError as error:
        if args.use_checkpoint_args:  # the wrong values may come from the checkpoint
            raise
        raise UserError(*distinct([*error.args, *value_mistakes(args, world)])) from error
    parts, wrong = _parts(args, world, saved)
    if wrong:
        raise UserError(*wrong)
    undecided, decision = parts["planner_input"], parts["decision"]
    is_open = undecided.sharding_flags.is_unmeasured
    of_world = {"world_size": world.size, "ranks_per_node": world.ranks_per_node}
    parts |= {
        "notices": notices + decision.lines * (not is_open),
        "command_line": command_line,
        "arguments": vars(args) | decision.flags | of_world,
        "open": undecided if is_open else None,
    }
    config = RunConfig(**{field.name: parts[field.name] for field in fields(RunConfig)})
    if not config.launch.dry_run:  # a dry run may be on another machine than the training
        check_load(config.checkpoint)
        check_save(config.checkpoint, config.train)
        check_trackers(config.report, config.runtime)
    return config


def distinct(lines: Iterable[str]) -> tuple[str, ...]:
    """Keep the first line about each flag value; two parts may refuse one value."""
    first_lines: dict[tuple[str, ...], str] = {}
    for line in lines:
        first_lines.setdefault(tuple(line.split()[:2]), line)
    return tuple(first_lines.values())


def value_mistakes(args: Namespace, world: World) -> tuple[str, ...]:
    """List a line for each part of the configuration that fails to build, without planning."""
    return _parts(args, world, {"common": {}}, plans=False)[1]


def _parts(
    args: Namespace, world: World, known: Mapping[str, object], *, plans: bool = True
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Build every part of the configuration that can be built; list a line for each failure."""
    wrong: list[str] = []
    parts: dict[str, Any] = {"args": args, "world": world, "wrong": wrong, **known}
    for name, make in _MAKERS:
        inputs = [parts.get(need) for need in needs_of(make)]
        is_open = parts.get(name) is None and (plans or name != "planner_input")
        if is_open and all(part is not None for part in inputs):
            try:
                parts[name] = make(*inputs)
            except UserError as error:
                wrong.extend(error.args)
    return parts, distinct(wrong)


def _filled(kind: type[Any]) -> Callable[[Namespace], object]:
    return lambda args: take(kind, args)


def _task(
    model: LlamaConfig,
    trainable: Trainable,
    as_given: PrecisionConfig,
    muon: MuonConfig,
    data: DataConfig,
    runtime: RuntimeConfig,
    launch: LaunchConfig,
) -> TrainingTask:
    return TrainingTask(
        model=model,
        trainable=trainable,
        precision=as_given,
        muon=muon,
        seq_length=data.seq_length,
        device_type="cuda" if runtime.by_nccl else "cpu",
        memory_gb=launch.device_memory_gb,
        apart=data.reset_attention_mask,
    )


def _batches_of_steps(args: Namespace, data_parallel_size: int) -> BatchSchedule | None:
    if args.step_batch_size_schedule is None:
        return None
    return take_batches(with_values(args, {"global_batch_size": None}), data_parallel_size)


def _fitting_batches(args: Namespace, data_parallel_size: int) -> BatchSchedule:
    fitting = fitting_batches(args, data_parallel_size)
    return take_batches(with_values(args, fitting), data_parallel_size)


def _data_parallel_size(args: Namespace, world: World) -> int:
    return data_parallel_size_of(world, args.context_parallel_size)


# (part of the configuration, function that makes the part), in order. The function's parameters
# name the parts that it needs. If the first function for a part fails, the next function for the
# same part makes a placeholder, so that parts which depend on it are still checked.
_MAKERS: tuple[tuple[str, Callable[..., object]], ...] = (
    ("checkpoint", _filled(CheckpointConfig)),
    ("fusions", _filled(Fusions)),
    ("optim", _filled(OptimConfig)),
    ("checks", _filled(StepChecksConfig)),
    ("report", _filled(ReportConfig)),
    ("watch", _filled(WatchConfig)),
    ("runtime", _filled(RuntimeConfig)),
    ("launch", _filled(LaunchConfig)),
    ("data", take_data),
    ("tokens", take_tokenizer),
    ("tokenizer", lambda tokens: tokens[0]),
    ("vocab_size", lambda tokens: tokens[1].vocab_size),
    ("eod", lambda tokens: tokens[1].eod),
    # `data` is a dependency: --seq-length is checked there, and is the default of positions.
    ("model", lambda args, vocab_size, data: take_model(args, vocab_size)),
    ("trainable", lambda args: Trainable.of_flag(args.trainable)),
    ("names", lambda trainable, model: trainable.names(model)),  # refuses unmatched patterns
    ("as_given", take_precision),
    ("muon", _filled(MuonConfig)),
    ("task", _task),
    ("data_parallel_size", _data_parallel_size),
    ("data_parallel_size", lambda world: world.size),
    ("sharding_flags", take_sharding),
    ("bits", lambda sharding_flags, as_given: take_inter_bits(sharding_flags.sharding, as_given)),
    ("planner_input", planner_input),
    ("decision", lambda planner_input, wrong: None if wrong else decide(planner_input)),
    ("batches", lambda decision: decision.batches),
    ("batches", take_batches),
    ("batches", _batches_of_steps),
    ("batches", _fitting_batches),
    ("sharding", lambda decision: decision.sharding),
    ("sharding", lambda sharding_flags: sharding_flags.sharding),
    ("strategy", lambda decision: decision.strategy),
    ("strategy", lambda sharding_flags: sharding_flags.strategy),
    ("precision", lambda decision: decision.precision),
    ("precision", lambda as_given: as_given),
    ("train", take_train),
    ("schedule", take_schedule),
    ("loss_scale", take_loss_scale),
    ("profile", lambda args: take(ProfileConfig, args, profile_ranks=tuple(args.profile_ranks))),
    ("seq_length", lambda data: data.seq_length),
    ("device_type", lambda task: task.device_type),
    *((check.__name__, check) for check in (*CHECKS, check_in_memory)),
)


def take_world(args: Namespace) -> World:
    """Find the world of the run: the ranks of the launcher, or the ranks that --dry-run assumes.

    In a dry run a node has the group size of --paro-machine by default (--ranks-per-node).
    """
    launch = take(LaunchConfig, args)
    if not launch.dry_run or args.paro_machine is None:
        return launch.world()
    return launch.world(find_machine(args.paro_machine).group_size)
