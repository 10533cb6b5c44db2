"""The source of a device's peak FLOP/s."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from paro.distributed.control import Control
from paro.distributed.world import World
from paro.report.flops import _timed_peak, find_peak, listed_peak
from paro.report.record import Peak
from tests.helpers.ranks import run_ranks


@pytest.mark.parametrize(
    ("name", "compute", "tflops"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA H800 PCIe", "fp16", 756.5),
        ("NVIDIA A100-SXM4-40GB", "fp32", 19.5),
        ("NVIDIA L40S", "bf16", 362.0),
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("NVIDIA A10G", "bf16", None),  # nothing is guessed
        ("NVIDIA GeForce RTX 4090", "bf16", None),
    ],
)
def test_a_known_device_has_its_data_sheets_peak(
    name: str, compute: str, tflops: float | None
) -> None:
    peak = listed_peak(name, compute)
    assert (peak is None) == (tflops is None)
    assert peak is None or (peak.flops_per_second, name in peak.source) == (tflops * 1e12, True)


CPU = torch.device("cpu")


def find_on_a_rank() -> tuple[Peak, bool]:
    """The peak that a rank uses, and whether it timed it itself."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    with mock.patch("paro.report.flops._timed_peak", wraps=_timed_peak) as timed:
        control = Control(world, CPU)
        peak = find_peak(CPU, compute="fp32", peak_tflops=None, control=control)
    return peak, timed.called


@pytest.mark.ranks
def test_the_first_rank_times_its_cpu_for_all() -> None:
    peaks, timed = zip(*run_ranks(find_on_a_rank, 3), strict=True)
    assert timed == (True, False, False)
    given = find_peak(CPU, compute="fp32", peak_tflops=2.5, control=Control(World(), CPU))
    assert given == Peak(flops_per_second=2.5e12, source="given by --peak-tflops")
    (peak,) = set(peaks)
    # True of any machine, and false for a wrong unit or count.
    assert 1e8 < peak.flops_per_second < 1e14
    assert "timed at start: fp32 matmul" in peak.source
