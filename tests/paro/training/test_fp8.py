"""Training with matmuls in fp8: the same on any number of ranks, close to training without."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.margins import assert_near
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TINY, Trained, run_steps, train
from tests.paro.training.test_base import assert_equal, started, trained

FLAGS = (
    f"{TINY} --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --seq-length 16 "
    "--global-batch-size 4 --train-iters 4"
)
STRATEGIES = ("GGG", "NIG")


def train_all(words: list[str]) -> list[Trained]:
    return [train(f"{FLAGS} {more}", group_size=2) for more in words]


# Scales are those of a micro-batch, so one process trains with micro-batches of the same size. The
# order of sums differs, and a last bit may round an operand the other way from the second step on.
@pytest.mark.ranks
def test_strategies_train_as_one_process_does() -> None:
    words = [f"--paro-strategy {name} --fp8-format hybrid" for name in STRATEGIES]
    words.append("--paro-strategy IIG --fp8-format hybrid --recompute-granularity full")
    alone = train(f"{FLAGS} --fp8-format hybrid")
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
    plain = train(f"{FLAGS} {more}")
    for form in ("e4m3", "hybrid"):
        rounded = train(f"{FLAGS} {more} --fp8-format {form}")
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
