"""On a CPU with AVX-512: comparisons and bits hold as on one without."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers.cpus import WITHOUT_AVX512, cpu_kind
from tests.helpers.ranks import ROOT

FOLDERS = ("paro/optim", "paro/quantization", "paro/sharding", "paro/rotation", "model")
FILES = ("parity", "parity_context", "parity_collectives", "parity_rotation", "planted_faults")


@pytest.mark.verify
@pytest.mark.process
@pytest.mark.timeout(3600)
def test_trainings_and_bits_are_also_those_of_a_cpu_without_avx512() -> None:
    if "AVX512" not in cpu_kind():
        pytest.skip(f"this CPU is one: {cpu_kind()}")
    tests = [*(f"tests/{name}" for name in FOLDERS), *(f"tests/paro/test_{f}.py" for f in FILES)]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=os.environ | WITHOUT_AVX512,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:]
    assert "kernels and quantization, bit by bit: on AVX2 without bf16" in run.stdout
