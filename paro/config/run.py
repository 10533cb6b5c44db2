"""RunConfig: the whole configuration of a run, made once from flags that are resolved."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from data.config import DataConfig
from data.tokenizer import build_tokenizer
from data.tokenizer_config import TokenizerConfig, tokenizer_config
from model.config import LlamaConfig
from model.fusion import Fusions
from model.mup import width_of
from model.trainable import Trainable
from paro.arguments.needed import VOCABULARY
from paro.arguments.parser import check_flags, take
from paro.checkpoint.config import CheckpointConfig
from paro.config.checks import (
    CHECKS,
    check_in_memory,
    check_load,
    check_outputs,
    check_overwriting,
    keeps_copies,
)
from paro.config.context_parallel import ContextParallelConfig, data_parallel_size_of
from paro.config.elastic import fitted_to_ranks
from paro.config.model import take_model, vocab_size_given
from paro.config.parts import (
    fitting_batches,
    take_batches,
    take_loss_scale,
    take_precision,
    take_schedule,
    take_train,
    with_values,
)
from paro.config.planned_checks import needs_of
from paro.config.resolve import OpenChoices, with_saved
from paro.config.sharding import ShardingConfig, TrainingTask, take_inter_bits, take_sharding
from paro.config.train import TrainConfig
from paro.distributed.process_group import RuntimeConfig
from paro.distributed.world import LaunchConfig, World
from paro.errors import UserError
from paro.files.object_store import path_of
from paro.machine.files import find_machine
from paro.machine.machine import Machine
from paro.planning.estimator import Estimator
from paro.planning.run_memory import DeviceMemory, RunMemory
from paro.precision import PrecisionConfig
from paro.report.config import ReportConfig
from paro.report.profiler import ProfileConfig
from paro.report.watchdog import WatchConfig
from paro.schedule.batch_schedule import BatchSchedule
from paro.schedule.loss_scale import LossScaleConfig
from paro.schedule.lr_schedule import ScheduleConfig
from paro.schedule.step_checks import StepChecksConfig
from paro.spec.optim_config import MuonConfig, OptimConfig
from paro.spec.param_groups import ParamGroups
from paro.spec.run_spec import RunSpec
from paro.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The checked configuration of a run; code that reads it sees no argparse namespace."""

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
    tokenizer_is_here: bool  # False: a dry run without it plans with the size of its vocabulary
    vocab_size: int  # ids of the tokenizer, without the padding rows of the model
    padded_vocab_size: int | None  # vocabulary rows that a flag gives; None: by the tokenizer
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
    # Choices for the planner once the machine is measured; None: every choice is made.
    open: OpenChoices | None = field(default=None, compare=False, repr=False)

    @property
    def world(self) -> World:
        """All ranks of the run, and this one's place among them."""
        return self.sharding.world

    @property
    def context(self) -> ContextParallelConfig:
        """The context-parallel configuration: how many ranks share a sample, and how."""
        return self.sharding.context

    @property
    def device_type(self) -> str:
        """The torch device type of training: cuda under NCCL, else cpu."""
        return self.runtime.device_type

    @property
    def save_folder(self) -> Path | None:
        """The folder of --save; None if the run saves no checkpoints."""
        save = self.checkpoint.save
        return None if save is None or self.train.skip_train else path_of(save)

    @property
    def report_in_use(self) -> ReportConfig:
        """The report configuration; --skip-train writes no files and no dashboards."""
        return self.report.without_records() if self.train.skip_train else self.report

    @property
    def in_memory_interval(self) -> int | None:
        """The number of iterations between in-memory checkpoints; None if they are off."""
        if not keeps_copies(self.checkpoint, self.sharding):
            return None
        return self.checkpoint.non_persistent_save_interval or 1

    @cached_property
    def estimator(self) -> Estimator | None:
        """The predictions for the planner's request; None unless --paro-machine names a device."""
        machine = self.sharding.machine
        if machine is None or machine.device is None:
            return None
        return Estimator(self.task.plan_request(self.batches, self.sharding))

    @cached_property
    def memories(self) -> RunMemory:
        """The predictions of memory for the run, and for changes of it."""
        return self.estimator.memories if self.estimator else RunMemory(self.sharding.machine)

    @cached_property
    def memory(self) -> DeviceMemory:
        """The most memory that a rank takes of its device."""
        return self.memories.of(self.spec)

    @property
    def param_groups(self) -> ParamGroups:
        """The rule for the factors of every parameter's learning rate, weight decay and epsilon."""
        by_muon = self.precision.optimizer == "muon"
        return self.optim.groups(width=width_of(self.model), by_muon=by_muon)

    @property
    def task(self) -> TrainingTask:
        """The model, its precision and its data, and the device that trains it."""
        return TrainingTask(*(getattr(self, name) for name in TrainingTask._fields))

    @cached_property
    def spec(self) -> RunSpec:
        """The description of the run, which engine and planner share."""
        return self.task.run_spec(self.batches, self.sharding, self.strategy, self.trained)

    def on_measured(self, machine: Machine) -> RunConfig:
        """Build the configuration with a machine that was just measured; `UserError`."""
        assert self.open is not None, "the machine was known before"
        changes = self.open.on_measured(machine)._asdict()
        notices = self.notices + changes.pop("lines")
        arguments = {**self.arguments, **changes.pop("flags")}
        config = replace(self, **changes, notices=notices, arguments=arguments, open=None)
        for check in CHECKS:
            check(*(getattr(config, name) for name in needs_of(check)))
        return config

    @cached_property
    def trained(self) -> frozenset[str]:
        """The names of the trainable parameters; empty with --skip-train."""
        return frozenset() if self.train.skip_train else self.trainable.names(self.model)


