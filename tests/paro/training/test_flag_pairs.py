"""Every pair of the model's flags trains a step; fp8 trains alike on any number of ranks."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path

import pytest

from tests.helpers.margins import assert_near
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TINY, Trained, run_steps, train
from tests.paro.training.test_base import assert_equal, started, trained

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


@pytest.mark.verify
@pytest.mark.slow("may compile")
@pytest.mark.parametrize("flags", runs_with_every_pair(), ids=len)
def test_all_flags_of_a_run_train_together(flags: tuple[str, ...]) -> None:
    (step,) = train(" ".join((SMALL, *flags))).steps
    assert math.isfinite(step.loss), flags
    assert step.grad_norm is not None, flags
    assert 0 < step.grad_norm < math.inf, flags


FP8 = (
    f"{TINY} --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --seq-length 16 "
    "--global-batch-size 4 --train-iters 4"
)
STRATEGIES = ("GGG", "NIG")


def train_all(words: list[str]) -> list[Trained]:
    return [train(f"{FP8} {more}", group_size=2) for more in words]


# Scales are those of a micro-batch, so one process trains with micro-batches of the same size. The
# order of sums differs, and a last bit may round an operand the other way from the second step on.
@pytest.mark.ranks
def test_strategies_train_as_one_process_does() -> None:
    words = [f"--paro-strategy {name} --fp8-format hybrid" for name in STRATEGIES]
    words.append("--paro-strategy IIG --fp8-format hybrid --recompute-granularity full")
    alone = train(f"{FP8} --fp8-format hybrid")
    for by_rank in run_ranks(train_all, 4, words):
        for case, found in zip(words, by_rank, strict=True):
            first, wanted = found.steps[0], alone.steps[0]
            assert_near([first.loss], [wanted.loss], 1e-6, case)
            assert_near([first.grad_norm], [wanted.grad_norm], 1e-5, case)
            losses = ([step.loss for step in run.steps] for run in (found, alone))
            assert_near(*losses, 1e-3, case)


@pytest.mark.slow("trains several times")
@pytest.mark.parametrize("more", ["", "--bf16", "--lora-rank 2 --lora-target-modules all-linear"])
def test_fp8_changes_the_loss_little(more: str) -> None:
    plain = train(f"{FP8} {more}")
    for form in ("e4m3", "hybrid"):
        rounded = train(f"{FP8} {more} --fp8-format {form}")
        for step, wanted in zip(rounded.steps, plain.steps, strict=True):
            assert step.loss != wanted.loss, "nothing was rounded"
            assert step.loss == pytest.approx(wanted.loss, abs=0.02)
            assert step.grad_norm == pytest.approx(wanted.grad_norm, rel=0.1)


@pytest.mark.parametrize("compute", ["", "--bf16"])
def test_it_resumes_bit_for_bit(tmp_path: Path, compute: str) -> None:
    words = f"{compute} --hidden-size 32 --ffn-hidden-size 48 --seq-length 16 --fp8-format hybrid"
    saved = trained(f"{words} --save {tmp_path}")
    config, resumed, _ = started(f"{words} --load {tmp_path}")
    assert_equal(resumed, saved)
    goes_on, begins_anew = (
        [(step.loss, step.grad_norm) for step in run_steps(config, each)]
        for each in (saved, resumed)
    )
    assert goes_on == begins_anew
    assert_equal(resumed, saved)
