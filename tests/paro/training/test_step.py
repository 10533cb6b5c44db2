"""A step: norms and zeros counted once, every pair of the model's flags, and fp8."""

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
from paro.schedule.step_checks import StepVerdict
from paro.training.step import StepResult, Training, TrainState, train_step
from tests.helpers.corpora import write_conversations
from tests.helpers.margins import assert_near
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TINY, Trained, begun, built, run_steps, train, whole_parameters
from tests.paro.training.test_base import assert_equal, started, trained

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


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "group_size"), [(4, 2), pytest.param(8, 4, marks=pytest.mark.verify)]
)
def test_norms_and_zeros_are_counted_once(world_size: int, group_size: int) -> None:
    alone = train(FLAGS, frozen=FROZEN)
    _, source = begun(*built(FLAGS))
    for step in alone.steps:  # rows of ids that no input of the global batch has
        tokens = torch.cat([next(source).tokens_BS for _ in range(BATCH_SIZE)])
        assert step.num_zeros == HIDDEN_SIZE * (VOCAB_SIZE - tokens.unique().numel())
    norm = math.hypot(*(float(values.double().norm()) for values in alone.parameters.values()))
    assert_near([alone.steps[-1].params_norm], [norm], 1e-6, "norm of parameters")
    assert alone.steps[0].params_norm != alone.steps[1].params_norm

    for by_strategy in run_ranks(train_all, world_size, FROZEN, group_size):
        for strategy, found in zip(STRATEGIES, by_strategy, strict=True):
            for step, wanted in zip(found.steps, alone.steps, strict=True):
                assert step.num_zeros == wanted.num_zeros, strategy
                assert_near([step.params_norm], [wanted.params_norm], 1e-6, strategy)
                assert_near([step.z_loss], [wanted.z_loss], 1e-6, strategy)
                assert step.z_loss == pytest.approx(0.01 * step.loss**2, rel=0.05)  # uniform


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
    assert [step.verdict is StepVerdict.ASKED for step in steps] == [False, True, True, False]
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
        assert step.verdict is StepVerdict.NO_TOKENS
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


# Every pair of the model's flags trains a step; fp8 trains alike on any number of ranks

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
    refused = any((a in flag and b in other) or (b in flag and a in other) for a, b in REFUSED)
    return not refused and not any({flag, other} <= {*choice} for choice in CHOICES)


FLAGS_OF_A_MODEL = [flag for choice in CHOICES for flag in choice]


@pytest.mark.verify
@pytest.mark.slow("may compile")
@pytest.mark.parametrize("flag", FLAGS_OF_A_MODEL)
def test_every_two_flags_of_a_model_train_together(flag: str) -> None:
    others = FLAGS_OF_A_MODEL[FLAGS_OF_A_MODEL.index(flag) + 1 :]
    for both in (f"{flag} {other}" for other in others if together(flag, other)):
        (step,) = train(f"{SMALL} {both}").steps
        assert math.isfinite(step.loss), both
        assert 0 < step.grad_norm < math.inf, both


FP8 = (
    f"{TINY} --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --seq-length 16 "
    "--global-batch-size 4 --train-iters 4"
)
IN_FP8 = ("GGG", "NIG")


def train_in_fp8(words: list[str]) -> list[Trained]:
    return [train(f"{FP8} {more}", group_size=2) for more in words]


# Scales are those of a micro-batch, so one process trains with micro-batches of the same size. The
# order of sums differs, and a last bit may round an operand the other way from the second step on.
@pytest.mark.ranks
def test_strategies_train_as_one_process_does() -> None:
    words = [f"--paro-strategy {name} --fp8-format hybrid" for name in IN_FP8]
    words.append("--paro-strategy IIG --fp8-format hybrid --recompute-granularity full")
    alone = train(f"{FP8} --fp8-format hybrid")
    for by_rank in run_ranks(train_in_fp8, 4, words):
        for case, found in zip(words, by_rank, strict=True):
            first, wanted = found.steps[0], alone.steps[0]
            assert_near([first.loss], [wanted.loss], 1e-6, case)
            assert_near([first.grad_norm], [wanted.grad_norm], 1e-5, case)
            losses = ([step.loss for step in run.steps] for run in (found, alone))
            assert_near(*losses, 1e-3, case)


@pytest.mark.slow("trains several times")
@pytest.mark.parametrize("more", ["--bf16", "--lora-rank 2 --lora-target-modules all-linear"])
def test_fp8_changes_the_loss_little(more: str) -> None:
    plain = train(f"{FP8} {more}")
    for form in ("e4m3", "hybrid"):
        rounded = train(f"{FP8} {more} --fp8-format {form}")
        for step, wanted in zip(rounded.steps, plain.steps, strict=True):
            assert step.loss != wanted.loss, "nothing was rounded"
            assert step.loss == pytest.approx(wanted.loss, abs=0.02)
            assert step.grad_norm == pytest.approx(wanted.grad_norm, rel=0.1)


def test_it_resumes_bit_for_bit(tmp_path: Path) -> None:
    words = "--bf16 --hidden-size 32 --ffn-hidden-size 48 --seq-length 16 --fp8-format hybrid"
    saved = trained(f"{words} --save {tmp_path}")
    config, resumed, _ = started(f"{words} --load {tmp_path}")
    assert_equal(resumed, saved)
    goes_on, begins_anew = (
        [(step.loss, step.grad_norm) for step in run_steps(config, each)]
        for each in (saved, resumed)
    )
    assert goes_on == begins_anew
    assert_equal(resumed, saved)
