"""Runs pretrain_llama.py without a part of a method, to measure the effect of the part."""

# ablated.py WITHOUT ARGS: `transform` sends codes of the gradients themselves, not of their
# Hadamard transforms; `transform+blocks` also has one scale for 2,048 elements, not for 128.
# `whole-matrices`: in most steps Newton-Schulz takes parts of matrices, as MuonBP does on the
# shards of ranks (arXiv 2510.16981). Here parts have equal numbers of rows, on any ranks, and the
# update of each is scaled by its own shape.

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from paro.collectives import quantized
from paro.distributed.user_errors import run_script
from paro.optim import muon
from paro.optim.adamw import StepUpdate
from paro.quantization import blocks, formats
from paro.quantization.formats import PAD
from paro.spec.optim_config import MuonConfig
from pretrain_llama import main as pretrain

WITHOUT = ("transform", "transform+blocks", "whole-matrices")
PARTS = 4  # of a matrix
EVERY = 5  # steps, of which the last takes whole matrices

_whole, _update = muon.orthogonal, muon.MuonStep.update


def scaled(values: Tensor) -> Tensor:
    """Multiply by 32 if applied twice, like `hadamard`, but without mixing values."""
    padded = torch.nn.functional.pad(values, (0, -values.numel() % PAD))
    return padded * PAD**0.5


def in_parts(matrix: Tensor, config: MuonConfig, *square: Any) -> Tensor:
    """Apply Newton-Schulz to each part of a matrix."""
    rows, columns = matrix.shape
    found = []
    for part in matrix.chunk(PARTS):
        scale = config.scale(part.shape[0], columns) / config.scale(rows, columns)
        found.append(_whole(part, config, *square) * scale)
    return torch.cat(found)


def update(self: muon.MuonStep, update: StepUpdate) -> Iterator[int]:
    """Yield a step of Muon, with whole matrices or with parts."""
    muon.orthogonal = _whole if update.step % EVERY == 0 else in_parts  # type: ignore[assignment]
    yield from _update(self, update)


def main() -> None:
    what, *argv = sys.argv[1:]
    assert what in WITHOUT, what
    if what == "whole-matrices":
        muon.MuonStep.update = update  # type: ignore[method-assign]
    else:
        blocks.hadamard = quantized.hadamard = scaled
    if what == "transform+blocks":
        formats.GRADIENT_BLOCK = 2048
    sys.argv = ["pretrain_llama.py", *argv]
    run_script("pretrain_llama.py", pretrain)


if __name__ == "__main__":
    main()
