"""Every pair of the model's flags trains a step."""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from tests.helpers.training import TINY, train

# fp8 takes sizes that 16 divides.
SMALL = (
    f"{TINY} --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --seq-length 16 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 1"
)
CHOICES = (  # a run has at most one of each
    ("--tie-embeddings-and-output-weights",),
    ("--add-qkv-bias",),
    ("--qk-layernorm",),
    ("--group-query-attention",),
    ("--kv-channels 48",),
    ("--use-rope-scaling",),
    ("--attention-backend unfused",),
    ("--torch-compile aot_eager",),
    (
        "--trainable last-blocks:0.5",
        "--trainable names:*.wq,*.mlp_norm,head.*",
        "--lora-rank 2 --lora-target-modules all-linear",
        "--lora-rank 2 --lora-target-modules down_proj --lora-dropout 0.2",
        "--lora-rank 2 --lora-base-dtype bf16",
    ),
    (
        "--recompute-activations",
        "--recompute-granularity full",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
        "--recompute-granularity full --recompute-num-layers 2",
    ),
    (
        "--bf16",
        "--bf16 --grad-reduce-in-bf16",
        "--bf16 --accumulate-allreduce-grads-in-fp32",
        "--fp16 --initial-loss-scale 64",
    ),
    ("--fp8-format e4m3", "--fp8-format hybrid"),
    ("--reset-position-ids",),
    ("--reset-attention-mask",),
    ("--calculate-per-token-loss",),
)
REFUSED = (("--torch-compile", "--lora-rank"), ("--lora-base-dtype", "--fp16"))


def together(flag: str, other: str) -> bool:
    """Whether a run can have both."""
    refused = any((a in flag and b in other) or (b in flag and a in other) for a, b in REFUSED)
    return not refused and not any({flag, other} <= {*choice} for choice in CHOICES)


def runs_with_every_pair() -> list[tuple[str, ...]]:
    """Few sets of flags, such that any two that go together are in one of them."""
    flags = [flag for choice in CHOICES for flag in choice]
    missing = {pair for pair in combinations(flags, 2) if together(*pair)}
    runs = []
    while missing:
        run = list(min(missing, key=lambda pair: (flags.index(pair[0]), flags.index(pair[1]))))
        while True:
            gains = {
                flag: sum((a, flag) in missing or (flag, a) in missing for a in run)
                for flag in flags
                if flag not in run and all(together(flag, a) for a in run)
            }
            best = max(gains, key=lambda flag: gains[flag], default=None)
            if best is None or gains[best] == 0:
                break
            run.append(best)
        missing -= {pair for pair in missing if {*pair} <= {*run}}
        runs.append(tuple(run))
    return runs


@pytest.mark.slow("may compile")
@pytest.mark.parametrize("flags", runs_with_every_pair(), ids=len)
def test_all_flags_of_a_run_train_together(flags: tuple[str, ...]) -> None:
    (step,) = train(" ".join((SMALL, *flags))).steps
    assert math.isfinite(step.loss), flags
    assert step.grad_norm is not None, flags
    assert 0 < step.grad_norm < math.inf, flags
