"""A GPU runs all Triton kernels as torch's operations compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.processes import python_apart

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
