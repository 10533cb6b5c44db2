"""The embedding's gradient in a sink: torch's values, also added, and no tensor of its size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from model.embedding import Embedding
from tests.model.values import Sink, normal
from tests.paro.planning.lone_rank import allocated_at_most

V, D = 60, 20
FP32, BF16 = torch.float32, torch.bfloat16


def threes(dtype: torch.dtype, *, adds: bool = False) -> Sink:
    return Sink(torch.full((V, D), 3.0, dtype=dtype), adds=adds)


def with_sink(sink: Sink, *, dtype: torch.dtype = FP32) -> Embedding:
    model = Embedding()
    model.weight = torch.nn.Parameter(normal(V, D, seed=5, dtype=dtype))
    model.weight.grad_sink = sink  # type: ignore[attr-defined]
    return model


def some(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tokens, many of them more than once, and a gradient."""
    seeded = torch.Generator().manual_seed(6)
    tokens_BS = torch.randint(V // 2, (3, 37), generator=seeded)
    return tokens_BS, torch.randn(3, 37, D, generator=seeded).to(dtype)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("dtype", "kind"), [(FP32, FP32), (BF16, FP32), (BF16, BF16)])
def test_a_sink_gets_torchs_gradient(dtype: torch.dtype, kind: torch.dtype, adds: bool) -> None:
    tokens_BS, grad_BSD = some(dtype)
    sink = threes(kind, adds=adds)
    model = with_sink(sink, dtype=dtype)
    x_BSD = model(tokens_BS)
    plain = model.weight.detach().clone().requires_grad_()
    wanted_BSD = functional.embedding(tokens_BS, plain)
    assert torch.equal(x_BSD, wanted_BSD)
    assert not sink.calls

    x_BSD.backward(grad_BSD)
    wanted_BSD.backward(grad_BSD)

    assert sink.calls == ["open", "close"]
    assert model.weight.grad is None
    wanted = plain.grad.to(kind) + (3.0 if adds else 0.0)
    torch.testing.assert_close(sink.buffer, wanted, rtol=1e-6 if kind == FP32 else 2**-8, atol=2e-6)


def test_no_gradient_of_the_weights_size_is_made() -> None:
    tokens_BS, grad_BSD = (tensor[:, :1] for tensor in some(FP32))
    x_BSD = with_sink(threes(FP32))(tokens_BS)
    assert allocated_at_most(lambda: x_BSD.backward(grad_BSD)) < V * D * 4


def test_a_frozen_weights_sink_stays_closed() -> None:
    tokens_BS, _ = some(FP32)
    sink = threes(FP32)
    model = with_sink(sink)
    with torch.no_grad():
        model(tokens_BS)
    assert not model.requires_grad_(requires_grad=False)(tokens_BS).requires_grad
    assert not sink.calls
