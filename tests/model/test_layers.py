"""Norms, linear layers, embedding, rotation and chunked cross-entropy equal torch's operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from model.config import LLAMA_PRESETS, loss_chunk
from model.cross_entropy import ZLoss, linear_cross_entropy
from model.embedding import Embedding
from model.layers import gated_linear, normed_linears
from model.norm import SharedNorm, rms_norm
from model.rotary import inverse_frequencies, rotate, rotations
from tests.model.values import SMALL, Sink, assert_rounded, normal

B, S, D, FFN, V = 2, 5, 6, 7, 23
EPSILON = 1e-3

Function = Callable[..., Tensor | tuple[Tensor, ...]]


def plain_normed(x: Tensor, scale: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(F.linear(F.rms_norm(x, (D,), scale, EPSILON), weight) for weight in weights)


def own_normed(x: Tensor, scale: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    norm = SharedNorm(x, scale, EPSILON, fused=False)
    outputs = normed_linears(norm, x, scale, *weights)
    norm.release()
    return outputs


HIDDEN = (B, S, D)
PAIRS: dict[str, tuple[Function, Function, list[tuple[int, ...]]]] = {
    "norm": (
        lambda x, scale: rms_norm(x, scale, EPSILON),
        lambda x, scale: F.rms_norm(x, (D,), scale, EPSILON),
        [HIDDEN, (D,)],
    ),
    "one linear": (own_normed, plain_normed, [HIDDEN, (D,), (4, D)]),
    "three linears": (own_normed, plain_normed, [HIDDEN, (D,), (8, D), (2, D), (2, D)]),
    "gated": (
        partial(gated_linear, fused=False),
        lambda gate, up, weight: F.linear(F.silu(gate) * up, weight),
        [(B, S, FFN), (B, S, FFN), (D, FFN)],
    ),
}


def drawn(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def run(function: Function, given: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Outputs, and the gradients of a weighted sum of them by input."""
    outputs = function(*given)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weights = [torch.linspace(-1.0, 2.0, out.numel()).view(out.shape) for out in outputs]
    parts = [(out.float() * weight).sum() for out, weight in zip(outputs, weights, strict=True)]
    torch.stack(parts).sum().backward()
    return [out.detach() for out in outputs], [part.grad for part in given]


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_plain_operations_in_fp32(name: str, dtype: torch.dtype) -> None:
    own, plain, shapes = PAIRS[name]
    given = drawn(shapes, dtype)
    outputs, grads = run(own, given)
    wanted = run(plain, [part.detach().float().requires_grad_() for part in given])
    if dtype == torch.float32:
        torch.testing.assert_close((outputs, grads), wanted)
    else:
        assert_rounded([*outputs, *grads], [*wanted[0], *wanted[1]], dtype)


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        (name, needed)
        for name, (_, _, shapes) in PAIRS.items()
        for needed in product([True, False], repeat=len(shapes))
        if any(needed)
    ],
)
def test_only_wanted_gradients_are_made(name: str, needed: tuple[bool, ...]) -> None:
    own, plain, shapes = PAIRS[name]
    _, wanted = run(plain, drawn(shapes))
    given = [part.requires_grad_(need) for part, need in zip(drawn(shapes), needed, strict=True)]
    with FlopCounterMode(display=False) as counter:
        _, grads = run(own, given)
    for grad, full, need in zip(grads, wanted, needed, strict=True):
        torch.testing.assert_close(grad, full if need else None)
    # A weight is multiplied in forward, for its own gradient, and if a gradient passes through it.
    through = any(need for shape, need in zip(shapes, needed, strict=True) if len(shape) != 2)
    elements = sum(
        math.prod(shape) * (1 + need + through)
        for shape, need in zip(shapes, needed, strict=True)
        if len(shape) == 2
    )
    assert counter.get_total_flops() == 2 * B * S * elements