def configure(args: Namespace, early: World | EarlyConfig) -> RunConfig:
    """Build the configuration for ranks that need not exist; `UserError` for mistakes.

    The error names all wrong values, except values that another mistake hides. `early` has the
    ranks, or the parts that are built already.
    """
    known = {"world": early} if isinstance(early, World) else early._asdict()
    world = known["world"]
    check_flags(args)
    command_line = vars(args)
    try:
        args, notices, saved = with_saved(args, world)
    except UserError as error:
        if args.use_checkpoint_args:  # the wrong values may come from the checkpoint
            raise
        raise UserError(*distinct([*error.args, *value_mistakes(args, world=world)])) from error
    parts, wrong = _parts(args, saved | known, plans=True)
    if wrong:
        raise UserError(*wrong)
    decision, is_open = parts["decision"], parts["sharding_flags"].is_unmeasured
    of_world = {"world_size": world.size, "ranks_per_node": world.ranks_per_node}
    parts |= {
        "notices": notices + parts["elastic_lines"] + decision.lines * (not is_open),
        "command_line": command_line,
        "arguments": vars(parts["args"]) | decision.flags | of_world,
        "open": parts["choices"] if is_open else None,
    }
    config = RunConfig(**{field.name: parts[field.name] for field in fields(RunConfig)})
    if not config.launch.dry_run:  # a dry run may be on another machine than the training
        check_load(config.checkpoint)
        check_outputs(config.checkpoint, config.report, config.runtime)
        check_overwriting(config.checkpoint, config.train)
    return config


def distinct(lines: Iterable[str]) -> tuple[str, ...]:
    """Keep the first line about each flag value; two parts may refuse one value."""
    first_lines: dict[tuple[str, ...], str] = {}
    for line in lines:
        first_lines.setdefault(tuple(line.split()[:2]), line)
    return tuple(first_lines.values())


def value_mistakes(args: Namespace, **known: object) -> tuple[str, ...]:
    """List a line for each part of the configuration that fails to build, without planning."""
    return _parts(args, {"common": {}, **known})[1]


