"""Helpers shared by tests."""

import os

# Where the kernels of an older CPU are asked for, torch's answers about bf16 matmuls are also its.
if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
    from typing import Any

    import torch

    torch.cpu._is_avx512_bf16_supported = torch.cpu._is_amx_tile_supported = lambda: False
    product_by_onednn = torch._scaled_mm

    def product(*args: Any, **options: Any) -> torch.Tensor:
        """Multiplies in fp8 without oneDNN: torch asks it for what older CPUs do not have."""
        torch._C._set_mkldnn_enabled(False)
        try:
            return product_by_onednn(*args, **options)
        finally:
            torch._C._set_mkldnn_enabled(True)

    torch._scaled_mm = product
