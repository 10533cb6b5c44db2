"""Rules between flags that need nothing but their values, and the folders that they name."""

from __future__ import annotations

import math
import tempfile
from argparse import Namespace
from pathlib import Path

from data.loader import DataConfig
from model.config import LlamaConfig
from paro.checkpoint.config import CheckpointConfig
from paro.checkpoint.directory import newest_whole
from paro.training import TrainConfig


def check_given(args: Namespace) -> None:
    for flag in ("micro_batch_size", "seq_length", "lr"):
        if getattr(args, flag) is None:
            raise ValueError(f"--{flag.replace('_', '-')} is missing")


def check_sequence(model: LlamaConfig, data: DataConfig) -> None:
    if data.seq_length > model.max_position_embeddings:
        raise ValueError(
            f"--seq-length {data.seq_length} is above --max-position-embeddings "
            f"{model.max_position_embeddings}: shorten the one or raise the other"
        )


def check_intervals(train: TrainConfig, checkpoint: CheckpointConfig) -> None:
    for flag, value, least in (
        ("--eval-iters", train.eval_iters, 0),
        ("--eval-interval", train.eval_interval, 0),
        ("--exit-interval", train.exit_interval, 1),
        ("--manual-gc-interval", train.manual_gc_interval, 0),
        ("--save-interval", checkpoint.save_interval, 1),
        ("--save-retain-interval", checkpoint.save_retain_interval, 1),
        ("--ckpt-step", checkpoint.ckpt_step, 0),
    ):
        if value is not None and value < least:
            raise ValueError(f"{flag} {value} must be at least {least}")
    minutes = train.exit_duration_in_mins
    if minutes is not None and not 0.0 < minutes < math.inf:
        raise ValueError(f"--exit-duration-in-mins {minutes} must be a positive number")


def check_load(checkpoint: CheckpointConfig) -> None:
    if not checkpoint.exit_on_missing_checkpoint:
        return
    if checkpoint.load is None:
        raise ValueError("--exit-on-missing-checkpoint needs --load")
    if newest_whole(checkpoint.load) is None:
        raise ValueError(
            f"--load {checkpoint.load} holds no checkpoint, and --exit-on-missing-checkpoint says "
            "not to start afresh"
        )


def check_save(checkpoint: CheckpointConfig) -> None:
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
