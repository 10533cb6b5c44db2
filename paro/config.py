"""From the flags to frozen dataclasses, one per concern; every rule between two concerns."""

from __future__ import annotations

import math
import tempfile
from argparse import Namespace
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from data.loader import DataConfig
from data.tokenizer import TokenizerConfig, build_tokenizer, padded_vocab_size
from model.config import LLAMA_PRESETS, LlamaConfig, RecomputeConfig
from paro.batch_schedule import BatchSchedule
from paro.checkpoint.config import CheckpointConfig
from paro.checkpoint.directory import find_checkpoint
from paro.compatibility import check_compatibility
from paro.optim.loss_scale import LossScaleConfig
from paro.optim.lr_schedule import ScheduleConfig
from paro.optim.optimizer import OptimConfig
from paro.planning.machine import Machine
from paro.planning.machine_file import read_machine
from paro.precision import PrecisionConfig
from paro.report.config import ReportConfig
from paro.runtime import RuntimeConfig, World
from paro.sharding.wrap import ShardingConfig
from paro.strategy import Strategy, check_group_size, parse_strategy
from paro.training import TrainConfig

Config = TypeVar("Config")

DEFAULT_STRATEGY = "IIG"
DISTRIBUTED_OPTIMIZER_STRATEGY = "NNG"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """All that a run is told, checked; nothing below this file sees the namespace."""

    model: LlamaConfig
    batches: BatchSchedule
    sharding: ShardingConfig
    strategy: Strategy
    precision: PrecisionConfig
    optim: OptimConfig
    schedule: ScheduleConfig
    loss_scale: LossScaleConfig
    train: TrainConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    vocab_size: int  # the tokenizer's; the model's is padded
    eod: int  # the token that ends a document
    checkpoint: CheckpointConfig
    report: ReportConfig
    runtime: RuntimeConfig
    notices: tuple[str, ...]  # flags that were accepted and have no effect, a line each

    @classmethod
    def from_args(cls, args: Namespace, world: World) -> RunConfig:
        """The configuration for `world` ranks, which need not exist; `ValueError` for mistakes."""
        notices = check_compatibility(args)
        _check_given(args)
        sharding, strategy = _take_sharding(args, world)
        batches = _take_batches(args, world)
        train = _take_train(args, batches)
        data = _take_data(args)
        tokenizer = _take_tokenizer(args)
        built = build_tokenizer(tokenizer)
        vocab_size = built.vocab_size
        config = cls(
            model=_take_model(args, vocab_size),
            batches=batches,
            sharding=sharding,
            strategy=strategy,
            precision=_take_precision(args),
            optim=_take(OptimConfig, args),
            schedule=_take_schedule(args, batches, train),
            loss_scale=_take_loss_scale(args),
            train=train,
            data=data,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            eod=built.eod,
            checkpoint=_take(CheckpointConfig, args),
            report=_take(ReportConfig, args),
            runtime=_take(RuntimeConfig, args),
            notices=notices,
        )
        _check_sequence(config.model, config.data)
        _check_intervals(config.train, config.checkpoint)
        _check_load(config.checkpoint)
        _check_save(config.checkpoint)
        return config


def _take(config_type: type[Config], args: Namespace, **derived: Any) -> Config:
    """Fill a concern from the arguments of the same names; `derived` are fields no flag owns."""
    named = {field.name for field in fields(config_type)} - derived.keys()  # type: ignore[arg-type]
    return config_type(**{name: getattr(args, name) for name in named}, **derived)


def _take_sharding(args: Namespace, world: World) -> tuple[ShardingConfig, Strategy]:
    group_size = world.ranks_per_node if args.paro_group_size is None else args.paro_group_size
    check_group_size(world.size, group_size)
    text = args.paro_strategy
    if text is None:
        zero1 = args.use_distributed_optimizer
        text = DISTRIBUTED_OPTIMIZER_STRATEGY if zero1 else DEFAULT_STRATEGY
    strategy = parse_strategy(text, world_size=world.size, group_size=group_size)
    if args.use_distributed_optimizer and strategy.degrees != (1, 1, world.size):
        raise ValueError(
            f"--use-distributed-optimizer means --paro-strategy {DISTRIBUTED_OPTIMIZER_STRATEGY} "
            f"and contradicts --paro-strategy {args.paro_strategy}: give one of them"
        )
    sharding = ShardingConfig(
        strategy=text,
        group_size=group_size,
        collective=args.paro_collective,
        prefetch_units=args.paro_prefetch_units,
        machine=_read_machine(args.paro_machine, world, group_size),
    )
    return sharding, strategy


def _read_machine(file: str | None, world: World, group_size: int) -> Machine | None:
    if file is None:
        return None
    machine = read_machine(Path(file))
    if (machine.world_size, machine.group_size) != (world.size, group_size):
        raise ValueError(
            f"--paro-machine {file} was measured on {machine.world_size} ranks in groups of "
            f"{machine.group_size}, this run has {world.size} in groups of {group_size}: measure "
            "it here with tools/bench_collectives.py --machine-file"
        )
    return machine


