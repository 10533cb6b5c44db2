"""Trains like pretrain_llama.py, but with Newton-Schulz of parts of matrices in most steps."""

# MuonBP (arXiv 2510.16981) orthogonalizes what each rank holds, and whole matrices every few
# steps. Here parts are as many rows, on any ranks. The update of a part is scaled by its own shape.

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pretrain_llama
from paro.distributed.user_errors import run_script
from paro.optim import matrices
from paro.optim.muon_config import MuonConfig

PARTS = 4
EVERY = 5  # so many steps, whole matrices

_whole, _update = matrices.orthogonal, matrices.MuonStep.update


def in_parts(matrix: Tensor, config: MuonConfig) -> Tensor:
    """What Newton-Schulz makes of each part, beside each other."""
    rows, columns = matrix.shape
    parts = [_whole(part, config) for part in matrix.chunk(PARTS)]
    scales = [config.scale(part.shape[0], columns) / config.scale(rows, columns) for part in parts]
    return torch.cat([part * scale for part, scale in zip(parts, scales, strict=True)])


def update(self: matrices.MuonStep, *, step: int, **more: Any) -> Iterator[int]:
    """A step of Muon, with whole matrices or with parts."""
    matrices.orthogonal = _whole if step % EVERY == 0 else in_parts
    yield from _update(self, step=step, **more)


def main() -> None:
    """Trains with the flags of pretrain_llama.py."""
    matrices.MuonStep.update = update  # type: ignore[method-assign]
    pretrain_llama.main()


if __name__ == "__main__":
    run_script("blockwise_muon.py", main)
