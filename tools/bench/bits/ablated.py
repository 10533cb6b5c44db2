"""Runs pretrain_llama.py with a part of the codes of gradients taken out, to see what it is for."""

# ablated.py WITHOUT ARGS: `transform` sends codes of the gradients themselves, not of their
# Hadamard transforms; `transform+blocks` also has one scale for 2,048 elements, not for 128.

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from torch import Tensor

from paro.collectives import coded
from paro.distributed.user_errors import run_script
from paro.quantization import blocks, ranges
from paro.quantization.formats import PAD
from pretrain_llama import main as pretrain

WITHOUT = ("transform", "transform+blocks")


def scaled(values: Tensor) -> Tensor:
    """Like `hadamard`, applied twice it gives 32 times the values; but it mixes none."""
    padded = torch.nn.functional.pad(values, (0, -values.numel() % PAD))
    return padded * PAD**0.5


def main() -> None:
    what, *argv = sys.argv[1:]
    assert what in WITHOUT, what
    blocks.hadamard = coded.hadamard = scaled
    if what == "transform+blocks":
        ranges.GRADIENT_BLOCK = 2048
    sys.argv = ["pretrain_llama.py", *argv]
    run_script("pretrain_llama.py", pretrain)


if __name__ == "__main__":
    main()