def _take_batches(args: Namespace, world: World) -> BatchSchedule:
    global_batch_size = args.global_batch_size
    if global_batch_size is None:
        global_batch_size = args.micro_batch_size * world.size
    rampup = args.rampup_batch_size
    return BatchSchedule(
        micro_batch_size=args.micro_batch_size,
        global_batch_size=global_batch_size,
        data_parallel_size=world.size,
        rampup_batch_size=None if rampup is None else tuple(rampup),
    )


def _take_train(args: Namespace, batches: BatchSchedule) -> TrainConfig:
    if args.train_iters is not None and args.train_samples is not None:
        raise ValueError("--train-iters and --train-samples contradict each other: give one")
    if args.train_iters is None and args.train_samples is None:
        raise ValueError("how long to train is missing: give --train-iters or --train-samples")
    train_iters = args.train_iters
    if train_iters is None:
        train_iters = batches.iterations_within(args.train_samples)
        if train_iters < 1:
            raise ValueError(
                f"--train-samples {args.train_samples} is less than the first global batch of "
                f"{batches.batch_size_at(0)}: there is no iteration to train"
            )
    if train_iters < 1:
        raise ValueError(f"--train-iters {train_iters} leaves nothing to train: give 1 or more")
    return _take(TrainConfig, args, train_iters=train_iters)


def _take_schedule(args: Namespace, batches: BatchSchedule, train: TrainConfig) -> ScheduleConfig:
    train_samples = args.train_samples or batches.samples_after(train.train_iters)
    decay_samples = _samples(args, "lr_decay", batches)
    if decay_samples is None:
        decay_samples = train_samples
    constant = args.weight_decay_incr_style == "constant"
    start, end = args.start_weight_decay, args.end_weight_decay
    if (start is None or end is None) and not (constant and start is end is None):
        raise ValueError(
            f"--weight-decay-incr-style {args.weight_decay_incr_style} needs both "
            "--start-weight-decay and --end-weight-decay"
        )
    return _take(
        ScheduleConfig,
        args,
        lr_decay_samples=decay_samples,
        lr_warmup_samples=_warmup_samples(args, batches, decay_samples),
        lr_wsd_decay_samples=_samples(args, "lr_wsd_decay", batches),
        start_weight_decay=args.weight_decay if start is None else start,
        end_weight_decay=args.weight_decay if end is None else end,
        weight_decay_incr_samples=train_samples,
    )


def _samples(args: Namespace, name: str, batches: BatchSchedule) -> int | None:
    """A length that two flags may give, one in iterations and one in samples."""
    iterations = getattr(args, f"{name}_iters")
    samples: int | None = getattr(args, f"{name}_samples")
    if iterations is None:
        return samples
    if samples is not None:
        flag = "--" + name.replace("_", "-")
        raise ValueError(f"{flag}-iters and {flag}-samples contradict each other: give one")
    return batches.samples_after(iterations)


def _warmup_samples(args: Namespace, batches: BatchSchedule, decay_samples: int) -> float:
    fraction = args.lr_warmup_fraction
    if fraction is None:
        return _samples(args, "lr_warmup", batches) or 0
    if args.lr_warmup_iters or args.lr_warmup_samples:
        raise ValueError(
            "--lr-warmup-fraction contradicts --lr-warmup-iters and --lr-warmup-samples: give one"
        )
    if not 0.0 <= fraction < 1.0:
        raise ValueError(f"--lr-warmup-fraction {fraction} must lie in [0, 1)")
    return float(fraction * decay_samples)


def _take_precision(args: Namespace) -> PrecisionConfig:
    if args.fp16 and args.bf16:
        raise ValueError("--fp16 and --bf16 contradict each other: give one of them")
    compute = "fp16" if args.fp16 else "bf16" if args.bf16 else "fp32"
    return _take(PrecisionConfig, args, compute=compute)


def _take_loss_scale(args: Namespace) -> LossScaleConfig:
    return _take(LossScaleConfig, args, dynamic=args.fp16 and args.loss_scale is None)


def _take_data(args: Namespace) -> DataConfig:
    names = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    words = {name: tuple(getattr(args, name)) for name in names}
    return _take(DataConfig, args, **words)


def _take_tokenizer(args: Namespace) -> TokenizerConfig:
    tokenizer_type, vocab_size = args.tokenizer_type, args.vocab_size
    if tokenizer_type is None and args.mock_data:
        tokenizer_type = "NullTokenizer"
    if tokenizer_type is None:
        raise ValueError("--tokenizer-type is missing; only --mock-data needs none")
    if tokenizer_type == "NullTokenizer" and vocab_size is None and args.llama_preset:
        # Its last id ends documents, so that the model has the published vocabulary exactly.
        vocab_size = LLAMA_PRESETS[args.llama_preset].vocab_size - 1
    return _take(TokenizerConfig, args, tokenizer_type=tokenizer_type, vocab_size=vocab_size)


