"""Where the peak of a device comes from."""

import pytest
import torch

from paro.report.flops import find_peak, listed_peak


@pytest.mark.parametrize(
    ("name", "compute", "tflops"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "fp16", 756.5),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100-SXM4-40GB", "fp32", 19.5),
        ("NVIDIA A800-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A10", "bf16", 125.0),
        ("NVIDIA L40S", "bf16", 362.0),
        ("NVIDIA L40", "bf16", 181.0),
        ("NVIDIA L4", "bf16", 121.0),
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
    ],
)
def test_a_known_device_has_its_data_sheets_peak(name: str, compute: str, tflops: float) -> None:
    peak = listed_peak(name, compute)
    assert peak is not None
    assert peak.flops_per_second == tflops * 1e12
    assert "data sheet" in peak.source
    assert name in peak.source


@pytest.mark.parametrize(
    ("name", "compute"),
    [
        ("NVIDIA A10G", "bf16"),
        ("NVIDIA GeForce RTX 4090", "bf16"),
        ("Tesla V100-SXM2-32GB", "bf16"),
    ],
)
def test_nothing_is_guessed(name: str, compute: str) -> None:
    assert listed_peak(name, compute) is None


def test_the_users_word_counts() -> None:
    peak = find_peak(torch.device("cpu"), compute="fp32", peak_tflops=2.5)
    assert peak.flops_per_second == 2.5e12
    assert peak.source == "given by --peak-tflops"


def test_a_cpu_is_timed() -> None:
    peak = find_peak(torch.device("cpu"), compute="fp32", peak_tflops=None)
    # Any machine lies in between, and a wrong unit or count does not.
    assert 1e8 < peak.flops_per_second < 1e14
    assert "timed at start: fp32 matmul" in peak.source