def _parts(
    args: Namespace, known: Mapping[str, object], *, plans: bool = False
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Build every part of the configuration that can be built; list a line for each failure."""
    wrong: list[str] = []
    parts: dict[str, Any] = {"args": args, **known}
    for name, make in _MAKERS:
        needs = needs_of(make)
        is_open = name not in parts and (name != "decision" or (plans and not wrong))
        if is_open and all(need in parts for need in needs):
            try:
                parts[name] = made = make(*(parts[need] for need in needs))
                more: dict[str, object] = getattr(made, "_asdict", dict)()
                parts |= {field: part for field, part in more.items() if part is not None}
            except UserError as error:
                wrong.extend(error.args)
    return parts, distinct(wrong)


def _filled(kind: type[Any]) -> Callable[[Namespace], object]:
    return lambda args: take(kind, args)


class Tokens(NamedTuple):
    """The tokenizer of a run, the number of its ids, and the id that ends a document."""

    tokenizer: TokenizerConfig
    tokenizer_is_here: bool
    vocab_size: int
    eod: int


def take_tokens(args: Namespace) -> Tokens:
    """Build the tokenizer; for synthetic tokens without one, a vocabulary without pieces.

    A dry run needs only the number of ids: the vocabulary that flags give stands for a tokenizer
    that is not on this machine.
    """
    flags, is_here = dict(vars(args)), True
    if not any((args.tokenizer_type, args.vocab_file, args.merge_file)):
        assert args.mock_data or args.dry_run, "a missing --tokenizer-type was refused before"
        flags["tokenizer_type"], is_here = "NullTokenizer", args.mock_data
    size = vocab_size_given(args)
    if flags["tokenizer_type"] == "NullTokenizer":
        flags["vocab_size"] = size
    config = tokenizer_config(flags)
    assert config is not None, "there is a type"
    try:
        tokenizer = build_tokenizer(config)
    except UserError as error:
        if not args.dry_run or all(path_of(file).exists() for file in config.files):
            raise
        if size is None:
            *lines, last = error.args
            raise UserError(*lines, f"{last}; {VOCABULARY}") from error
        config = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=size)
        tokenizer, is_here = build_tokenizer(config), False
    return Tokens(config, is_here, tokenizer.vocab_size, tokenizer.eod)


def _fitting_batches(args: Namespace, data_parallel_size: int) -> BatchSchedule:
    fitting = fitting_batches(args, data_parallel_size)
    return take_batches(with_values(args, fitting), data_parallel_size)


# (part of the configuration, function that makes the part), in order. The function's parameters
# name the parts that it needs. The fields of a NamedTuple are parts too, and replace earlier ones.
# If the first function for a part fails, the next function for the same part makes a placeholder,
# so that parts which depend on it are still checked.
_MAKERS: tuple[tuple[str, Callable[..., object]], ...] = (
    ("checkpoint", _filled(CheckpointConfig)),
    ("fusions", _filled(Fusions)),
    ("optim", _filled(OptimConfig)),
    ("checks", _filled(StepChecksConfig)),
    ("report", _filled(ReportConfig)),
    ("profile", _filled(ProfileConfig)),
    ("watch", _filled(WatchConfig)),
    ("runtime", _filled(RuntimeConfig)),
    ("launch", _filled(LaunchConfig)),
    ("world", lambda launch: launch.world()),
    ("data", _filled(DataConfig)),
    ("tokens", take_tokens),
    ("padded_vocab_size", lambda args: args.padded_vocab_size),
    # `data` is a dependency: --seq-length is checked there, and is the default of positions.
    ("model", lambda args, vocab_size, data: take_model(args, vocab_size)),
    ("trainable", lambda args: Trainable.of_flag(args.trainable)),
    ("names", lambda trainable, model: trainable.names(model)),  # refuses unmatched patterns
    ("precision", take_precision),
    ("as_given", lambda precision: precision),
    ("muon", _filled(MuonConfig)),
    ("device_type", lambda runtime: runtime.device_type),
    ("task", TrainingTask),
    (
        "data_parallel_size",
        lambda args, world: data_parallel_size_of(world, args.context_parallel_size),
    ),
    ("data_parallel_size", lambda world: world.size),
    ("fitted", fitted_to_ranks),
    ("sharding_flags", take_sharding),
    ("bits", lambda sharding_flags, as_given: take_inter_bits(sharding_flags.sharding, as_given)),
    ("choices", OpenChoices),
    ("decision", lambda choices: choices.decide()),
    ("batches", take_batches),
    ("batches", _fitting_batches),
    ("train", take_train),
    ("schedule", take_schedule),
    ("loss_scale", take_loss_scale),
    *((check.__name__, check) for check in (*CHECKS, check_in_memory)),
)


class EarlyConfig(NamedTuple):
    """The parts of a configuration by which a process is watched while the others are built."""

    world: World
    launch: LaunchConfig
    watch: WatchConfig
    runtime: RuntimeConfig


def take_early(args: Namespace) -> EarlyConfig:
    """Build the parts that come first; ranks are the launcher's, or those that --dry-run assumes.

    In a dry run a node has the group size of --paro-machine by default (--ranks-per-node).
    """
    launch = take(LaunchConfig, args)
    if not launch.dry_run or args.paro_machine is None:
        world = launch.world()
    else:
        world = launch.world(find_machine(args.paro_machine).group_size)
    return EarlyConfig(world, launch, take(WatchConfig, args), take(RuntimeConfig, args))
