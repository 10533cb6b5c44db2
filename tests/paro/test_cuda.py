"""Training and kernels on a GPU, and on a CPU without AVX-512, hold as on this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.cpus import WITHOUT_AVX512, cpu_kind
from tests.helpers.margins import assert_near
from tests.helpers.processes import python_apart
from tests.helpers.ranks import ROOT
from tests.helpers.training import TINY, Trained, train

FLAGS = f"{TINY} --train-iters 8 --global-batch-size 8"
ON_GPU = FLAGS.replace("--distributed-backend gloo", "--distributed-backend nccl")


def losses(trained: Trained) -> list[float]:
    return [step.loss for step in trained.steps]


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
FILES = ("parity", "parity_context", "parity_collectives", "parity_rotation", "planted_faults")


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
