"""All Triton kernels compile for GPUs, and a GPU runs them as torch's operations compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.triton_kernels import run_apart

MODULES = ("model.test_fusion", "paro.optim.test_adamw", "paro.quantization.test_kernels")


@pytest.mark.process
@pytest.mark.parametrize(
    "capabilities",
    # Later GPUs have what the oldest have; casts to fp8 are always compiled for one that has fp8.
    [(80,), pytest.param((80, 90), marks=pytest.mark.verify)],
)
def test_kernels_compile_for_gpus(tmp_path: Path, capabilities: tuple[int, ...]) -> None:
    run_apart(MODULES, "compile_all", tmp_path, *capabilities)


@pytest.mark.gpu
def test_a_gpu_runs_the_kernels(tmp_path: Path) -> None:
    run_apart(MODULES, "run_on_gpu", tmp_path)
