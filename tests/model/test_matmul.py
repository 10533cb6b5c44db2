"""Matmuls in fp8: what their operands are rounded to, and that layers multiply those."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from model.config import FP8_CAPABILITY, Fp8Format
from model.fp8 import Fp8, Operand, operand
from model.layers import gated_linear, linear, normed_linears
from model.matmul import (
    check_matmul_types,
    input_grads,
    number_weights,
    outputs,
    weight_grad,
)
from model.norm import SharedNorm, rms_norm
from tests.helpers.refusals import refused
from tests.model.values import Sink, all_near, assert_near, normal

E4M3, HYBRID = Fp8("e4m3"), Fp8("hybrid")
FORMATS = [pytest.param(E4M3, id="e4m3"), pytest.param(HYBRID, id="hybrid")]
STEP = {torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3}  # largest relative rounding error


def both(tensor: Tensor, fp8: Fp8 | None, *, is_grad: bool = False) -> Operand:
    """For any matmul."""
    return operand(tensor, fp8, is_grad=is_grad, transposed=True)


def exact(tensor: Tensor, fp8: Fp8, *, is_grad: bool = False) -> Tensor:
    """The values that a matmul sees."""
    found = operand(tensor, fp8, is_grad=is_grad)
    return found.values.float() * found.scale


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e30])
def test_an_operand_is_rounded_relative_to_its_largest_value(fp8: Fp8, size: float) -> None:
    tensor = normal(32, 48, seed=1) * size
    for is_grad in (False, True):
        found = operand(tensor, fp8, is_grad=is_grad)
        kind = torch.float8_e5m2 if is_grad and fp8 == HYBRID else torch.float8_e4m3fn
        assert found.values.dtype == kind
        limits = torch.finfo(kind)
        assert found.values.float().abs().max() == limits.max, "the range is not used"
        error = (found.values.float() * found.scale - tensor).abs()
        smallest = limits.smallest_normal * found.scale
        assert bool((error <= STEP[kind] * tensor.abs().clamp(min=smallest)).all())


def test_zeros_stay_and_what_is_not_finite_is_seen() -> None:
    weight = operand(normal(16, 32, seed=2), E4M3)
    zeros = outputs(operand(torch.zeros(16, 32), E4M3), weight)
    assert torch.equal(zeros, torch.zeros(16, 16))
    for value in (float("inf"), float("-inf"), float("nan")):
        x = normal(16, 32, seed=3)
        x[3, 4] = value
        assert not outputs(operand(x, E4M3), weight).isfinite().all()
        grad = both(x, HYBRID, is_grad=True)
        assert not weight_grad(grad, both(normal(16, 48, seed=4), E4M3)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_rounded_operands(dtype: torch.dtype) -> None:
    x, weight, grad = (
        normal(*shape, seed=seed).to(dtype)
        for seed, shape in enumerate(((48, 32), (64, 32), (48, 64)))
    )
    x8, weight8 = exact(x, HYBRID), exact(weight, HYBRID)
    grad8 = exact(grad, HYBRID, is_grad=True)
    args = both(x, HYBRID), both(weight, HYBRID), both(grad, HYBRID, is_grad=True)
    total = torch.ones(48, 32, dtype=dtype)
    found = {
        "outputs": (outputs(args[0], args[1]), x8 @ weight8.t()),
        "input_grads": (input_grads(args[2], args[1]), grad8 @ weight8),
        "added": (input_grads(args[2], args[1], total_TD=total), 1.0 + grad8 @ weight8),
        "weight_grad": (weight_grad(args[2], args[0]), grad8.t() @ x8),
    }
    for name, (product, wanted) in found.items():
        assert product.dtype == dtype, name
        assert_near(product, wanted, name, within=1e-5 if dtype == torch.float32 else 1e-2)


def rounded_linear(x: Tensor, weight: Tensor, fp8: Fp8) -> Tensor:
    """A linear layer in fp32 with rounded operands, forward and backward."""
    x8, weight8 = (part + (exact(part, fp8) - part).detach() for part in (x, weight))
    out = x8 @ weight8.t()
    out.register_hook(lambda grad: exact(grad, fp8, is_grad=True))
    return out


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("layer", ["linear", "normed_linears", "gated_linear"])
def test_layers_multiply_in_fp8_forward_and_backward(layer: str, fp8: Fp8) -> None:
    x, scale = normal(32, 48, seed=1), normal(48, seed=2).exp()
    up, first, second = (normal(*shape, seed=5) for shape in ((32, 48), (64, 48), (16, 48)))
    leaves = {
        "linear": (x, first),
        "normed_linears": (x, scale, first, second),
        "gated_linear": (x, up, first),
    }[layer]

    def found(*args: Tensor) -> tuple[Tensor, ...]:
        if layer == "linear":
            return (linear(args[0], args[1], fp8),)
        if layer == "gated_linear":
            return (gated_linear(*args, fp8, fused=False),)
        return normed_linears(SharedNorm(*args[:2], 1e-5, fused=False), *args, fp8=fp8)

    def wanted(*args: Tensor) -> tuple[Tensor, ...]:
        if layer == "linear":
            return (rounded_linear(*args, fp8),)
        if layer == "gated_linear":
            return (rounded_linear(functional.silu(args[0]) * args[1], args[2], fp8),)
        y = rms_norm(args[0], args[1], 1e-5)
        return tuple(rounded_linear(y, weight, fp8) for weight in args[2:])

    results = []
    for run in (found, wanted):
        inputs = [leaf.clone().requires_grad_() for leaf in leaves]
        outs = run(*inputs)
        torch.autograd.backward(outs, [normal(*out.shape, seed=7) for out in outs])
        results.append([*outs, *(leaf.grad for leaf in inputs)])
    all_near(*results)


def test_only_forward_adds_up_with_fewer_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    product, fast = torch._scaled_mm, []

    def noted(*args: Tensor, use_fast_accum: bool, **options: Any) -> Tensor:
        fast.append(use_fast_accum)
        return product(*args, **options)

    monkeypatch.setattr(torch, "_scaled_mm", noted)
    x, scale, up = normal(32, 48, seed=1), normal(48, seed=2).exp(), normal(32, 48, seed=3)
    first, second = (normal(64, 48, seed=seed) for seed in (4, 5))
    shared = SharedNorm(x, scale, 1e-5, fused=False)
    for layer, leaves, matmuls in (
        (linear, (x, first), 1),
        (partial(gated_linear, fused=False), (x, up, first), 1),
        (partial(normed_linears, shared), (x, scale, first, second), 2),
    ):
        fast.clear()
        inputs = [leaf.clone().requires_grad_() for leaf in leaves]
        outs = layer(*inputs, fp8=HYBRID)
        assert fast == matmuls * [True]
        fast.clear()
        outs = (outs,) if isinstance(outs, Tensor) else outs
        torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
        assert fast == 2 * matmuls * [False]


@pytest.mark.gpu
def test_long_sums_of_input_gradients_keep_their_bits() -> None:
    if torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("needs fp8: compute capability 8.9")
    grad, weight = (
        normal(*shape, seed=seed).abs().cuda()
        for seed, shape in enumerate(((256, 11_008), (11_008, 128)))
    )
    wanted = exact(grad, HYBRID, is_grad=True).double() @ exact(weight, HYBRID).double()
    found = input_grads(both(grad, HYBRID, is_grad=True), both(weight, HYBRID))
    assert float((found - wanted).norm() / wanted.norm()) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", FORMATS)
def test_a_gpu_multiplies_as_a_cpu_does(fp8: Fp8) -> None:
    if torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("needs fp8: compute capability 8.9")
    x, weight, grad = (
        normal(*shape, seed=seed).bfloat16()
        for seed, shape in enumerate(((256, 128), (192, 128), (256, 192)))
    )
    results = []
    for device in ("cpu", "cuda"):
        args = [
            both(tensor.to(device), fp8, is_grad=tensor is grad) for tensor in (x, weight, grad)
        ]
        grads = input_grads(args[2], args[1]), weight_grad(args[2], args[0])
        results.append([made.cpu() for made in (outputs(args[0], args[1]), *grads)])
    wanted, found = results
    all_near(found, wanted, within=0.01)


@pytest.mark.parametrize(
    ("gpu", "capability", "fp8", "allowed", "told"),
    [
        ("A100", (8, 0), "e4m3", [torch.bfloat16], "8.9 ... A100 has 8.0: leave it out"),
        ("T4", (7, 5), None, [torch.float16, torch.float32], "--bf16 ... T4 has 7.5: give --fp16"),
    ],
)
def test_a_gpu_without_a_type_is_refused(
    gpu: str,
    capability: tuple[int, int],
    fp8: Fp8Format | None,
    allowed: list[torch.dtype],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: gpu)
    for dtype in allowed:
        check_matmul_types(None, dtype, torch.device("cuda"))
    check_matmul_types(fp8, torch.bfloat16, torch.device("cpu"))
    refused(partial(check_matmul_types, fp8, torch.bfloat16, torch.device("cuda")), told)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fp8", [None, HYBRID])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(
    ("into", "of"),
    [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")],
)
def test_a_sink_gets_the_gradient(
    into: str, of: str, fp8: Fp8 | None, device: str, *, adds: bool
) -> None:
    if fp8 and device == "cuda" and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("needs fp8: compute capability 8.9")
    grad, x = (
        normal(*shape, seed=2).to(device, getattr(torch, of)) for shape in ((64, 48), (64, 32))
    )
    flat = torch.full((48 * 32 + 5,), 3.0, dtype=getattr(torch, into), device=device)
    sink = Sink(flat[5:].view(48, 32), adds=adds)
    operands = both(grad, fp8, is_grad=True), both(x, fp8)
    assert weight_grad(*operands, sink) is None
    wanted = weight_grad(*operands)
    tolerance = 1e-5 if of == "float32" else 0.1
    error = sink.buffer.float() - wanted.float() - (3.0 if adds else 0.0)
    assert error.abs().max() <= tolerance * wanted.abs().max()
    assert bool((flat[:5] == 3.0).all())
    assert sink.calls == ["open", "close"]


def test_only_a_weight_with_a_sink_has_a_number() -> None:
    weights = [torch.ones(2, 3) for _ in range(3)]
    for weight in weights[:2]:
        weight.grad_sink = Sink(weight)  # type: ignore[attr-defined]
    number_weights(weights)
    first = weights[0].sink_number  # type: ignore[attr-defined]
    assert int(first) != int(weights[1].sink_number)  # type: ignore[attr-defined]
    assert not hasattr(weights[2], "sink_number")
    del weights[1].grad_sink  # type: ignore[attr-defined]
    number_weights(weights)
    assert weights[0].sink_number is first  # type: ignore[attr-defined]
    assert not hasattr(weights[1], "sink_number")
