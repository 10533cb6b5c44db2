"""Compares attention over ranks that share a sample with local attention, before training."""

# Attention that sends nothing, or to the wrong rank, would not stop training: every rank attends to
# its own tokens, at a speed that looks good.

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from model.attention import Documents, documents_of
from model.block_attention import TILE, attend_saving
from model.config import AttentionBackend
from paro.errors import RunError
from paro.spec.context_layout import ContextLayout

_CHUNK = 16  # tokens per chunk of a sample on a CPU
_WITHIN = {torch.float32: 1e-4}  # error / largest value; below: types of 8 mantissa bits or more
_WITHIN_16_BITS = 2.0**-4
_Core = Callable[[Tensor, Tensor, Tensor, Documents | None, None], Tensor]  # without SavedAttention


def check_core(
    core: _Core,
    layout: ContextLayout,
    rank: int,
    example: Tensor,
    backend: AttentionBackend,
    *,
    apart: bool,
) -> None:
    """Raise `RunError` if `core` and local attention differ in outputs or gradients; collective.

    The sample has 2C x 16 tokens (on a GPU 2C x 128) and one head for every rank that exchanges
    heads. Every rank computes local attention to the entire sample. `example` has the dtype, device
    and channels of queries; with `apart` the sample has two documents.
    """
    length = 2 * layout.size * (TILE if example.is_cuda else _CHUNK)
    lengths = (length // 3, length - length // 3) if apart else None
    documents = documents_of(lengths, 1, example.device)
    generator = torch.Generator().manual_seed(0)
    shape = 1, length, layout.heads, example.shape[-1]
    q, k, v, grad = (torch.randn(shape, generator=generator).to(example) for _ in range(4))

    def local(x_BSNH: Tensor) -> Tensor:
        ranges = layout.ranges(rank, length)
        return torch.cat([x_BSNH[:, part.start : part.stop] for part in ranges], 1)

    whole = partial(attend_saving, backend)
    expected = [local(tensor) for tensor in _run(whole, (q, k, v), grad, documents)]
    actual = _run(core, (local(q), local(k), local(v)), local(grad), documents)
    within = _WITHIN.get(example.dtype, _WITHIN_16_BITS)
    for name, one, other in zip(("output", "dq", "dk", "dv"), actual, expected, strict=True):
        error = float((one - other).abs().max() / other.abs().max())
        if not error <= within:  # NaN too
            raise RunError(
                f"rank {rank}: attention over {layout.size} ranks that share a sample is not that "
                f"of one rank: {name} differs by {error:.1e} of its largest value: links or "
                "kernels are at fault; try another --cp-comm-type"
            )


def _run(
    core: _Core, parts: tuple[Tensor, Tensor, Tensor], grad: Tensor, documents: Documents | None
) -> list[Tensor]:
    """Return the output, and the gradients of queries, keys and values."""
    leaves = [part.clone().requires_grad_() for part in parts]
    with torch.enable_grad():
        out = core(leaves[0], leaves[1], leaves[2], documents, None)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]
