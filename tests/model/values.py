"""Seeded values, how near two tensors are, and a sink that collects a weight's gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from model.config import LlamaConfig
from model.matmul import GradSink

SMALL = LlamaConfig(
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=44,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=4,
    max_position_embeddings=32,
    vocab_size=50,
)


def attention_by_definition(
    q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, lengths: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in fp64, causal, with documents of these lengths apart."""
    batch, seq, heads, channels = q_BSNH.shape
    repeats = heads // k_BSKH.shape[2]
    k_BSNH, v_BSNH = (part.double().repeat_interleave(repeats, 2) for part in (k_BSKH, v_BSKH))
    seen = torch.ones(1, seq, seq, dtype=torch.bool, device=q_BSNH.device).tril()
    if lengths is not None:
        number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        number_BS = number.view(batch, seq).to(q_BSNH.device)
        seen = seen & (number_BS[:, :, None] == number_BS[:, None])
    scores = torch.einsum("bsnh,btnh->bnst", q_BSNH.double(), k_BSNH) * channels**-0.5
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    out = torch.einsum("bnst,btnh->bsnh", scores.softmax(-1), v_BSNH)
    return out, scores.logsumexp(-1).transpose(1, 2)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype)


def assert_near(
    found: Tensor | None, wanted: Tensor | None, label: str = "", *, within: float = 1e-5
) -> None:
    """Equal to `within` of the largest value."""
    assert found is not None, label
    assert wanted is not None, label
    assert found.shape == wanted.shape, label
    error = (found.float() - wanted.float()).abs().max() / wanted.float().abs().max()
    assert error <= within, f"{label}: {error:.1e}"


def all_near(
    found: Iterable[Tensor | None], wanted: Iterable[Tensor | None], *, within: float = 1e-5
) -> None:
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert_near(one, other, f"number {number}", within=within)


def assert_rounded(
    found: Iterable[Tensor | None], exact: Iterable[Tensor | None], dtype: torch.dtype
) -> None:
    """Of this type, and as far from the exact values as its rounding allows."""
    for one, other in zip(found, exact, strict=True):
        assert other is not None
        assert one.dtype == dtype
        error = torch.linalg.vector_norm(one.float() - other)
        assert error < 2 * torch.finfo(dtype).eps * torch.linalg.vector_norm(other)


def flops_of(run: Callable[[], object]) -> int:
    """Those that torch counts, attention's included, which it counts as matrix products alone."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


class Sink(GradSink):
    """A buffer for a gradient, to which it is added if asked for; notes its calls."""

    def __init__(self, buffer: Tensor, *, adds: bool = False) -> None:
        self.buffer, self.adds = buffer, adds
        self.calls: list[str] = []

    def open(self) -> tuple[Tensor, bool]:
        self.calls.append("open")
        return self.buffer, self.adds

    def close(self) -> None:
        self.calls.append("close")
