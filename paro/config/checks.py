"""Checks between flags of different configs, and of the folders and packages they name."""

from __future__ import annotations

import importlib.util
import math
import tempfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from model.config import LlamaConfig
from paro.arguments.parser import given
from paro.checkpoint.config import CheckpointConfig
from paro.checkpoint.directory import describe_saved, newest_whole
from paro.config.checkpoint import resumed_samples
from paro.config.plan import check_survival
from paro.config.planned_checks import PLANNED_CHECKS, check_feedback
from paro.config.sharding import ShardingConfig
from paro.config.train import TrainConfig
from paro.distributed.process_group import RuntimeConfig
from paro.distributed.world import LaunchConfig
from paro.errors import UserError, check_least, count_text
from paro.precision import PrecisionConfig
from paro.report.config import ReportConfig
from paro.report.profiler import ProfileConfig
from paro.schedule.batch_schedule import BatchSchedule
from paro.spec.optim_config import MuonConfig, OptimConfig
from paro.spec.units import rotation_infeasible_reason
from paro.strategy import Strategy

_MUON_LR = 0.005  # below it a learning rate is of AdamW's size
# Arguments that have no effect unless the run saves, decays its rate so, and so on.
_SAVING = ("save_interval", "async_save", "no_save_optim", "on_save_failure")
_WSD = ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples")
_SHARED = ("cp_comm_type",)
_MUON = tuple(asdict(MuonConfig()))


def check_moments(optim: OptimConfig, precision: PrecisionConfig) -> None:
    if precision.rounds_moments and optim.adam_implementation == "apex":
        raise UserError(
            "--adam-implementation apex keeps moments in fp32 alone: leave it out, or "
            "--exp-avg-dtype and --exp-avg-sq-dtype"
        )


def check_rotation(sharding: ShardingConfig, strategy: Strategy, model: LlamaConfig) -> None:
    """Raise `UserError` if --paro-materialize rotate does not support this model or strategy."""
    if sharding.materialize != "rotate":
        return
    reason = rotation_infeasible_reason(
        strategy, model, world_size=sharding.world.size, group_size=sharding.world.group_size
    )
    if reason is not None:
        raise UserError(reason)


def check_copy_engine(sharding: ShardingConfig, strategy: Strategy, runtime: RuntimeConfig) -> None:
    """Raise `UserError` if copy engines have nothing to gather inside a node."""
    world, way = sharding.world, (sharding.materialize, sharding.collective)
    gather = world.topology(*strategy.degrees).axes_between(1, strategy.params)
    inside = bool(gather) and gather[0].outer <= min(world.group_size, world.ranks_per_node)
    if runtime.paro_nccl_copy_engine and not (inside and way == ("gather", "native")):
        raise UserError(
            "--paro-nccl-copy-engine is for parameters that are gathered inside a node, axis by "
            f"axis, and there are none: {strategy.name} with --paro-group-size {world.group_size}, "
            f"{count_text(world.ranks_per_node, 'rank')} a node, --paro-materialize {way[0]}, "
            f"--paro-collective {way[1]}; leave it out"
        )


def check_intervals(train: TrainConfig, checkpoint: CheckpointConfig) -> None:
    check_least(
        0,
        eval_iters=train.eval_iters,
        eval_interval=train.eval_interval,
        manual_gc_interval=train.manual_gc_interval,
        ckpt_step=checkpoint.ckpt_step,
    )
    hashes = train.check_weight_hash_across_dp_replicas_interval
    check_least(
        1,
        exit_interval=train.exit_interval,
        check_weight_hash_across_dp_replicas_interval=hashes,
        save_interval=checkpoint.save_interval,
        save_retain_interval=checkpoint.save_retain_interval,
        non_persistent_save_interval=checkpoint.non_persistent_save_interval,
    )
    minutes = train.exit_duration_in_mins
    if minutes is not None and not 0.0 < minutes < math.inf:
        raise UserError(f"--exit-duration-in-mins {minutes} must be a positive number")


def check_sizes(
    batches: BatchSchedule,
    checkpoint: CheckpointConfig,
    sharding: ShardingConfig,
    launch: LaunchConfig,
) -> None:
    """Raise `UserError` for sizes of a batch that changes which do not divide, from --load on.

    A run that may continue from in-memory checkpoints checks it when it knows where.
    """
    copies = checkpoint.non_persistent_ckpt_type or sharding.needs_in_memory_checkpoints
    if batches.changes and (launch.dry_run or not copies):
        batches.check_from(resumed_samples(checkpoint))


def check_in_memory(
    checkpoint: CheckpointConfig, sharding: ShardingConfig, as_given: PrecisionConfig
) -> None:
    """Raise `UserError` for flags of in-memory checkpoints without any, or a restart that would not
    continue."""
    is_local = checkpoint.non_persistent_ckpt_type == "local"
    if not (is_local or sharding.needs_in_memory_checkpoints):
        for flag, value in (
            ("--non-persistent-local-ckpt-dir", checkpoint.non_persistent_local_ckpt_dir),
            ("--non-persistent-save-interval", checkpoint.non_persistent_save_interval),
        ):
            if value is not None:
                raise UserError(f"{flag} needs --non-persistent-ckpt-type local")
        return
    needed_by = "--paro-elastic" if sharding.elastic else "--paro-survive"
    flag = "--non-persistent-ckpt-type local" if is_local else needed_by
    check_feedback(flag, as_given)  # not what one group makes of it: a restart may have more
    if checkpoint.save is not None and not checkpoint.continues:
        raise UserError(
            f"{flag} is for a command that continues when it is started again: give --load "
            f"{checkpoint.save}, the folder of --save"
        )


