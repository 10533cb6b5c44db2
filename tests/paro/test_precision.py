"""bf16, fp16 and skipped steps; documents apart on any ranks; training on a GPU and other CPUs."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paro.step.actions import Action
from paro.training.step import Training
from tests.helpers.corpora import write_conversations
from tests.helpers.cpus import WITHOUT_AVX512, cpu_kind
from tests.helpers.margins import assert_near
from tests.helpers.ranks import ROOT, run_ranks
from tests.helpers.scripts import python_apart
from tests.helpers.training import TINY, Trained, train
from tests.paro.test_parity import Variant, assert_formulas, compared, reference_for

FLAGS = f"{TINY} --train-iters 6 --global-batch-size 8"


def losses(trained: Trained) -> list[float]:
    return [step.loss for step in trained.steps]


# Gradients accumulated whole, reduced inside groups, and reduced over all ranks.
TWO_BYTES: list[Variant] = [
    ("NNN", "--bf16 --accumulate-allreduce-grads-in-fp32", ()),
    ("NIG", "--bf16 --grad-reduce-in-bf16", ()),
    ("GGG", "--bf16", ()),
    ("NIG", "--fp16 --loss-scale 1024", ()),
]


def norms(trained: Trained) -> list[float]:
    return [step.grad_norm for step in trained.steps]


@pytest.mark.ranks
def test_two_byte_types_follow_fp32_and_are_sent() -> None:
    exact = reference_for()
    for _, flags, _, trained in compared(4, 2, TWO_BYTES):
        assert_near(losses(trained), losses(exact), 0.002, flags)
        assert_near(norms(trained), norms(exact), 0.02, flags)
        assert_formulas(trained, flags, 4, 2)


@pytest.mark.ranks
def test_fp16_with_a_dynamic_scale_skips_until_the_scale_fits() -> None:
    flags = f"{FLAGS} --fp16 --initial-loss-scale 16777216 --train-iters 12 --paro-strategy IIG"
    by_rank = run_ranks(train, 4, flags, group_size=2)
    trained = by_rank[0]
    skipped = [step.skipped for step in trained.steps]
    assert skipped[0], "the first scale of 2^24 overflows fp16"
    assert not any(skipped[-4:])
    assert all([step.skipped for step in ranks.steps] == skipped for ranks in by_rank)
    first = skipped.index(False)
    # The same updates as fp32's, started later: data continue, and skipped steps change nothing.
    assert trained.steps[first].loss == pytest.approx(math.log(60), rel=0.05)
    assert trained.steps[-1].loss < trained.steps[first].loss


def train_with_a_bad_rank(bad_rank: int) -> tuple[Trained, Trained]:
    """One run in which a rank has non-finite gradients in the first step, and one without."""

    def poison(training: Training) -> None:
        model, unit = training.model, training.model.trainable_units[1]
        policy, backwards = model.policy, iter(range(10**9))
        original = policy.last_gradient

        def last_gradient(number: int) -> list[Action]:
            is_first = model.units[number] is unit and next(backwards) == 0
            if is_first and training.control.world.rank == bad_rank:
                gradient, _ = unit.grad_view(unit.layout.chunks[0].chunk.name)
                gradient.view(-1)[0] = torch.inf
            return original(number)

        policy.last_gradient = last_gradient  # type: ignore[method-assign]

    flags = f"{FLAGS} --train-iters 3 --paro-strategy IIG"
    return train(flags, group_size=2, before=poison), train(flags, group_size=2)


@pytest.mark.ranks
def test_a_step_that_one_rank_must_skip_is_skipped_by_all() -> None:
    for poisoned, clean in run_ranks(train_with_a_bad_rank, 4, 3):
        assert [step.skipped for step in poisoned.steps] == [True, False, False]
        assert not math.isfinite(poisoned.steps[0].grad_norm)
        # The second step starts from the unchanged model.
        assert poisoned.steps[1].loss != clean.steps[1].loss
        assert poisoned.steps[1].loss == pytest.approx(clean.steps[0].loss, rel=0.05)
        assert all(torch.isfinite(values).all() for values in poisoned.parameters.values())


# Documents apart: flags reach the model; results do not depend on ranks

# With 10 ids a tenth of the tokens end a document.
SHORT = f"{TINY} --vocab-size 10 --global-batch-size 8 --train-iters 2"
PACKED = "--reset-position-ids --reset-attention-mask"
APART = f"{SHORT} --eod-mask-loss {PACKED}"


@pytest.mark.slow("trains several times")
def test_every_flag_changes_what_is_learned() -> None:
    plain, *changed = (
        train(f"{SHORT} {flag}").steps[-1].loss for flag in ("", "--eod-mask-loss", *PACKED.split())
    )
    assert len({plain, *changed}) == 4
    assert changed == pytest.approx([plain] * 3, rel=0.2)


def losses_of_runs(runs: list[str], group_size: int | None) -> list[list[float]]:
    return [[step.loss for step in train(run, group_size=group_size).steps] for run in runs]


@pytest.mark.ranks
def test_ranks_make_no_difference(tmp_path: Path) -> None:
    draw = random.Random(0)
    talks = [
        (
            [draw.randrange(10) for _ in range(size)],
            [int(place > size // 2) for place in range(size)],
        )
        for size in (draw.randint(3, 20) for _ in range(40))
    ]
    prefix = write_conversations(tmp_path / "talks", [*talks, ([1, 2, 3], [0, 0, 0])])
    on_talks = f"{SHORT} --data-path {prefix} --split 1,0,0".replace("--mock-data ", "")
    packed = f"{on_talks} {PACKED}"
    padded = f"{on_talks} --sft --calculate-per-token-loss"
    shared = " --num-attention-heads 2 --context-parallel-size 2 --cp-comm-type"
    alone = losses_of_runs([f"{APART} --recompute-granularity full", packed, padded], None)
    runs = [APART, f"{packed}{shared} a2a", f"{padded}{shared} p2p --num-workers 1"]
    for found in run_ranks(losses_of_runs, 4, runs, 2):
        for run, by_rank, wanted in zip(runs, found, alone, strict=True):
            assert_near(by_rank, wanted, 2e-6, run)


ON_GPU = FLAGS.replace("--distributed-backend gloo", "--distributed-backend nccl")


@pytest.mark.gpu
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


MODULES = (
    *("model.test_fusion", "paro.optim.test_adamw", "paro.optim.test_muon"),
    "paro.quantization.test_kernels",
)
RUN_EACH = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(f"tests.{module}").run_on_gpu()
"""


@pytest.mark.gpu
def test_a_gpu_runs_the_kernels(tmp_path: Path) -> None:
    """In a process whose Triton never interpreted."""
    python_apart(RUN_EACH, *MODULES, TRITON_CACHE_DIR=str(tmp_path))


FOLDERS = ("paro/optim", "paro/quantization", "paro/sharding", "paro/rotation", "model")
FILES = ("parity", "parity_context", "parity_rotation", "planted_faults")


@pytest.mark.verify
@pytest.mark.process
@pytest.mark.timeout(3600)
def test_trainings_and_bits_are_also_those_of_a_cpu_without_avx512() -> None:
    if "AVX512" not in cpu_kind():
        pytest.skip(f"this CPU is one: {cpu_kind()}")
    tests = [*(f"tests/{name}" for name in FOLDERS), *(f"tests/paro/test_{f}.py" for f in FILES)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=os.environ | WITHOUT_AVX512,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert "kernels and quantization, bit by bit: on AVX2 without bf16" in done.stdout
