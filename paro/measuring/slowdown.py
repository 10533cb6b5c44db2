"""Times matmuls on a GPU while a kernel in another stream keeps SMs busy, as NCCL's kernels do."""

# Triton would interpret annotations of a kernel's arguments, so there are none.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from statistics import median

import torch
import triton
from triton.language.extra.cuda import globaltimer

_CTAS = (0, 4, 8, 16, 22, 32, 64)
_NANOSECONDS = 20_000_000  # duration of the busy kernel, several times that of the matmuls
_WARPS = 16  # warps per block as in NCCL: a matmul's block does not fit an SM next to one


@triton.jit
def _spin(nanoseconds):
    begin = globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = globaltimer()


def slowed_matmuls(device: torch.device) -> tuple[tuple[int, float], ...]:
    """Time a bf16 matmul of LLaMA-7B next to several numbers of busy thread blocks."""
    a_RK = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    b_KC = torch.randn(4096, 11008, dtype=torch.bfloat16, device=device)
    stream = torch.cuda.Stream(device, priority=-1)

    def milliseconds(ctas: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            if ctas:
                _spin[(ctas,)](_NANOSECONDS, num_warps=_WARPS)
        begin.record()
        for _ in range(4):
            a_RK @ b_KC
        end.record()
        torch.cuda.synchronize(device)
        return begin.elapsed_time(end)

    times = [median([milliseconds(ctas) for _ in range(6)][1:]) for ctas in _CTAS]
    return tuple((n, max(1.0, took / times[0])) for n, took in zip(_CTAS, times, strict=True))
