"""A Triton kernel that moves the bytes of a collective, for as long as its links take."""

# Triton reads annotations of a kernel's arguments as its own: they have none.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from paro.machine.collective_time import TimedJob
from paro.topology import Link
from tools.bench.link_model.links import link_of

_BLOCK = 8192  # elements that a thread block moves at a time
_NUM_WARPS = 16  # of a thread block, as of NCCL's
_MOST_CTAS = 64


@triton.jit
def _carry(
    source,
    target,
    staging,
    idle_at,
    end,
    total,
    source_numel,
    target_numel,
    scale,
    duration,
    busy,
    SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block, blocks = tl.program_id(0), tl.cdiv(total, BLOCK)
    if block == 0:  # it books the link, which carries one transfer at a time
        tl.atomic_max(idle_at, globaltimer())
        tl.atomic_xchg(end, tl.atomic_add(idle_at, busy) + duration)
    over = tl.atomic_add(end, 0)
    while over == 0:
        over = tl.atomic_add(end, 0)
    begin = over - duration
    lasts = over - begin  # in 64 bits
    at = tl.arange(0, BLOCK)
    staged = staging + block * BLOCK + at
    while block < blocks:
        due = begin + lasts * block // blocks  # bytes move over the whole time
        while globaltimer() < due:
            due += 0
        index = block.to(tl.int64) * BLOCK + at
        value = tl.load(source + index % source_numel, mask=index < total, other=0)
        if SCALES:
            value = (value.to(tl.float32) * scale).to(value.dtype)
        tl.store(target + index, value, mask=index < target_numel)
        # What goes to other ranks passes through a buffer of the thread block.
        tl.store(staged, value, mask=(index >= target_numel) & (index < total))
        block += tl.num_programs(0)
    while globaltimer() < over:
        over += 0


def carry(
    target: Tensor,
    source: Tensor,
    job: TimedJob | None,
    *,
    scale: int,
    num_bytes: int,
    num_ctas: int,
) -> None:
    """Fill `target` with `source`, repeated and scaled, on the current stream.

    It moves `num_bytes`, at least the target's, on `num_ctas` thread blocks, and lasts as long as
    `job`, after earlier ones on its links.
    """
    device, num_ctas = target.device, min(num_ctas, _MOST_CTAS)
    link, busy = (Link.INTRA, 0.0) if job is None else link_of(job)
    duration = 0 if job is None else round(job.seconds * 1e9)
    if scale == 1:  # the bytes, of any type
        both = (target, source)
        is_whole = all(one.nbytes % 8 == 0 and one.data_ptr() % 8 == 0 for one in both)
        word = torch.int64 if is_whole else torch.uint8
        target, source = (one.view(-1).view(word) for one in both)
    _carry[(num_ctas,)](
        source,
        target,
        _buffer(device, target.dtype),
        _idle_at(device)[link],
        torch.zeros(1, dtype=torch.int64, device=device),
        max(num_bytes // target.element_size(), target.numel()),
        source.numel(),
        target.numel(),
        scale,
        duration,
        round(duration * busy),
        SCALES=scale != 1,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )


@cache
def _buffer(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.empty(_MOST_CTAS * _BLOCK, dtype=dtype, device=device)


@cache
def _idle_at(device: torch.device) -> dict[Link, Tensor]:
    """Return the time at which each kind of link is idle, in nanoseconds of the GPU's timer."""
    return {link: torch.zeros(1, dtype=torch.int64, device=device) for link in Link}
