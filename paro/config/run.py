"""RunConfig: builds and checks the whole configuration of a run from the parsed flags."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from data.config import DataConfig
from data.tokenizer import build_tokenizer
from data.tokenizer_config import TokenizerConfig, tokenizer_config
from model.config import LLAMA_PRESETS, LlamaConfig
from model.fusion import Fusions
from paro.arguments.megatron import changed_parts, ignored_lines
from paro.arguments.needed import missing_flags
from paro.arguments.parser import check_flags
from paro.checkpoint.config import CheckpointConfig
from paro.config.batch_schedule import BatchSchedule, parse_steps
from paro.config.checkpoint import (
    resumed_samples,
    saved_common,
    with_checkpoint_args,
    with_checkpoint_schedule,
)
from paro.config.checks import (
    check_collective,
    check_compile,
    check_fp8,
    check_intervals,
    check_load,
    check_local_copies,
    check_profile,
    check_rotation,
    check_save,
    check_sequence,
    check_trackers,
    flags_without_effect,
)
from paro.config.inter_bits import check_inter_bits, inter_bits_notices
from paro.config.model import take_model
from paro.config.plan import (
    RankDevice,
    case_of,
    check_survival,
    choose,
    take_sharding,
)
from paro.config.sharding import ShardingConfig
from paro.config.train import TrainConfig
from paro.distributed.process_group import RuntimeConfig
from paro.distributed.world import LaunchConfig, World
from paro.errors import UserError
from paro.optim.loss_scale import LossScaleConfig
from paro.optim.lr_schedule import ScheduleConfig
from paro.optim.optimizer import OptimConfig
from paro.optim.step_checks import StepChecksConfig
from paro.planning.machine.files import find_machine
from paro.planning.search.trainable import Trainable
from paro.precision import PrecisionConfig
from paro.report.config import ReportConfig
from paro.report.profiler import ProfileConfig
from paro.report.watchdog import WatchConfig
from paro.strategy import Strategy

Config = TypeVar("Config")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The checked configuration of a run; no code below this file sees the argparse namespace."""

    model: LlamaConfig
    trainable: Trainable
    batches: BatchSchedule
    sharding: ShardingConfig
    strategy: Strategy
    precision: PrecisionConfig
    fusions: Fusions
    optim: OptimConfig
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
    def local_copies_interval(self) -> int | None:
        """Every how many iterations the states are copied to the node's memory; None: never."""
        flags = self.checkpoint
        if flags.non_persistent_ckpt_type is None and not self.sharding.needs_local_copies:
            return None
        return flags.non_persistent_save_interval or 1

    @classmethod
    def from_args(cls, args: Namespace, world: World) -> RunConfig:
        """The configuration for `world`, whose ranks need not exist; `UserError` for mistakes."""
        check_flags(args)
        notices = (*changed_parts(args), *ignored_lines(args), *flags_without_effect(args))
        checkpoint = _take(CheckpointConfig, args)
        common = saved_common(checkpoint)
        if checkpoint.use_checkpoint_args:
            args, lines = _with_saved_args(args, common)
            notices += lines
        sharding, strategy, adapted = take_sharding(args, world)
        notices += adapted
        batches = _take_batches(args, world, checkpoint)
        train = _take_train(args, batches)
        data, tokenizer = _take_data(args), _take_tokenizer(args)
        built = build_tokenizer(tokenizer)
        model, precision = take_model(args, built.vocab_size), _take_precision(args)
        trainable = Trainable.of_flag(args.trainable)
        trainable.names(model)  # refuses patterns that match no parameter
        runtime, launch = _take(RuntimeConfig, args), _take(LaunchConfig, args)
        check_inter_bits(sharding.inter_bits, precision, sharding.group_size, world.size)
        if strategy is None or sharding.inter_bits is not None:
            device = RankDevice(
                "cpu" if runtime.distributed_backend == "gloo" else "cuda", launch.device_memory_gb
            )
            workload = case_of(
                model, batches, sharding, precision, trainable,
                seq_length=data.seq_length, device=device,
            )  # fmt: skip
            strategy, precision, reasons = choose(workload, strategy)
            notices += tuple(reasons)
        if sharding.inter_bits is None:
            notices += inter_bits_notices(precision, sharding.group_size, strategy, world.size)
        config = cls(
            model=model,
            trainable=trainable,
            batches=batches,
            sharding=sharding,
            strategy=strategy,
            precision=precision,
            fusions=_take(Fusions, args),
            optim=_take(OptimConfig, args),
            schedule=_take_schedule(args, batches, train, common),
            loss_scale=_take_loss_scale(args),
            train=train,
            checks=_take(StepChecksConfig, args),
            data=data,
            tokenizer=tokenizer,
            vocab_size=built.vocab_size,
            eod=built.eod,
            checkpoint=checkpoint,
            report=_take(ReportConfig, args),
            profile=_take(ProfileConfig, args, profile_ranks=tuple(args.profile_ranks)),
            watch=_take(WatchConfig, args),
            runtime=runtime,
            launch=launch,
            notices=notices,
            given=vars(args) | {"world_size": world.size, "ranks_per_node": world.ranks_per_node},
        )
        config.check(world)
        return config

    def check(self, world: World) -> None:
        """`UserError` for fields that contradict each other, the model or this machine."""
        check_collective(self.sharding, self.runtime)
        check_rotation(self.sharding, self.strategy, self.model, world.size)
        check_survival(
            self.sharding, self.strategy, self.model, self.trainable, self.precision, world.size
        )
        check_sequence(self.model, self.data)
        check_compile(self.model)
        check_fp8(self.model, self.data, self.batches.micro_batch_size)
        check_intervals(self.train, self.checkpoint)
        check_local_copies(self.checkpoint, self.sharding, self.precision)
        check_profile(self.profile, self.report, self.checkpoint)
        if not self.launch.dry_run:  # they concern the machine that trains
            check_load(self.checkpoint)
            check_save(self.checkpoint, self.train)
            check_trackers(self.report, self.runtime)

    @property
    def trained(self) -> frozenset[str]:
        """The names of the parameters that train; with --skip-train none."""
        return frozenset() if self.train.skip_train else self.trainable.names(self.model)


