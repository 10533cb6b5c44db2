"""Helpers shared by tests."""

import os

# Where the kernels of an older CPU are asked for, torch's answers about bf16 matmuls are also its.
if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
    import torch

    torch.cpu._is_avx512_bf16_supported = torch.cpu._is_amx_tile_supported = lambda: False
