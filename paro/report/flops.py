"""Peak TFLOP/s of one device, for MFU: given by the user, from a table, or measured."""

# Dense TFLOP/s (half of the data sheets' figure "with sparsity"): tensor cores with fp32
# accumulation for bf16 and fp16, plain CUDA cores for fp32 since matmuls run without TF32. A dtype
# that a device lacks, or a device that no row matches, is measured instead of guessed.

from __future__ import annotations

import re

import torch

from paro.distributed.control import Control
from paro.distributed.timers import time_of
from paro.report.record import PeakThroughput

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# Regular expression for torch.cuda.get_device_name(), dense TFLOP/s of tensor cores in bf16 and
# fp16, TFLOP/s in fp32, source. The first matching row counts, so variants of a device come before
# the plain name.
_DEVICES = (
    (r"\bB200\b", 2250.0, 75.0, "NVIDIA HGX B200 data sheet"),
    (r"\bH200 NVL\b", 835.5, 60.0, "NVIDIA H200 data sheet"),
    (r"\bG?H200\b", 989.4, 67.0, "NVIDIA H200 and GH200 data sheets"),
    (r"\bH100 NVL\b", 835.5, 60.0, "NVIDIA H100 data sheet"),
    (r"\bH[18]00 PCIe\b", 756.5, 51.0, "NVIDIA H100 data sheet"),
    (r"\bH[18]00\b", 989.4, 67.0, "NVIDIA H100 data sheet, SXM"),
    (r"\bA[18]00\b", 312.0, 19.5, "NVIDIA A100 data sheet"),
    (r"\bA40\b", 149.7, 37.4, "NVIDIA A40 data sheet"),
    (r"\bA30\b", 165.0, 10.3, "NVIDIA A30 data sheet"),
    (r"\bA10\b", 125.0, 31.2, "NVIDIA A10 data sheet"),
    (r"\bL40S\b", 362.0, 91.6, "NVIDIA L40S data sheet"),
    (r"\bL40\b", 181.0, 90.5, "NVIDIA L40 data sheet"),
    (r"\bL4\b", 121.0, 30.3, "NVIDIA L4 data sheet"),
    (r"\bV100-SXM", 125.0, 15.7, "NVIDIA V100 data sheet"),
    (r"\bV100-PCIE", 112.0, 14.0, "NVIDIA V100 data sheet"),
    (r"\bT4\b", 65.0, 8.1, "NVIDIA T4 data sheet"),
)
_WITHOUT_BF16 = r"\bV100-|\bT4\b"


def find_peak(
    device: torch.device, *, compute: str, peak_tflops: float | None, control: Control
) -> PeakThroughput:
    """Return the peak TFLOP/s of matmuls in dtype `compute`, with the source of the number.

    Collective. The first rank finds the peak while other ranks wait, so that a measurement has the
    machine for itself and every rank uses one number.
    """
    peak: PeakThroughput | None = None
    if peak_tflops is not None:
        peak = PeakThroughput(flops_per_second=peak_tflops * 1e12, source="given by --peak-tflops")
    elif device.type == "cuda":
        peak = listed_peak(torch.cuda.get_device_name(device), compute)
    if peak is None and control.world.rank == 0:
        peak = _timed_peak(device, compute)
    return control.gather(peak)[0]


def listed_peak(device_name: str, compute: str) -> PeakThroughput | None:
    """Return the table's peak for a device and a dtype; None if the table has no such entry."""
    for pattern, tensor, fp32, sheet in _DEVICES:
        if re.search(pattern, device_name):
            if compute == "bf16" and re.search(_WITHOUT_BF16, device_name):
                return None
            tflops = fp32 if compute == "fp32" else tensor
            source = f"{sheet}, {compute} dense, for {device_name}"
            return PeakThroughput(flops_per_second=tflops * 1e12, source=source)
    return None


def _timed_peak(device: torch.device, compute: str) -> PeakThroughput:
    """Time square matmuls of growing size until one runs long enough; return the best rate."""
    # Every start on a CPU waits for it: short, as the figure is a hint there.
    size, largest, enough = (2048, 8192, 2e-2) if device.type == "cuda" else (256, 4096, 1e-3)
    seconds = _time_matmul(size, device, compute)
    while seconds < enough and size < largest:
        size *= 2
        seconds = _time_matmul(size, device, compute)
    seconds = min(seconds, *(_time_matmul(size, device, compute) for _ in range(3)))
    threads = f", CPU threads: {torch.get_num_threads()}" if device.type == "cpu" else ""
    return PeakThroughput(
        flops_per_second=2.0 * size**3 / seconds,
        source=f"timed at start: {compute} matmul of {size} x {size}{threads}",
    )


def _time_matmul(size: int, device: torch.device, compute: str) -> float:
    matrix = torch.ones(size, size, dtype=_TYPES[compute], device=device)
    out = torch.empty_like(matrix)
    torch.mm(matrix, matrix, out=out)  # warm-up: the first call also initializes the library
    return time_of(lambda: torch.mm(matrix, matrix, out=out), device).wall
