"""Chunked cross-entropy equals torch's, for all chunk sizes, masks and types."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from model.config import loss_chunk
from model.cross_entropy import ZLoss, linear_cross_entropy
from tests.model.values import Sink, assert_rounded

B, S, D, V = 2, 5, 6, 23
T = B * S


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, output weight, labels, and token weights of which one is zero."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(B, S, D, generator=generator).to(dtype)
    weight = torch.randn(V, D, generator=generator).to(dtype)
    labels = torch.randint(V, (B, S), generator=generator)
    token_weights = torch.rand(B, S, generator=generator)
    token_weights[0, 3] = 0.0
    return x.requires_grad_(), weight.requires_grad_(), labels, token_weights


def reference(x: Tensor, weight: Tensor, labels: Tensor, token_weights: Tensor) -> Tensor:
    logits = F.linear(x.flatten(0, 1), weight)
    losses = F.cross_entropy(logits, labels.flatten(), reduction="none")
    return (losses * token_weights.flatten()).sum()


Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def results(function: Callable[..., Tensor], given: Inputs) -> list[Tensor | None]:
    """The loss, and the gradients of hidden states and weight."""
    loss = function(*given)
    loss.backward()
    return [loss.detach(), given[0].grad, given[1].grad]


def in_fp32(given: Inputs) -> Inputs:
    x, weight = (part.detach().float().requires_grad_() for part in given[:2])
    return x, weight, *given[2:]


@pytest.fixture(params=[1, 3, 10])
def tokens_per_chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("model.config.LOSS_CHUNK_TOKENS", request.param)
    return int(request.param)


@pytest.mark.usefixtures("tokens_per_chunk")
@pytest.mark.parametrize("factor", [1.0, 1e3])  # large logits do not overflow
def test_equals_torch(factor: float) -> None:
    given, wanted = (
        (*(part.detach().mul(factor).requires_grad_() for part in inputs()[:2]), *inputs()[2:])
        for _ in range(2)
    )
    found = results(linear_cross_entropy, given)
    assert found[0].shape == ()
    torch.testing.assert_close(found, results(reference, wanted))


@pytest.mark.usefixtures("tokens_per_chunk")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_z_loss_is_in_gradients_and_apart_from_the_loss(dtype: torch.dtype) -> None:
    def with_penalty(*given: Tensor) -> Tensor:
        x, weight, labels, token_weights = given
        log_norms = F.linear(x.flatten(0, 1), weight).logsumexp(-1)
        penalties.append(0.2 * (log_norms.square() * token_weights.flatten()).sum())
        return reference(x, weight, labels, token_weights) + penalties[0]

    penalties: list[Tensor] = []
    z_loss = ZLoss(0.2, torch.zeros(()))
    loss, *grads = results(partial(linear_cross_entropy, z_loss=z_loss), inputs(dtype))
    their_loss, *theirs = results(with_penalty, in_fp32(inputs(dtype)))
    tolerance = torch.finfo(dtype).eps if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(z_loss.total, penalties[0].detach(), rtol=tolerance, atol=0.0)
    torch.testing.assert_close(loss, their_loss - z_loss.total, rtol=4 * tolerance, atol=0.0)
    if dtype is torch.float32:
        torch.testing.assert_close(grads, theirs)
    else:
        assert_rounded(grads, theirs, dtype)


@pytest.mark.usefixtures("tokens_per_chunk")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_sums_in_fp32(dtype: torch.dtype) -> None:
    loss, *grads = results(linear_cross_entropy, inputs(dtype))
    their_loss, *theirs = results(reference, in_fp32(inputs(dtype)))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, their_loss, rtol=torch.finfo(dtype).eps, atol=0.0)
    assert_rounded(grads, theirs, dtype)


@pytest.mark.usefixtures("tokens_per_chunk")
@pytest.mark.parametrize("bad", [-torch.inf, torch.nan])
def test_a_token_without_weight_counts_nothing(bad: float) -> None:
    def of_others(x: Tensor, weight: Tensor, labels: Tensor, token_weights: Tensor) -> Tensor:
        kept = torch.arange(T) != 3
        parts = (part.flatten(0, 1)[kept][None] for part in (x, labels, token_weights))
        x, labels, token_weights = parts
        return reference(x, weight, labels, token_weights)

    given = inputs()
    with torch.no_grad():
        given[0][0, 3] = bad
    found = results(linear_cross_entropy, given)
    torch.testing.assert_close(found, results(of_others, inputs()))
    with torch.no_grad():
        given[0][1, 0] = bad
        assert not torch.isfinite(linear_cross_entropy(*given)), "one that counts"


@pytest.mark.usefixtures("tokens_per_chunk")
def test_the_gradient_that_arrives_is_a_factor() -> None:
    once = results(linear_cross_entropy, inputs())
    scaled = results(lambda *given: linear_cross_entropy(*given) * -4.0, inputs())
    torch.testing.assert_close(scaled, [part * -4.0 for part in once])


@pytest.mark.usefixtures("tokens_per_chunk")
@pytest.mark.parametrize(
    ("x_trained", "weight_trained", "num_products"),
    [(True, True, 3), (True, False, 2), (False, True, 2), (False, False, 1)],
)
def test_only_wanted_gradients_are_made(
    x_trained: bool, weight_trained: bool, num_products: int
) -> None:
    x, weight, labels, token_weights = inputs()
    x.requires_grad_(x_trained)
    weight.requires_grad_(weight_trained)
    _, *full = results(linear_cross_entropy, inputs())
    with FlopCounterMode(display=False) as counter:
        loss = linear_cross_entropy(x, weight, labels, token_weights)
        if loss.requires_grad:
            loss.backward()
    assert counter.get_total_flops() == num_products * 2 * T * V * D
    assert loss.requires_grad == (x_trained or weight_trained)
    trained = (x_trained, weight_trained)
    wanted = [grad if used else None for grad, used in zip(full, trained, strict=True)]
    torch.testing.assert_close([x.grad, weight.grad], wanted)


@pytest.mark.usefixtures("tokens_per_chunk")
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(
    ("dtype", "kind"), [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
)
def test_a_sink_has_the_gradient_after_forward(dtype: str, kind: str, adds: bool) -> None:
    x, weight, labels, token_weights = given = inputs(getattr(torch, dtype))
    sink = Sink(torch.ones(V, D, dtype=getattr(torch, kind)), adds=adds)
    weight.grad_sink = sink  # type: ignore[attr-defined]
    loss = linear_cross_entropy(x, weight, labels, token_weights)
    assert sink.calls == ["open"]
    loss.backward()
    assert sink.calls == ["open", "close"]
    _, x_grad, _ = results(linear_cross_entropy, inputs(x.dtype))
    _, _, weight_grad = results(reference, in_fp32(given))
    assert weight.grad is None
    torch.testing.assert_close(x.grad, x_grad, rtol=0.0, atol=0.0)
    expected = weight_grad + float(adds)
    error = torch.linalg.vector_norm(sink.buffer.float() - expected)
    assert error < 2 * torch.finfo(x.dtype).eps * torch.linalg.vector_norm(expected)


def test_a_sink_stays_closed_without_gradients_and_its_loss_is_not_scaled_later() -> None:
    x, weight, labels, token_weights = inputs()
    weight.grad_sink = sink = Sink(torch.ones(V, D))  # type: ignore[attr-defined]
    with torch.no_grad():
        linear_cross_entropy(x, weight, labels, token_weights)
    linear_cross_entropy(x, weight.requires_grad_(False), labels, token_weights).backward()
    assert not sink.calls
    weight.requires_grad_()
    loss = linear_cross_entropy(x, weight, labels, token_weights)
    with pytest.raises(AssertionError, match="scaled after"):
        (loss * 2.0).backward()


def test_a_chunk_is_of_many_tokens_where_their_logits_fit() -> None:
    assert loss_chunk(32_000, 2, fused=True) == 4096
    assert loss_chunk(128_256, 4, fused=True) == 2048
    assert loss_chunk(10**9, 4, fused=True) == loss_chunk(32_000, 2, fused=False) == 1024