def _take_model(args: Namespace, vocab_size: int) -> LlamaConfig:
    """Explicit sizes over the preset's; what neither gives follows from the others."""
    names = {field.name for field in fields(LlamaConfig)} - {"vocab_size", "recompute"}
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    sizes = given
    if args.llama_preset is not None:
        sizes = _published_sizes(LLAMA_PRESETS[args.llama_preset], given) | given
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if name not in sizes:
            raise ValueError(f"--{name.replace('_', '-')} is missing; --llama-preset gives it too")
    hidden_size, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    defaults = {
        "ffn_hidden_size": 8 * hidden_size // 3 // 64 * 64,
        "num_query_groups": _num_query_groups(args, heads),
        "kv_channels": hidden_size // max(heads, 1),
        "max_position_embeddings": args.seq_length,
    }
    if "kv_channels" not in sizes and hidden_size != heads * defaults["kv_channels"]:
        raise ValueError(
            f"--hidden-size {hidden_size} is not divisible by --num-attention-heads {heads}: "
            "change one, or give --kv-channels"
        )
    return LlamaConfig(
        **(defaults | sizes),
        vocab_size=padded_vocab_size(vocab_size, args.make_vocab_size_divisible_by),
        recompute=_take_recompute(args),
    )


def _published_sizes(preset: LlamaConfig, given: dict[str, Any]) -> dict[str, Any]:
    """The preset's sizes, without those that follow from others where the others were changed."""
    sizes = {field.name: getattr(preset, field.name) for field in fields(preset)}
    del sizes["vocab_size"], sizes["recompute"]
    if "hidden_size" in given or "num_attention_heads" in given:
        del sizes["kv_channels"]
        if preset.num_query_groups == preset.num_attention_heads:
            del sizes["num_query_groups"]
    return sizes


def _num_query_groups(args: Namespace, heads: int) -> int:
    grouped = args.group_query_attention or args.llama_preset is not None
    if args.num_query_groups not in (None, heads) and not grouped:
        raise ValueError(
            f"--num-query-groups {args.num_query_groups} needs --group-query-attention"
        )
    return 1 if args.group_query_attention else heads


def _take_recompute(args: Namespace) -> RecomputeConfig | None:
    granularity = args.recompute_granularity
    if args.recompute_activations:
        if granularity == "full":
            raise ValueError(
                "--recompute-activations means --recompute-granularity selective and contradicts "
                "full: give one of them"
            )
        granularity = "selective"
    detail = {"method": args.recompute_method, "num_layers": args.recompute_num_layers}
    given = {name: value for name, value in detail.items() if value is not None}
    if given and granularity != "full":
        raise ValueError(
            "--recompute-method and --recompute-num-layers need --recompute-granularity full"
        )
    return None if granularity is None else RecomputeConfig(granularity=granularity, **given)


def _check_given(args: Namespace) -> None:
    for flag in ("micro_batch_size", "seq_length", "lr"):
        if getattr(args, flag) is None:
            raise ValueError(f"--{flag.replace('_', '-')} is missing")


def _check_sequence(model: LlamaConfig, data: DataConfig) -> None:
    if data.seq_length > model.max_position_embeddings:
        raise ValueError(
            f"--seq-length {data.seq_length} is above --max-position-embeddings "
            f"{model.max_position_embeddings}: shorten the one or raise the other"
        )


def _check_intervals(train: TrainConfig, checkpoint: CheckpointConfig) -> None:
    for flag, value, least in (
        ("--eval-iters", train.eval_iters, 0),
        ("--eval-interval", train.eval_interval, 0),
        ("--exit-interval", train.exit_interval, 1),
        ("--manual-gc-interval", train.manual_gc_interval, 0),
        ("--save-interval", checkpoint.save_interval, 1),
    ):
        if value is not None and value < least:
            raise ValueError(f"{flag} {value} must be at least {least}")
    minutes = train.exit_duration_in_mins
    if minutes is not None and not 0.0 < minutes < math.inf:
        raise ValueError(f"--exit-duration-in-mins {minutes} must be a positive number")


def _check_load(checkpoint: CheckpointConfig) -> None:
    if not checkpoint.exit_on_missing_checkpoint:
        return
    if checkpoint.load is None:
        raise ValueError("--exit-on-missing-checkpoint needs --load")
    if find_checkpoint(checkpoint.load) is None:
        raise ValueError(
            f"--load {checkpoint.load} holds no checkpoint, and --exit-on-missing-checkpoint says "
            "not to start afresh"
        )


def _check_save(checkpoint: CheckpointConfig) -> None:
    """Fail now rather than after hours: write a nameless file into the nearest folder there is."""
    if checkpoint.save is None:
        return
    folder = Path(checkpoint.save).absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise ValueError(f"--save {checkpoint.save}: {folder} is a file, not a folder")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"--save {checkpoint.save} cannot be written: {folder}: {error.strerror}"
        ) from error
