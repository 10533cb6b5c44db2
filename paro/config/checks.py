"""Checks between flags of different configs, and of the folders and packages that they name."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path

from model.config import LlamaConfig
from model.hugging_face import hugging_face_config
from model.trainable import Trainable, matching
from model.units import BY_VOCABULARY, parameter_shapes
from paro.checkpoint.config import CheckpointConfig
from paro.checkpoint.directory import describe_saved
from paro.config.elastic import check_strategy
from paro.config.planned_checks import PLANNED_CHECKS, check_feedback
from paro.config.sharding import ShardingConfig, bits_given
from paro.config.train import TrainConfig
from paro.distributed.process_group import RuntimeConfig
from paro.distributed.world import LaunchConfig
from paro.errors import UserError, about, contradiction, count_text
from paro.files.atomic_file import check_absent
from paro.files.object_store import StorePath, is_url, path_of
from paro.precision import PrecisionConfig
from paro.report.config import ReportConfig
from paro.report.profiler import ProfileConfig
from paro.schedule.batch_schedule import BatchSchedule
from paro.schedule.lr_schedule import ScheduleConfig
from paro.spec.optim_config import OptimConfig
from paro.spec.param_groups import FLAG
from paro.strategy import Strategy


def check_groups(
    schedule: ScheduleConfig, optim: OptimConfig, model: LlamaConfig, trainable: Trainable
) -> None:
    """Raise `UserError` if a pattern, a group or --decoupled-lr concerns nothing that trains."""
    undecided = trained = trainable.names(model)
    for group in optim.groups().groups:
        flag = f"{FLAG} names:{','.join(group.patterns)}"
        names = trained.intersection(matching(FLAG, group.patterns, list(parameter_shapes(model))))
        if not names:
            raise UserError(f"{flag} has only frozen parameters: leave the group out")
        if undecided.isdisjoint(names):
            raise UserError(
                f"{flag}: groups before it have all its parameters, and the first decides: put it "
                "before them, or leave it out"
            )
        undecided -= names
    decoupled_lr = schedule.decoupled_lr
    if decoupled_lr is not None and trained.isdisjoint(BY_VOCABULARY):
        raise UserError(
            f"--decoupled-lr {decoupled_lr:g} is the learning rate of embedding and output "
            "layer, which are frozen: leave it out"
        )


def check_moments(optim: OptimConfig, precision: PrecisionConfig) -> None:
    if precision.rounds_moments and optim.adam_implementation == "apex":
        raise UserError(
            "--adam-implementation apex keeps moments in fp32 alone: leave it out, or "
            "--exp-avg-dtype and --exp-avg-sq-dtype"
        )


def check_average(train: TrainConfig, optim: OptimConfig) -> None:
    """Raise `UserError` if a run averages no weights, or evaluates averages without having any."""
    first = optim.ema_start or optim.ema_interval
    if optim.ema_decay is not None and first > train.train_iters and not train.skip_train:
        raise UserError(
            f"--ema-decay {optim.ema_decay:g} averages nothing: weights are averaged first after "
            f"iteration {first} (--ema-start, --ema-interval), and the last is {train.train_iters}"
        )
    if optim.eval_ema and train.skip_train:
        reason = (
            "nothing is averaged; convert_checkpoint.py --weights ema makes a model to evaluate"
        )
        raise contradiction("--eval-ema", "--skip-train", reason)


def check_trace(train: TrainConfig, model: LlamaConfig) -> None:
    if train.trace_nan and model.torch_compile is not None:
        reason = "compiled operations cannot be told apart"
        raise contradiction("--trace-nan", f"--torch-compile {model.torch_compile}", reason)


def check_copy_engine(sharding: ShardingConfig, strategy: Strategy) -> None:
    """Raise `UserError` if --paro-nccl-copy-engine has no all-gather inside a node to speed up."""
    world, way = sharding.world, (sharding.materialize, sharding.collective)
    gather = world.topology(*strategy.degrees).axes_between(1, strategy.params)
    inside = bool(gather) and gather[0].outer <= min(world.group_size, world.ranks_per_node)
    if sharding.nccl_copy_engine and not (inside and way == ("gather", "native")):
        raise UserError(
            "--paro-nccl-copy-engine is for parameters that are gathered inside a node, axis by "
            f"axis, and there are none: {strategy.name} with --paro-group-size {world.group_size}, "
            f"{count_text(world.ranks_per_node, 'rank')} a node, --paro-materialize {way[0]}, "
            f"--paro-collective {way[1]}; leave it out"
        )


def check_outer(sharding: ShardingConfig, precision: PrecisionConfig) -> None:
    """Raise `UserError` for flags with which groups cannot train alone (--paro-outer-steps)."""
    if sharding.outer is None:
        return
    flag = f"--paro-outer-steps {sharding.outer.outer_steps}"
    if precision.quantizes:
        reason = "groups send nothing in a step; --paro-outer-bits is of rounds"
        raise contradiction(flag, bits_given(precision)[0], reason)
    if precision.ema_decay is not None:
        reason = "groups that train alone have no weights in common"
        raise contradiction(flag, f"--ema-decay {precision.ema_decay:g}", reason)
    if precision.optimizer_cpu_offload:
        raise contradiction(flag, "--optimizer-cpu-offload", "rounds need masters on the device")
    if sharding.elastic:
        reason = (
            "after a loss groups that train alone continue on as many ranks as before, with "
            "--non-persistent-ckpt-type local from their own copies"
        )
        raise contradiction(flag, "--paro-elastic", reason)


def keeps_copies(checkpoint: CheckpointConfig, sharding: ShardingConfig) -> bool:
    """Return whether in-memory checkpoints are on, with which a run without --save continues."""
    is_given = checkpoint.non_persistent_ckpt_type is not None
    return is_given or sharding.survive > 0 or sharding.elastic


def check_sizes(
    batches: BatchSchedule,
    checkpoint: CheckpointConfig,
    sharding: ShardingConfig,
    launch: LaunchConfig,
) -> None:
    """Raise `UserError` if a later size of a changing batch does not divide over the ranks.

    Sizes that a resumed run has passed are not checked. A run with in-memory checkpoints makes
    this check later, when the iteration that it resumes from is known.
    """
    if batches.changes and (launch.dry_run or not keeps_copies(checkpoint, sharding)):
        batches.check_from(checkpoint.resumed_samples)


def check_in_memory(
    checkpoint: CheckpointConfig, sharding: ShardingConfig, as_given: PrecisionConfig
) -> None:
    """Raise `UserError` for flags of in-memory checkpoints that are off, or without --load."""
    if not keeps_copies(checkpoint, sharding):
        for flag, value in (
            ("--non-persistent-local-ckpt-dir", checkpoint.non_persistent_local_ckpt_dir),
            ("--non-persistent-save-interval", checkpoint.non_persistent_save_interval),
        ):
            if value is not None:
                raise UserError(f"{flag} needs --non-persistent-ckpt-type local")
        return
    is_local = checkpoint.non_persistent_ckpt_type == "local"
    needed_by = "--paro-elastic" if sharding.elastic else "--paro-survive"
    flag = "--non-persistent-ckpt-type local" if is_local else needed_by
    check_feedback(flag, as_given)  # bits as given: a restart may have more groups than this run
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
    if checkpoint.saved is None:
        raise UserError(
            f"--load {checkpoint.load} holds no checkpoint, and --exit-on-missing-checkpoint says "
            "not to start afresh"
        )


def check_overwriting(checkpoint: CheckpointConfig, train: TrainConfig) -> None:
    """Raise `UserError` if a new run would mix its checkpoints with those already in --save."""
    save, load = checkpoint.save, checkpoint.load
    if save is None or train.skip_train or checkpoint.start_over or checkpoint.continues:
        return
    held = describe_saved(path_of(save))
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


def check_export(
    checkpoint: CheckpointConfig, model: LlamaConfig, train: TrainConfig, sharding: ShardingConfig
) -> None:
    """Raise `UserError` if --save-hf names a folder of a model that no run can write there."""
    if checkpoint.save_hf is None:
        return
    flag, target = f"--save-hf {checkpoint.save_hf}", Path(checkpoint.save_hf)
    if train.skip_train:
        raise contradiction(flag, "--skip-train", "nothing is trained")
    save = checkpoint.save
    if save is not None and path_of(save).resolve().is_relative_to(target.resolve()):
        raise UserError(f"{flag} must not be or hold --save {save}: give another folder")
    if save is not None and target.name.startswith("iter_") and target.parent == Path(save):
        raise UserError(f"{flag} is where a checkpoint goes: give another folder")
    if model.lora is not None:
        raise UserError(
            f"{flag} does not merge adapters: leave it out, and give --merge or --to peft to "
            "tools/convert_checkpoint.py"
        )
    with about(f"{flag}: "):
        hugging_face_config(model)
    if not (checkpoint.continues or keeps_copies(checkpoint, sharding)):
        check_absent("--save-hf", target)  # no earlier start of this run has written it


def check_outputs(
    checkpoint: CheckpointConfig, report: ReportConfig, runtime: RuntimeConfig
) -> None:
    """Raise `UserError` if a folder is not writable, or the package of a tracker is missing."""
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
        ("--save", checkpoint.save),
        ("--save-hf", checkpoint.save_hf),
        ("--tensorboard-dir", report.tensorboard_dir),
        ("--wandb-save-dir", report.wandb_save_dir),
        ("--flight-recorder-dir", runtime.flight_recorder_dir),
    ):
        if folder is not None:
            _check_writable(flag, folder)


def check_profile(
    profile: ProfileConfig, report: ReportConfig, checkpoint: CheckpointConfig
) -> None:
    save = checkpoint.save if checkpoint.save is None or not is_url(checkpoint.save) else None
    if report.log_progress and save is None:
        raise UserError(
            "--log-progress needs --save, a local folder: its file is progress.txt there"
        )
    if profile.use_pytorch_profiler and not (report.tensorboard_dir or save):
        raise UserError(
            "--use-pytorch-profiler needs --tensorboard-dir, or a local --save, for its trace"
        )


def _check_writable(flag: str, path: str) -> None:
    folder = path_of(path).absolute()
    if isinstance(folder, StorePath):
        return  # the lock of a run is its first object
    try:
        while not folder.exists():
            if folder.is_symlink():
                raise UserError(f"{flag} {path}: {folder} links to a folder that is not there")
            folder = folder.parent
        if not folder.is_dir():
            raise UserError(f"{flag} {path}: {folder} is a file, not a folder")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        # /proc and similar file systems report "No such file or directory", which would mislead.
        missing = isinstance(error, FileNotFoundError)
        reason = "files cannot be created there" if missing else error.strerror
        raise UserError(f"{flag} {path} cannot be written: {folder}: {reason}") from error


# The checks between fields of RunConfig. A check's parameters name the fields that it compares.
CHECKS: tuple[Callable[..., None], ...] = (
    *PLANNED_CHECKS,
    check_trace,
    check_average,
    check_outer,
    check_copy_engine,
    check_strategy,
    check_groups,
    check_moments,
    check_profile,
    check_sizes,
    check_export,
)