def take_world(args: Namespace) -> World:
    """The ranks to configure for: those started by the launcher, or those of --dry-run.

    A node of a dry run is a group of --paro-machine, unless --ranks-per-node says otherwise.
    """
    check_flags(args)
    launch = _take(LaunchConfig, args)
    if not launch.dry_run or args.paro_machine is None:
        return launch.world()
    return launch.world(find_machine(args.paro_machine).group_size)


def take_watch(args: Namespace) -> tuple[WatchConfig, RuntimeConfig]:
    """What the watchdog needs, before the other flags are checked."""
    return _take(WatchConfig, args), _take(RuntimeConfig, args)


def _with_saved_args(
    args: Namespace, common: dict[str, Any] | None
) -> tuple[Namespace, tuple[str, ...]]:
    """The flags under --use-checkpoint-args, and a log line if there is no checkpoint."""
    lines: tuple[str, ...] = ()
    if common is None:
        lines = (f"--load {args.load} holds no checkpoint: its sizes are the flags'",)
    else:
        args = with_checkpoint_args(args, common)
    if missing := missing_flags(args, loaded=True):
        raise UserError(*missing)
    return args, lines


def _take(config_type: type[Config], args: Namespace, **derived: Any) -> Config:
    """Fills a config from the arguments of the same names; `derived` gives the other fields."""
    named = {field.name for field in fields(config_type)} - derived.keys()  # type: ignore[arg-type]
    return config_type(**{name: getattr(args, name) for name in named}, **derived)


def _take_batches(args: Namespace, world: World, checkpoint: CheckpointConfig) -> BatchSchedule:
    global_batch_size, steps = args.global_batch_size, None
    if args.step_batch_size_schedule is not None:
        for flag in ("global_batch_size", "rampup_batch_size"):
            if getattr(args, flag) is not None:
                raise UserError(
                    f"--step-batch-size-schedule and --{flag.replace('_', '-')} contradict each "
                    "other: give one of them"
                )
        steps = parse_steps(args.step_batch_size_schedule, args.seq_length)
        global_batch_size = steps[-1][1]
    elif global_batch_size is None:
        global_batch_size = args.micro_batch_size * world.size
    rampup = args.rampup_batch_size
    batches = _take(
        BatchSchedule,
        args,
        global_batch_size=global_batch_size,
        data_parallel_size=world.size,
        rampup_batch_size=None if rampup is None else tuple(rampup),
        step_batch_size_schedule=steps,
    )
    if steps is not None:
        batches.check_from(resumed_samples(checkpoint))
    return batches