def check_load(checkpoint: CheckpointConfig) -> None:
    if not checkpoint.exit_on_missing_checkpoint:
        return
    if checkpoint.load is None:
        raise UserError("--exit-on-missing-checkpoint needs --load")
    if newest_whole(checkpoint.load) is None:
        raise UserError(
            f"--load {checkpoint.load} holds no checkpoint, and --exit-on-missing-checkpoint says "
            "not to start afresh"
        )


def check_save(checkpoint: CheckpointConfig, train: TrainConfig) -> None:
    """Fail now, not after hours: creates a temporary file in the nearest existing folder."""
    if checkpoint.save is not None:
        _check_writable("--save", checkpoint.save)
    check_overwriting(checkpoint, train)


def check_overwriting(checkpoint: CheckpointConfig, train: TrainConfig) -> None:
    """Raise `UserError` if a new run would mix its checkpoints with those already in --save."""
    save, load = checkpoint.save, checkpoint.load
    if save is None or train.skip_train or checkpoint.start_over or checkpoint.continues:
        return
    held = describe_saved(save)
    if held is None:
        return
    if checkpoint.saves_where_it_loads:
        raise UserError(
            f"--save {save} holds {held}, and --finetune begins at iteration 0: leave --finetune "
            "out to continue, or give another --save"
        )
    why = "there is no --load" if load is None else f"--load {load} is another folder"
    how = f"--load {save} without --finetune" if checkpoint.finetune else f"--load {save}"
    raise UserError(
        f"--save {save} holds {held}, and {why}: give {how} to continue, another --save, or "
        "--start-over to move them to a folder of their own inside it"
    )


def flags_without_effect(args: Namespace) -> tuple[str, ...]:
    """Return lines for flags that have no effect because the flag they depend on is not given."""
    changed = set(given(vars(args)))
    style, size = f"--lr-decay-style is {args.lr_decay_style}", args.context_parallel_size
    found = []
    for line, is_used, names in (
        ("nothing will be saved: {} no effect without --save DIR", args.save, _SAVING),
        (f"{{}} no effect without --lr-decay-style WSD: {style}", style.endswith("WSD"), _WSD),
        ("{} no effect without --context-parallel-size", size != 1, _SHARED),
        ("{} no effect without --optimizer muon", args.optimizer == "muon", _MUON),
    ):
        flags = ["--" + name.replace("_", "-") for name in names if name in changed]
        if flags and not is_used:
            found.append(line.format(f"{', '.join(flags)} {'has' if len(flags) == 1 else 'have'}"))
    return (*found, *_scale_notice(args))


def _scale_notice(args: Namespace) -> list[str]:
    """Return a line where Muon's update does not fit a learning rate of AdamW's size."""
    if args.optimizer != "muon" or args.muon_extra_scale_factor != 1.0:
        return []
    mode = f"--muon-scale-mode {args.muon_scale_mode}"
    if args.muon_scale_mode == "spectral":
        return [
            f"{mode}: an update is 4 to 5 times as large as AdamW's at the same --lr; "
            "--muon-extra-scale-factor 0.2 makes it as large"
        ]
    if args.lr is not None and args.lr < _MUON_LR:
        return [f"{mode} wants a --lr of about 0.02, and {args.lr:g} is of AdamW's size"]
    return []


def check_trackers(report: ReportConfig, runtime: RuntimeConfig) -> None:
    """Raise `UserError` at the start if a tracker's package is missing or its folder
    not writable."""
    for flag, value, package in (
        ("--tensorboard-dir", report.tensorboard_dir, "tensorboard"),
        ("--wandb-project", report.wandb_project, "wandb"),
        ("--terminal live", report.terminal if report.terminal == "live" else None, "rich"),
    ):
        if value is not None and importlib.util.find_spec(package) is None:
            raise UserError(
                f"{flag} needs the package {package}: pip install {package}, or leave it out"
            )
    for flag, folder in (
        ("--tensorboard-dir", report.tensorboard_dir),
        ("--wandb-save-dir", report.wandb_save_dir),
        ("--flight-recorder-dir", runtime.flight_recorder_dir),
    ):
        if folder is not None:
            _check_writable(flag, folder)


def check_profile(
    profile: ProfileConfig, report: ReportConfig, checkpoint: CheckpointConfig
) -> None:
    if report.log_progress and checkpoint.save is None:
        raise UserError("--log-progress needs --save: its file is progress.txt in that folder")
    if profile.use_pytorch_profiler and not (report.tensorboard_dir or checkpoint.save):
        raise UserError("--use-pytorch-profiler needs --tensorboard-dir, or --save, for its trace")


def _check_writable(flag: str, place: str) -> None:
    folder = Path(place).absolute()
    try:
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            raise UserError(f"{flag} {place}: {folder} is a file, not a folder")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        # /proc and similar file systems report "No such file or directory", which would mislead.
        missing = isinstance(error, FileNotFoundError)
        reason = "files cannot be created there" if missing else error.strerror
        raise UserError(f"{flag} {place} cannot be written: {folder}: {reason}") from error


# Between fields of a RunConfig, each of which a check names as its parameter.
CHECKS: tuple[Callable[..., None], ...] = (
    *PLANNED_CHECKS,
    check_copy_engine,
    check_rotation,
    check_survival,
    check_moments,
    check_intervals,
    check_profile,
    check_sizes,
)
