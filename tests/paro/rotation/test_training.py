"""Rotating and gathering runs compared: types, evaluation, checkpoints, overlap."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from paro.training.step import evaluate
from tests.helpers.margins import assert_near
from tests.helpers.ranks import run_ranks
from tests.helpers.resharding import Pair, Setting
from tests.helpers.training import Trained, begun, built
from tests.paro.checkpoint.test_resharding import check
from tests.paro.test_parity import train_cases
from tests.paro.test_parity_rotation import IN_PLACE, MODEL, ROTATE

GATHERED = f"{MODEL} --num-attention-heads 4 --global-batch-size 16 --micro-batch-size 2"
ROTATED = f"{GATHERED} {ROTATE}"
BF16 = [
    "--bf16 --paro-strategy IIG --paro-rotate-in-place",
    "--bf16 --paro-strategy III --grad-reduce-in-bf16",
    "--fp16 --loss-scale 1024 --paro-strategy III",
]


def train_each(base: str, more: Sequence[str], group_size: int = 2) -> list[list[Trained]]:
    """The runs of each of four ranks."""
    cases = [(f"{base} --train-iters 2 {each}", ()) for each in more]
    return run_ranks(train_cases, 4, cases, group_size)


@pytest.mark.ranks
def test_two_byte_types_follow_the_gathered_run() -> None:
    rotated = train_each(ROTATED, BF16)
    references = list(dict.fromkeys(flags.replace(IN_PLACE, "").strip() for flags in BF16))
    gathered = train_each(GATHERED, references)[0]
    for number, flags in enumerate(BF16):
        wanted = gathered[references.index(flags.replace(IN_PLACE, "").strip())]
        for by_rank in rotated:
            for step, step_wanted in zip(by_rank[number].steps, wanted.steps, strict=True):
                assert_near([step.loss], [step_wanted.loss], 0.001, flags)
                assert_near([step.grad_norm], [step_wanted.grad_norm], 0.01, flags)
                # Gathers of the embedding and of the head differ; steps between groups do not.
                assert step.sent.inter == pytest.approx(step_wanted.sent.inter, rel=0.2), flags


PLACED = partial(Setting, world_size=4, group_size=2)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            *(PLACED(strategy="IIG", more=ROTATE), PLACED(strategy="GGG")),
            marks=pytest.mark.verify,
            id="to gathered",
        ),
        pytest.param(
            *(PLACED(strategy="NIG"), PLACED(strategy="III", more=f"{ROTATE} {IN_PLACE}")),
            id="from gathered",
        ),
    ],
)
def test_a_checkpoint_moves_between_rotated_and_gathered(
    tmp_path: Path, before: Setting, after: Setting
) -> None:
    check(Pair(before, after, asynchronous=False), tmp_path)


def held_out(cases: Sequence[str]) -> list[float]:
    losses = []
    for flags in cases:
        config, training = built(f"{flags} --train-iters 1 --paro-group-size 2")
        losses.append(evaluate(training, begun(config, training)[1], 2).loss)
        training.close()
    return losses


@pytest.mark.ranks
def test_an_evaluation_is_that_of_the_gathered_run() -> None:
    rotated = [f"{ROTATED} --paro-strategy {more}" for more in ("IIG", f"III {IN_PLACE}")]
    gathered, *others = run_ranks(held_out, 4, [f"{GATHERED} --paro-strategy GGG", *rotated])[0]
    assert_near(others, [gathered] * 2, 2e-6, "evaluated")


@pytest.mark.ranks
@pytest.mark.parametrize(
    "more",
    [
        "--tie-embeddings-and-output-weights",
        pytest.param(IN_PLACE, marks=pytest.mark.verify),
    ],
)
def test_overlap_changes_no_bit(more: str) -> None:
    """Sums have one order."""
    base = f"{ROTATED} --paro-strategy III {more}"
    for prompt, without in train_each(base, ["", "--paro-prefetch-units 0"], group_size=4):
        for step, wanted in zip(without.steps, prompt.steps, strict=True):
            assert (step.loss, step.grad_norm) == (wanted.loss, wanted.grad_norm)
            assert step.sent == wanted.sent
        for name, values in prompt.parameters.items():
            assert torch.equal(values, without.parameters[name]), name
        for step in without.steps:  # without overlap, all time of shifts is exposed
            exposed = step.exposed
            assert min(exposed.gather, exposed.reduce) > 0.0
            assert 0.0 < exposed.intra <= exposed.total
