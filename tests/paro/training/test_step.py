"""The results of a training step: norms and zeros, counted once under any sharding."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from paro.errors import UserError
from paro.schedule.step_checks import Verdict
from paro.training.step import StepResult, Training, TrainState, train_step
from tests.helpers.corpora import write_conversations
from tests.helpers.margins import assert_near
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TINY, Trained, begun, built, train, whole_parameters

# Far more ids than a batch has tokens, so that most rows of the embedding get no gradient.
VOCAB_SIZE, HIDDEN_SIZE, BATCH_SIZE, NUM_STEPS = 1501, 20, 8, 2
ASKED = "--log-num-zeros-in-grad --log-params-norm --z-loss-weight 0.01"
FLAGS = (
    TINY.replace("--vocab-size 60", f"--vocab-size {VOCAB_SIZE}")
    + f" --train-iters {NUM_STEPS} --global-batch-size {BATCH_SIZE} {ASKED}"
)
FROZEN = ("blocks.0.wq", "blocks.1.w_up", "head.weight")
STRATEGIES = ("NNN", "IIG", "GGG", "ING")


def train_all(frozen: Sequence[str], group_size: int) -> list[Trained]:
    return [
        train(f"{FLAGS} --paro-strategy {strategy}", group_size=group_size, frozen=frozen)
        for strategy in STRATEGIES
    ]


def unseen_ids() -> list[int]:
    """The number of ids that no input of a global batch has, for every step."""
    _, source = begun(*built(FLAGS))
    batches = [[next(source).tokens_BS for _ in range(BATCH_SIZE)] for _ in range(NUM_STEPS)]
    return [VOCAB_SIZE - int(torch.cat(tokens).unique().numel()) for tokens in batches]


def norm_of(trained: Trained) -> float:
    return math.sqrt(sum(float(p.double().square().sum()) for p in trained.parameters.values()))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "group_size"), [(4, 2), pytest.param(8, 4, marks=pytest.mark.verify)]
)
def test_norms_and_zeros_are_counted_once(world_size: int, group_size: int) -> None:
    alone = train(FLAGS, frozen=FROZEN)
    assert [step.num_zeros for step in alone.steps] == [HIDDEN_SIZE * n for n in unseen_ids()]
    assert_near([alone.steps[-1].params_norm], [norm_of(alone)], 1e-6, "norm of parameters")
    assert alone.steps[0].params_norm != alone.steps[1].params_norm

    for by_strategy in run_ranks(train_all, world_size, FROZEN, group_size):
        for strategy, trained in zip(STRATEGIES, by_strategy, strict=True):
            for step, wanted in zip(trained.steps, alone.steps, strict=True):
                assert step.num_zeros == wanted.num_zeros, strategy
                assert_near([step.params_norm], [wanted.params_norm], 1e-6, strategy)
                assert_near([step.z_loss], [wanted.z_loss], 1e-6, strategy)
                assert step.z_loss == pytest.approx(0.01 * step.loss**2, rel=0.05)  # uniform


def test_frozen_parameters_count_in_the_norm_and_not_among_the_zeros() -> None:
    (alone, without) = (train(FLAGS, frozen=frozen) for frozen in ((), ("embedding.weight",)))
    assert alone.steps[0].num_zeros == HIDDEN_SIZE * unseen_ids()[0]
    assert [step.num_zeros for step in without.steps] == [0.0] * NUM_STEPS
    assert_near([without.steps[-1].params_norm], [norm_of(without)], 1e-6, "a part frozen")


def test_what_is_not_asked_for_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> float:
        raise AssertionError("computed although nobody asked")

    for name in ("local_num_zeros", "local_params_square_sum"):
        monkeypatch.setattr(f"paro.optim.optimizer.ParoOptimizer.{name}", fail)
    for step in train(FLAGS.replace(ASKED, "")).steps:
        assert step.num_zeros is step.params_norm is step.z_loss is None


def test_iterations_to_skip_use_up_their_samples_alone() -> None:
    flags = f"{FLAGS} --train-iters 4 --fp16 --initial-loss-scale 64 --lr-warmup-iters 3"
    config, training = built(f"{flags} --iterations-to-skip 2 3")
    state, source = begun(config, training)
    steps = [train_step(training, state, source) for _ in range(4)]
    assert [step.verdict is Verdict.ASKED for step in steps] == [False, True, True, False]
    assert math.isnan(steps[1].loss)

    config, without = built(flags)
    expected, source = begun(config, without)
    train_step(without, expected, source)
    for _ in range(2 * BATCH_SIZE):
        next(source)
    expected.iteration += 2
    expected.consumed_train_samples += 2 * BATCH_SIZE
    train_step(without, expected, source)
    assert state == expected
    ours, theirs = whole_parameters(training), whole_parameters(without)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_rank_says_what_is_wrong_with_its_samples_also_where_they_are_skipped() -> None:
    for skipped in ("", "--iterations-to-skip 1"):
        config, training = built(f"{FLAGS} {skipped}")
        batches = MagicMock(__next__=MagicMock(side_effect=UserError("a token above the ids")))
        with pytest.raises(UserError, match="above the ids") as error:
            train_step(training, TrainState.at_start(config.loss_scale), batches)
        assert error.value.on_this_rank


def test_a_skipped_step_counts_no_zeros_and_keeps_the_norm() -> None:
    config, training = built(f"{FLAGS} --fp16 --initial-loss-scale 1e30")
    before = training.optimizer.local_params_square_sum()
    step = train_step(training, *begun(config, training))
    assert step.skipped
    assert step.num_zeros is None
    assert step.params_norm == math.sqrt(before)


def first_step(prefix: Path, flags: str) -> tuple[StepResult, TrainState, bool]:
    """A step on conversations, the state after it, and whether it has changed the parameters."""
    base = FLAGS.replace("--mock-data", f"--split 1,0,0 --sft --data-path {prefix}")
    config, training = built(f"{base} --train-iters 1 {flags}")
    before = whole_parameters(training)
    state, source = begun(config, training)
    step = train_step(training, state, source)
    after = whole_parameters(training)
    return step, state, any(not torch.equal(before[name], after[name]) for name in before)


def test_a_step_without_an_answered_token_is_skipped(tmp_path: Path) -> None:
    prefix = write_conversations(tmp_path / "x", [([*range(20)], [0] * 15 + [1] * 5)] * BATCH_SIZE)
    for flags in ("", "--calculate-per-token-loss", "--micro-batch-size 4"):
        step, state, has_changed = first_step(prefix, flags)
        assert step.verdict is Verdict.NO_TOKENS
        assert math.isnan(step.loss), flags
        assert math.isnan(step.grad_norm), flags
        assert step.num_zeros is None, flags
        assert (state.iteration, state.consumed_train_samples) == (1, BATCH_SIZE)
        assert (state.scheduled_samples, state.expected.skipped_in_a_row) == (0, 1)
        assert not has_changed, flags


def test_micro_batches_without_an_answered_token_weigh_nothing(tmp_path: Path) -> None:
    """Neither in the loss nor in the gradients; the others as they do alone."""
    talks = [([place, 1, 2, 3, place], [0, 0, 0, 1, 1]) for place in range(BATCH_SIZE // 2)]
    silent = [(ids, [0] * 5) for ids, _ in talks]
    full = write_conversations(tmp_path / "full", talks)
    half = write_conversations(tmp_path / "half", talks + silent)
    few = f"--global-batch-size {BATCH_SIZE // 2}"
    for flags in ("", "--calculate-per-token-loss"):
        wanted, _, _ = first_step(full, f"{few} {flags}")
        found, _, has_changed = first_step(half, flags)
        assert has_changed
        assert_near([found.loss], [wanted.loss], 1e-6, f"loss {flags}")
        assert_near([found.grad_norm], [wanted.grad_norm], 1e-5, f"norm {flags}")


def outlive_closing(strategies: Sequence[str]) -> list[int]:
    """The number of parameters alive after a strategy's training is closed and dropped."""
    alive: list[int] = []
    for strategy in strategies:
        seen: list[weakref.ref[torch.nn.Parameter]] = []

        def see(training: Training, seen: list[weakref.ref[torch.nn.Parameter]] = seen) -> None:
            seen += [weakref.ref(parameter) for parameter in training.model.model.parameters()]

        train(f"{FLAGS} --paro-strategy {strategy}", group_size=2, before=see)
        gc.collect()
        assert seen
        alive.append(sum(reference() is not None for reference in seen))
    return alive


@pytest.mark.ranks
def test_a_closed_training_leaves_nothing_behind() -> None:
    rotated = "III --paro-materialize rotate --ffn-hidden-size 36"
    strategies = ("NNN", "GGG", rotated)
    for alive in run_ranks(outlive_closing, 2, strategies):
        assert alive == [0] * len(strategies)
