"""Chunked cross-entropy equals torch's, for all chunk sizes, masks and types."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from model import cross_entropy
from model.cross_entropy import linear_cross_entropy
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


@pytest.fixture(params=[1, 3, 9, 10, 100])
def tokens_per_chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(cross_entropy, "LOSS_CHUNK_TOKENS", request.param)
    return int(request.param)


@pytest.mark.usefixtures("tokens_per_chunk")
def test_equals_torch() -> None:
    x, weight, labels, token_weights = inputs()
    loss = linear_cross_entropy(x, weight, labels, token_weights)
    loss.backward()
    their_x, their_weight, _, _ = inputs()
    their_loss = reference(their_x, their_weight, labels, token_weights)
    their_loss.backward()

    assert loss.shape == ()
    theirs = [their_loss, their_x.grad, their_weight.grad]
    torch.testing.assert_close([loss, x.grad, weight.grad], theirs)


@pytest.mark.usefixtures("tokens_per_chunk")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_sums_in_fp32(dtype: torch.dtype) -> None:
    x, weight, labels, token_weights = inputs(dtype)
    loss = linear_cross_entropy(x, weight, labels, token_weights)
    loss.backward()
    their_x, their_weight = (part.detach().float().requires_grad_() for part in (x, weight))
    their_loss = reference(their_x, their_weight, labels, token_weights)
    their_loss.backward()

    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, their_loss, rtol=torch.finfo(dtype).eps, atol=0.0)
    assert_rounded([x.grad, weight.grad], [their_x.grad, their_weight.grad], dtype)


@pytest.mark.usefixtures("tokens_per_chunk")
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_token_without_weight_counts_nothing(bad: float) -> None:
    x, weight, labels, token_weights = inputs()
    with torch.no_grad():
        x[0, 3] = bad
    loss = linear_cross_entropy(x, weight, labels, token_weights)
    loss.backward()
    kept = torch.arange(T) != 3
    their_x, their_weight, _, _ = inputs()
    pieces = (part.flatten(0, 1)[kept] for part in (their_x, labels, token_weights))
    part_x, part_labels, part_weights = pieces
    their_loss = reference(part_x[None], their_weight, part_labels, part_weights)
    their_loss.backward()

    theirs = [their_loss, their_x.grad, their_weight.grad]
    torch.testing.assert_close([loss, x.grad, weight.grad], theirs)


def test_an_overflow_that_counts_is_seen() -> None:
    x, weight, labels, token_weights = inputs()
    with torch.no_grad():
        x[1, 0] = torch.inf

    assert not torch.isfinite(linear_cross_entropy(x, weight, labels, token_weights))


def test_nothing_counts() -> None:
    x, weight, labels, token_weights = inputs()
    loss = linear_cross_entropy(x, weight, labels, torch.zeros_like(token_weights))
    loss.backward()

    assert loss == 0.0
    torch.testing.assert_close([x.grad, weight.grad], [torch.zeros_like(x), torch.zeros(V, D)])


def test_large_logits_do_not_overflow() -> None:
    x, weight, labels, token_weights = inputs()
    x, weight = (part.detach().mul(1e3).requires_grad_() for part in (x, weight))

    loss = linear_cross_entropy(x, weight, labels, token_weights)

    torch.testing.assert_close(loss, reference(x, weight, labels, token_weights))


@pytest.mark.usefixtures("tokens_per_chunk")
def test_the_gradient_that_arrives_is_a_factor() -> None:
    x, weight, labels, token_weights = inputs()
    linear_cross_entropy(x, weight, labels, token_weights).backward()
    other_x, other_weight, _, _ = inputs()
    (linear_cross_entropy(other_x, other_weight, labels, token_weights) * -4.0).backward()

    for once, scaled in ((x.grad, other_x.grad), (weight.grad, other_weight.grad)):
        torch.testing.assert_close(once * -4.0, scaled)


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
    full_x, full_weight, _, _ = inputs()
    linear_cross_entropy(full_x, full_weight, labels, token_weights).backward()

    with FlopCounterMode(display=False) as counter:
        loss = linear_cross_entropy(x, weight, labels, token_weights)
        if loss.requires_grad:
            loss.backward()

    assert counter.get_total_flops() == num_products * 2 * T * V * D
    assert loss.requires_grad == (x_trained or weight_trained)
    for part, full, trained in (
        (x, full_x, x_trained),
        (weight, full_weight, weight_trained),
    ):
        if trained:
            torch.testing.assert_close(part.grad, full.grad)
        else:
            assert part.grad is None


def test_no_grad_mode_makes_the_loss_alone() -> None:
    x, weight, labels, token_weights = inputs()

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        loss = linear_cross_entropy(x, weight, labels, token_weights)

    assert counter.get_total_flops() == 2 * T * V * D
    torch.testing.assert_close(loss, reference(x, weight, labels, token_weights).detach())


@pytest.mark.usefixtures("tokens_per_chunk")
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_a_sink_has_the_gradient_after_forward(
    dtype: torch.dtype, kind: torch.dtype, adds: bool
) -> None:
    x, weight, labels, token_weights = inputs(dtype)
    sink = Sink(torch.ones(V, D, dtype=kind), adds=adds)
    weight.grad_sink = sink  # type: ignore[attr-defined]
    loss = linear_cross_entropy(x, weight, labels, token_weights)
    assert sink.calls == ["open"]
    loss.backward()
    assert sink.calls == ["open", "close"]
    plain_x, plain_weight, _, _ = inputs(dtype)
    linear_cross_entropy(plain_x, plain_weight, labels, token_weights).backward()
    their_x, their_weight = (part.detach().float().requires_grad_() for part in (x, weight))
    reference(their_x, their_weight, labels, token_weights).backward()

    assert weight.grad is None
    torch.testing.assert_close(x.grad, plain_x.grad, rtol=0.0, atol=0.0)
    expected = their_weight.grad + float(adds)
    error = torch.linalg.vector_norm(sink.buffer.float() - expected)
    assert error < 2 * torch.finfo(dtype).eps * torch.linalg.vector_norm(expected)


def test_a_loss_with_a_sink_is_not_scaled_later() -> None:
    x, weight, labels, token_weights = inputs()
    weight.grad_sink = Sink(torch.ones(V, D))  # type: ignore[attr-defined]
    loss = linear_cross_entropy(x, weight, labels, token_weights)
    with pytest.raises(AssertionError, match="scaled after"):
        (loss * 2.0).backward()


def test_a_sink_stays_closed_without_gradients() -> None:
    x, weight, labels, token_weights = inputs()
    sink = Sink(torch.ones(V, D))
    weight.grad_sink = sink  # type: ignore[attr-defined]
    with torch.no_grad():
        linear_cross_entropy(x, weight, labels, token_weights)
    linear_cross_entropy(x, weight.requires_grad_(False), labels, token_weights).backward()
    assert not sink.calls


class _Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_logits_of_all_tokens_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "LOSS_CHUNK_TOKENS", 7)
    x, weight, labels, token_weights = inputs()
    assert 7 * V > V * D, "the weight's gradient is not the largest"

    with _Largest() as largest:
        linear_cross_entropy(x, weight, labels, token_weights).backward()

    assert largest.numel == 7 * V


def test_a_second_backward_is_an_error() -> None:
    x, weight, labels, token_weights = inputs()
    loss = linear_cross_entropy(x, weight, labels, token_weights)
    loss.backward(retain_graph=True)

    with pytest.raises(AssertionError, match="backward"):
        loss.backward()
