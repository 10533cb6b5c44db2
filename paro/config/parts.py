"""The parts of a run's configuration, each from the parsed flags."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from math import gcd
from typing import Any

from paro.arguments.parser import take
from paro.config.train import TrainConfig
from paro.errors import UserError, check_least, contradiction, flag_of
from paro.files.schema import conform
from paro.layout import round_up
from paro.precision import PrecisionConfig
from paro.schedule.batch_schedule import BatchSchedule, parse_steps
from paro.schedule.loss_scale import LossScaleConfig
from paro.schedule.lr_schedule import ScheduleConfig

_MOST = 10**6  # above this global batch size no alternative sizes are searched


def with_values(args: Namespace, values: Mapping[str, object]) -> Namespace:
    """Return the arguments with some values changed."""
    return Namespace(**vars(args) | dict(values))


def take_batches(
    args: Namespace, data_parallel_size: int, micro_batch_size: int | None = None
) -> BatchSchedule:
    """Build the schedule of batch sizes; `UserError` where they do not fit the ranks."""
    size, steps = micro_batch_size or args.micro_batch_size, None
    global_batch_size = args.global_batch_size
    if args.step_batch_size_schedule is not None:
        for flag in ("global_batch_size", "rampup_batch_size"):
            if getattr(args, flag) is not None:
                raise contradiction("--step-batch-size-schedule", flag_of(flag))
        steps = parse_steps(args.step_batch_size_schedule, args.seq_length)
        global_batch_size = steps[-1][1]
    if global_batch_size is None:  # a micro-batch of every data-parallel rank
        global_batch_size = size * data_parallel_size
        if args.paro_elastic:
            raise UserError(
                "--paro-elastic keeps the global batch where the ranks change: give it, such as "
                f"--global-batch-size {global_batch_size}, a multiple for every number of ranks"
            )
    return take(
        BatchSchedule,
        args,
        micro_batch_size=size,
        global_batch_size=global_batch_size,
        data_parallel_size=data_parallel_size,
        step_batch_size_schedule=steps,
        evaluates=args.eval_iters > 0,
    )


def fitting_batches(args: Namespace, data_parallel_size: int) -> dict[str, object]:
    """Shrink the micro-batch, else enlarge batches, until micro-batches divide over all ranks."""
    micro, whole = args.micro_batch_size, args.global_batch_size
    steps = args.step_batch_size_schedule
    if micro < 1 or (whole is not None and not 0 < whole < _MOST):
        return {}
    if whole is not None and whole % data_parallel_size == 0:
        micro = gcd(micro, whole // data_parallel_size)
    unit = micro * data_parallel_size
    values: dict[str, object] = {"micro_batch_size": micro}
    if steps is not None:
        values |= {"global_batch_size": None, "step_batch_size_schedule": _steps(steps, unit)}
    elif whole is not None:
        values["global_batch_size"] = whole = round_up(whole, unit)
        if args.rampup_batch_size is not None:
            start, increment, samples = args.rampup_batch_size
            start = min(round_up(max(start, 1), unit), whole)
            increment = min(round_up(max(increment, 1), unit), max(whole - start, unit))
            while start < whole and (whole - start) % increment:
                increment += unit
            values["rampup_batch_size"] = [start, increment, samples]
    return values


def _steps(text: str, unit: int) -> str:
    """Round the sizes of a step schedule up to multiples of `unit`; return wrong text unchanged."""
    steps = [entry.partition(":") for entry in text.replace(",", " ").split()]
    if not all(size.isdecimal() for *_, size in steps):
        return text
    return " ".join(f"{begin}:{round_up(int(size), unit)}" for begin, _, size in steps)


def take_train(args: Namespace, batches: BatchSchedule) -> TrainConfig:
    if args.train_iters is not None and args.train_samples is not None:
        raise contradiction("--train-iters", "--train-samples")
    train_iters, warmup = args.train_iters, args.paro_inter_bits_warmup_iters
    if train_iters is None:
        train_iters = batches.iterations_within(args.train_samples)
        if train_iters < 1:
            raise UserError(
                f"--train-samples {args.train_samples} is less than the first global batch of "
                f"{batches.batch_size_at(0)}: there is no iteration to train"
            )
    check_least(0, "is no warm-up", paro_inter_bits_warmup_iters=warmup)
    return take(
        TrainConfig,
        args,
        train_iters=train_iters,
        inter_bits_warmup_samples=None if warmup is None else batches.samples_after(warmup),
    )


def take_schedule(
    args: Namespace, batches: BatchSchedule, train: TrainConfig, common: Mapping[str, Any]
) -> ScheduleConfig:
    train_samples = args.train_samples or batches.samples_after(train.train_iters)
    decay_samples = _samples(args, "lr_decay", batches)
    decay_samples = train_samples if decay_samples is None else decay_samples
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
    schedule = take(
        ScheduleConfig,
        args,
        lr_decay_samples=decay_samples,
        lr_warmup_samples=_warmup_samples(args, batches, decay_samples),
        lr_wsd_decay_samples=_samples(args, "lr_wsd_decay", batches),
        start_weight_decay=args.weight_decay if start is None else start,
        end_weight_decay=args.weight_decay if end is None else end,
        weight_decay_incr_samples=train_samples,
    )
    saved = common.get("schedule") if args.use_checkpoint_opt_param_scheduler else None
    if saved is None:  # a converted model's checkpoint has no schedule
        return schedule
    kept: ScheduleConfig = conform(saved, ScheduleConfig, "--load: schedule in common.json")
    return kept


def _samples(args: Namespace, name: str, batches: BatchSchedule) -> int | None:
    """Return a length in samples, given by --<name>-iters or --<name>-samples; else None."""
    iterations = getattr(args, f"{name}_iters")
    samples: int | None = getattr(args, f"{name}_samples")
    if iterations is None:
        return samples
    if samples is not None:
        flag = flag_of(name)
        raise contradiction(f"{flag}-iters", f"{flag}-samples")
    return batches.samples_after(iterations)


def _warmup_samples(args: Namespace, batches: BatchSchedule, decay_samples: int) -> float:
    fraction = args.lr_warmup_fraction
    if fraction is None:
        return _samples(args, "lr_warmup", batches) or 0
    for unit in ("iters", "samples"):
        if getattr(args, f"lr_warmup_{unit}"):
            raise contradiction("--lr-warmup-fraction", f"--lr-warmup-{unit}")
    if not 0.0 <= fraction < 1.0:
        raise UserError(f"--lr-warmup-fraction {fraction} must be in [0, 1)")
    return float(fraction * decay_samples)


def take_precision(args: Namespace) -> PrecisionConfig:
    if args.fp16 and args.bf16:
        raise contradiction("--fp16", "--bf16")
    compute = "fp16" if args.fp16 else "bf16" if args.bf16 else "fp32"
    return take(PrecisionConfig, args, compute=compute)


def take_loss_scale(args: Namespace) -> LossScaleConfig:
    return take(LossScaleConfig, args, dynamic=args.fp16 and args.loss_scale is None)
