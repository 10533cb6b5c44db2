"""One GPU trains as the CPU does."""

from __future__ import annotations

import pytest

from tests.helpers.margins import assert_near
from tests.helpers.training import TINY, Trained, train

pytestmark = pytest.mark.gpu

FLAGS = f"{TINY} --train-iters 8 --global-batch-size 8"
ON_GPU = FLAGS.replace("--distributed-backend gloo", "--distributed-backend nccl")


def losses(trained: Trained) -> list[float]:
    return [step.loss for step in trained.steps]


@pytest.mark.parametrize(
    ("more", "tolerance"),
    [
        ("", 1e-4),
        ("--recompute-granularity full", 1e-4),
        ("--bf16", 0.02),
        ("--bf16 --grad-reduce-in-bf16", 0.02),
        ("--fp16 --loss-scale 1024", 0.01),
    ],
)
def test_losses_follow_the_cpu_s(more: str, tolerance: float) -> None:
    on_gpu = train(f"{ON_GPU} {more}")
    assert_near(losses(on_gpu), losses(train(FLAGS)), tolerance, more)