def _take_train(args: Namespace, batches: BatchSchedule) -> TrainConfig:
    if args.train_iters is not None and args.train_samples is not None:
        raise UserError("--train-iters and --train-samples contradict each other: give one")
    train_iters = args.train_iters
    if train_iters is None:
        train_iters = batches.iterations_within(args.train_samples)
        if train_iters < 1:
            raise UserError(
                f"--train-samples {args.train_samples} is less than the first global batch of "
                f"{batches.batch_size_at(0)}: there is no iteration to train"
            )
    if train_iters < 1:
        raise UserError(f"--train-iters {train_iters} leaves nothing to train: give 1 or more")
    warmup = args.paro_inter_bits_warmup_iters
    if warmup is not None and warmup < 0:
        raise UserError(f"--paro-inter-bits-warmup-iters {warmup} is negative; 0 is no warm-up")
    return _take(
        TrainConfig,
        args,
        train_iters=train_iters,
        inter_bits_warmup_samples=None if warmup is None else batches.samples_after(warmup),
    )


def _take_schedule(
    args: Namespace, batches: BatchSchedule, train: TrainConfig, common: dict[str, Any] | None
) -> ScheduleConfig:
    train_samples = args.train_samples or batches.samples_after(train.train_iters)
    decay_samples = _samples(args, "lr_decay", batches)
    if decay_samples is None:
        decay_samples = train_samples
    constant = args.weight_decay_incr_style == "constant"
    start, end = args.start_weight_decay, args.end_weight_decay
    if constant and not start is end is None:
        raise UserError(
            "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or "
            "cosine; constant takes --weight-decay"
        )
    if not constant and None in (start, end):
        raise UserError(
            f"--weight-decay-incr-style {args.weight_decay_incr_style} needs both "
            "--start-weight-decay and --end-weight-decay"
        )
    schedule = _take(
        ScheduleConfig,
        args,
        lr_decay_samples=decay_samples,
        lr_warmup_samples=_warmup_samples(args, batches, decay_samples),
        lr_wsd_decay_samples=_samples(args, "lr_wsd_decay", batches),
        start_weight_decay=args.weight_decay if start is None else start,
        end_weight_decay=args.weight_decay if end is None else end,
        weight_decay_incr_samples=train_samples,
    )
    if args.use_checkpoint_opt_param_scheduler and common is not None:
        return with_checkpoint_schedule(schedule, common)
    return schedule


def _samples(args: Namespace, name: str, batches: BatchSchedule) -> int | None:
    """A length in samples that is given by --<name>-iters or --<name>-samples; None by neither."""
    iterations = getattr(args, f"{name}_iters")
    samples: int | None = getattr(args, f"{name}_samples")
    if iterations is None:
        return samples
    if samples is not None:
        flag = "--" + name.replace("_", "-")
        raise UserError(f"{flag}-iters and {flag}-samples contradict each other: give one")
    return batches.samples_after(iterations)


def _warmup_samples(args: Namespace, batches: BatchSchedule, decay_samples: int) -> float:
    fraction = args.lr_warmup_fraction
    if fraction is None:
        return _samples(args, "lr_warmup", batches) or 0
    if args.lr_warmup_iters or args.lr_warmup_samples:
        raise UserError(
            "--lr-warmup-fraction contradicts --lr-warmup-iters and --lr-warmup-samples: give one"
        )
    if not 0.0 <= fraction < 1.0:
        raise UserError(f"--lr-warmup-fraction {fraction} must be in [0, 1)")
    return float(fraction * decay_samples)


def _take_precision(args: Namespace) -> PrecisionConfig:
    if args.fp16 and args.bf16:
        raise UserError("--fp16 and --bf16 contradict each other: give one of them")
    compute = "fp16" if args.fp16 else "bf16" if args.bf16 else "fp32"
    return _take(
        PrecisionConfig,
        args,
        compute=compute,
        inter_param_bits=args.paro_inter_param_bits,
        inter_grad_bits=args.paro_inter_grad_bits,
        inter_grad_error_feedback=args.paro_inter_grad_error_feedback,
    )


def _take_loss_scale(args: Namespace) -> LossScaleConfig:
    return _take(LossScaleConfig, args, dynamic=args.fp16 and args.loss_scale is None)


def _take_data(args: Namespace) -> DataConfig:
    names = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    words = {name: tuple(getattr(args, name)) for name in names}
    return _take(DataConfig, args, **words)


def _take_tokenizer(args: Namespace) -> TokenizerConfig:
    flags = dict(vars(args))
    if args.mock_data and not any((args.tokenizer_type, args.vocab_file, args.merge_file)):
        flags["tokenizer_type"] = "NullTokenizer"
    if flags["tokenizer_type"] == "NullTokenizer" and args.vocab_size is None and args.llama_preset:
        flags["vocab_size"] = LLAMA_PRESETS[args.llama_preset].vocab_size
    config = tokenizer_config(flags)
    assert config is not None, "a missing --tokenizer-type was refused before"
    return config
