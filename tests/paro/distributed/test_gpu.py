"""A GPU or a driver that this torch cannot use is one line that says why."""

from __future__ import annotations

import os
import warnings

import pytest
import torch

from paro.distributed.process_group import _runs, check_gpu
from tests.helpers.refusals import refused

TOO_OLD = "CUDA initialization: The NVIDIA driver on your system is too old (found version 12020)"


@pytest.fixture
def v100s(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Four of them, for which this torch has kernels."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "V100")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_70", "sm_80", "sm_90a"])
    return monkeypatch


def test_a_rank_has_the_gpu_of_its_number(v100s: pytest.MonkeyPatch) -> None:
    v100s.setenv("PYTORCH_ALLOC_CONF", "")  # set, so that it is restored
    v100s.delenv("PYTORCH_ALLOC_CONF")
    v100s.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    assert check_gpu(3) == torch.device("cuda:3")
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    refused(lambda: check_gpu(4), "local rank 4 has no GPU: torch sees 4")
    v100s.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "compute_120"])
    told = "has no kernels for V100, of compute capability 7.0: it was built for sm_75, sm_80"
    refused(lambda: check_gpu(0), told)


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_80", (8, 6), True),
        ("sm_86", (8, 0), False),
        ("sm_90", (10, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_100a", (10, 3), False),
        ("compute_90", (10, 0), True),
        ("compute_120", (10, 0), False),
        ("gfx942", (9, 4), False),
    ],
)
def test_which_code_runs_where(arch: str, capability: tuple[int, int], *, runs: bool) -> None:
    assert _runs(arch, capability) == runs


@pytest.mark.parametrize(
    ("cuda", "warned", "told"),
    [
        ("13.0", TOO_OLD, "too old (found version 12020) ... CUDA 13.0, 580 or newer"),
        ("12.8", None, "a driver for CUDA 12.8, 525 or newer, and CUDA_VISIBLE_DEVICES may hide"),
        ("14.0", None, "a driver for CUDA 14.0, and CUDA_VISIBLE_DEVICES"),
        (None, None, "is built without CUDA; give --distributed-backend gloo"),
    ],
)
def test_why_torch_sees_none(
    cuda: str | None, warned: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_available() -> bool:
        if warned is not None:
            warnings.warn(f"{warned}\nPlease update it.", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    refused(lambda: check_gpu(0), told)
