"""The kind of CPU that tests run on, as far as it decides how torch rounds."""

from __future__ import annotations

import torch

# Makes torch and the libraries under it compute as on a CPU without AVX-512; tests/helpers patches
# what torch says of bf16 matmuls.
WITHOUT_AVX512 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}


def cpu_kind() -> str:
    """Names the vector instructions that torch uses, and whether the CPU multiplies bf16."""
    multiplies = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return f"{torch.backends.cpu.get_cpu_capability()} {'with' if multiplies else 'without'} bf16"
