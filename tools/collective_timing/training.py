"""The training that times the device of a machine file, from flags of pretrain_llama.py."""

from __future__ import annotations

from paro.arguments.parser import parse_args
from paro.config.run import RunConfig, configure
from paro.distributed.world import World

SMALL = "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128"
LARGE = "--llama-preset 7B --num-layers 2 --seq-length 2048 --bf16"


def training_config(flags: str, backend: str) -> RunConfig:
    """Return one rank's training with one micro-batch a step; `UserError` for invalid flags."""
    words = flags.split()
    if "--micro-batch-size" not in words:
        words += ["--micro-batch-size", "1"]
    size = words[words.index("--micro-batch-size") + 1]
    words += ["--global-batch-size", size, "--distributed-backend", backend, "--mock-data"]
    words += ["--tokenizer-type", "NullTokenizer", "--train-iters", "1000", "--lr", "1e-5"]
    words += ["--paro-strategy", "NNN"]
    if "--llama-preset" not in words and "--vocab-size" not in words:
        words += ["--vocab-size", "4096"]
    return configure(parse_args(words), World())