ROWS, WIDTH = 60, 20
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("dtype", "kind"), [(FP32, FP32), (BF16, FP32), (BF16, BF16)])
def test_a_sink_gets_torchs_gradient_unless_nothing_trains(
    dtype: torch.dtype, kind: torch.dtype, adds: bool
) -> None:
    seeded = torch.Generator().manual_seed(6)
    tokens_BS = torch.randint(ROWS // 2, (3, 37), generator=seeded)  # many more than once
    grad_BSD = torch.randn(3, 37, WIDTH, generator=seeded).to(dtype)
    sink = Sink(torch.full((ROWS, WIDTH), 3.0, dtype=kind), adds=adds)
    model = Embedding()
    model.weight = torch.nn.Parameter(normal(ROWS, WIDTH, seed=5, dtype=dtype))
    model.weight.grad_sink = sink  # type: ignore[attr-defined]
    model.weight.register_post_accumulate_grad_hook(sink.take)
    with torch.no_grad():
        model(tokens_BS)
    x_BSD = model(tokens_BS)
    plain = model.weight.detach().clone().requires_grad_()
    wanted_BSD = F.embedding(tokens_BS, plain)
    assert torch.equal(x_BSD, wanted_BSD)
    assert not sink.calls
    x_BSD.backward(grad_BSD)
    wanted_BSD.backward(grad_BSD)
    assert sink.calls == ["open", "close"]
    assert model.weight.grad is None
    wanted = plain.grad.to(kind) + (3.0 if adds else 0.0)
    torch.testing.assert_close(sink.buffer, wanted, rtol=1e-6 if kind == FP32 else 2**-8, atol=2e-6)
    assert not model.requires_grad_(requires_grad=False)(tokens_BS).requires_grad
    assert sink.calls == ["open", "close"]


HEADS = replace(SMALL, kv_channels=8)


def test_interpolated_positions_are_divided() -> None:
    """Megatron-LM divides positions, whatever scales the frequencies; so does this."""
    plain = LLAMA_PRESETS["llama3.1-8B"]
    stretched = replace(plain, rotary_seq_len_interpolation_factor=2.5)
    divided = torch.arange(9, dtype=torch.float32) / 2.5
    cos, sin = rotations(stretched, 9, torch.float32, torch.device("cpu"))
    angles = torch.outer(divided, inverse_frequencies(plain))[:, None, :]
    torch.testing.assert_close(cos, torch.cat((angles, angles), dim=-1).cos())
    torch.testing.assert_close(sin, angles.sin())


def test_inputs_and_gradients_of_any_layout() -> None:
    x, scale, weight = drawn([HIDDEN, (D,), (4, D)])
    grad = torch.randn(4, S, B).permute(2, 1, 0)
    strided, packed = (
        torch.autograd.grad(own_normed(x, scale, weight), (x, scale, weight), [given])
        for given in (grad, grad.contiguous())
    )
    torch.testing.assert_close(strided, packed)
    x_BNSH = torch.randn(2, 3, 5, 8)
    x_BSNH, before = x_BNSH.transpose(1, 2), x_BNSH.clone()
    tables = rotations(HEADS, 5, torch.float32, torch.device("cpu"))
    assert torch.equal(rotate(x_BSNH, *tables), rotate(x_BSNH.contiguous(), *tables))
    assert torch.equal(x_BNSH, before), "the input was changed"


def test_low_precision_angles_are_computed_in_fp32() -> None:
    """bf16 cannot represent both position 1000 and 1002: only cosines and sines may be rounded."""
    exact = rotations(HEADS, 2048, torch.float32, torch.device("cpu"))
    rounded = rotations(HEADS, 2048, torch.bfloat16, torch.device("cpu"))
    for fine, coarse in zip(exact, rounded, strict=True):
        assert torch.equal(fine.bfloat16(), coarse)
    again = rotations(HEADS, 2048, torch.float32, torch.device("cpu"))
    assert all(one is other for one, other in zip(exact, again, strict=True)), "made once"


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
    """With a gradient that arrives, which is a factor."""
    given, wanted = (
        (*(part.detach().mul(factor).requires_grad_() for part in inputs()[:2]), *inputs()[2:])
        for _ in range(2)
    )
    found = results(lambda *given: linear_cross_entropy(*given) * -4.0, given)
    assert found[0].shape == ()
    torch.testing.assert_close(found, results(lambda *given: reference(*given) * -4.0, wanted))


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
@pytest.mark.parametrize("trained", list(product([True, False], repeat=2)))
def test_only_wanted_gradients_of_the_loss_are_made(trained: tuple[bool, bool]) -> None:
    x, weight, labels, token_weights = inputs()
    x.requires_grad_(trained[0])
    weight.requires_grad_(trained[1])
    _, *full = results(linear_cross_entropy, inputs())
    with FlopCounterMode(display=False) as counter:
        loss = linear_cross_entropy(x, weight, labels, token_weights)
        if loss.requires_grad:
            loss.backward()
    assert counter.get_total_flops() == (1 + sum(trained)) * 2 * T * V * D
    assert loss.requires_grad == any(trained)
    wanted = [grad if used else None for grad, used in zip(full, trained, strict=True)]
    torch.testing.assert_close([x.grad, weight.grad], wanted)


@pytest.mark.usefixtures("tokens_per_chunk")
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(
    ("dtype", "kind"), [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
)
def test_a_sink_has_the_gradient_of_the_loss_after_forward(
    dtype: str, kind: str, adds: bool
) -> None:
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
