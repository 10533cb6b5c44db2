"""Checkpoints of small models as the trainer writes them, and their conversion by the tool."""

from __future__ import annotations

from pathlib import Path

from paro.config.run import RunConfig
from paro.training.step import Training
from tests.helpers.training import built, save_run
from tools.convert_checkpoint import main

SIZES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --init-method-std 0.3 "
    "--micro-batch-size 1 --train-iters 1 --lr 0.1 --distributed-backend gloo --mock-data"
)


def trained(folder: Path, *flags: str) -> tuple[RunConfig, Training]:
    """A run as the trainer builds it."""
    return built([*SIZES.split(), "--save", str(folder), *flags])


def save_untrained(folder: Path, flags: str) -> Path:
    """A checkpoint of the untrained model."""
    save_run(*trained(folder, *flags.split()))
    return folder


def convert(source: str, target: str, there: Path, here: Path, *words: object) -> Path:
    """Runs tools/convert_checkpoint.py; returns the folder that it has made."""
    given = ["--from", source, "--to", target, "--input", there, "--output", here, *words]
    main([*map(str, given)])
    return here
