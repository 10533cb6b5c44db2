"""bf16 and fp16: types of communication and accumulators, loss scaling, skipped steps."""

from __future__ import annotations

import math

import pytest
import torch

from paro.step.actions import Move
from paro.training.step import Training
from tests.helpers.margins import assert_near
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TINY, Trained, train
from tests.paro.test_parity import Variant, assert_formulas, compared, reference_for

FLAGS = f"{TINY} --train-iters 6 --global-batch-size 8"


@pytest.fixture(scope="module")
def fp32() -> Trained:
    return train(FLAGS)


def losses(trained: Trained) -> list[float]:
    return [step.loss for step in trained.steps]


# Gradients accumulated whole, reduced inside groups, and reduced over all ranks.
BF16: list[Variant] = [
    (strategy, f"--bf16 {more}", ())
    for strategy, more in (
        ("NNN", "--accumulate-allreduce-grads-in-fp32"),
        ("NIG", "--grad-reduce-in-bf16"),
        ("GGG", ""),
        ("IIG", ""),
    )
]


@pytest.mark.ranks
def test_bf16_follows_fp32_and_sends_its_types() -> None:
    exact = losses(reference_for())
    for _, flags, _, trained in compared(4, 2, BF16):
        assert_near(losses(trained), exact, 0.002, flags)
        assert_formulas(trained, flags, 4, 2)


@pytest.mark.ranks
def test_fp16_with_a_dynamic_scale_skips_until_the_scale_fits() -> None:
    flags = f"{FLAGS} --fp16 --initial-loss-scale 1073741824 --train-iters 24 --paro-strategy IIG"
    by_rank = run_ranks(train, 4, flags, group_size=2)
    trained = by_rank[0]
    skipped = [step.skipped for step in trained.steps]
    assert skipped[0], "the first scale of 2^30 overflows fp16"
    assert not any(skipped[-4:])
    assert all([step.skipped for step in ranks.steps] == skipped for ranks in by_rank)
    first = skipped.index(False)
    # The same updates as fp32's, started later: data continue, and skipped steps change nothing.
    assert trained.steps[first].loss == pytest.approx(math.log(60), rel=0.05)
    assert trained.steps[-1].loss < trained.steps[first].loss


@pytest.mark.ranks
def test_fp16_with_a_constant_scale_follows_fp32(fp32: Trained) -> None:
    flags = f"{FLAGS} --fp16 --loss-scale 1024 --paro-strategy NIG"
    trained = run_ranks(train, 4, flags, group_size=2)[0]
    assert_near(losses(trained), losses(fp32), 0.001, "losses in fp16")
    norms = [step.grad_norm for step in trained.steps]
    assert_near(norms, [step.grad_norm for step in fp32.steps], 0.01, "norms in fp16")


def train_with_a_bad_rank(bad_rank: int) -> tuple[Trained, Trained]:
    """One run in which a rank has non-finite gradients in the first step, and one without."""

    def poison(training: Training) -> None:
        model, unit = training.model, training.model.trainable_units[1]
        policy, backwards = model.policy, iter(range(10**9))
        original = policy.last_gradient

        def last_gradient(number: int) -> list[Move]:
            is_first = model.units[number] is unit and next(backwards) == 0
            if is_first and training.control.world.rank == bad_rank:
                gradient, _ = unit.grad_view(unit.layout.chunks[0].chunk.name)
                gradient.view(-1)[0] = torch.inf
            return original(number)

        policy.last_gradient = last_gradient  # type: ignore[method-assign]

    flags = f"{FLAGS} --paro-strategy IIG"
    return train(flags, group_size=2, before=poison), train(flags, group_size=2)


@pytest.mark.ranks
@pytest.mark.parametrize("bad_rank", [3])
def test_a_step_that_one_rank_must_skip_is_skipped_by_all(bad_rank: int) -> None:
    for poisoned, clean in run_ranks(train_with_a_bad_rank, 4, bad_rank):
        assert [step.skipped for step in poisoned.steps] == [True] + [False] * 5
        assert not math.isfinite(poisoned.steps[0].grad_norm)
        # The second step starts from the unchanged model.
        assert poisoned.steps[1].loss != clean.steps[1].loss
        assert poisoned.steps[1].loss == pytest.approx(clean.steps[0].loss, rel=0.05)
        assert all(torch.isfinite(values).all() for values in poisoned.parameters.values())
