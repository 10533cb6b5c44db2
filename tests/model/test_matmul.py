"""Matmuls in fp8: what their operands are rounded to, and that layers multiply those."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from model import fp8, layers
from model.config import FP8_CAPABILITY, Fp8Format, LlamaConfig
from model.fp8 import Fp8, Operand, known_largest, operand, remember_largest
from model.layers import gated_linear, linear, normed_linears
from model.llama import Llama, TokenInfo
from model.matmul import check_matmul_types, input_grads, number_weights, outputs, weight_grad
from model.norm import SharedNorm, rms_norm
from model.rotary import rotations
from tests.helpers.refusals import refused
from tests.helpers.triton_kernels import bytes_by_kernel, interpreter
from tests.model.test_fusion import CONFIG
from tests.model.values import Sink, all_near, normal

E4M3, HYBRID = Fp8("e4m3"), Fp8("hybrid")
FORMATS = [pytest.param(E4M3, id="e4m3"), pytest.param(HYBRID, id="hybrid")]
STEP = {torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3}  # largest relative rounding error


def both(tensor: Tensor, fp8: Fp8 | None, *, is_grad: bool = False) -> Operand:
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
        if layer == "normed_linears":
            return normed_linears(SharedNorm(*args[:2], 1e-5, fused=False), *args, fp8=fp8)
        more = {} if layer == "linear" else {"fused": False}
        return ({"linear": linear, "gated_linear": gated_linear}[layer](*args, fp8, **more),)

    def wanted(*args: Tensor) -> tuple[Tensor, ...]:
        if layer == "normed_linears":
            y = rms_norm(args[0], args[1], 1e-5)
            return tuple(rounded_linear(y, weight, fp8) for weight in args[2:])
        x = args[0] if layer == "linear" else functional.silu(args[0]) * args[1]
        return (rounded_linear(x, args[-1], fp8),)

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


def skip_without_fp8() -> None:
    if torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("needs fp8: compute capability 8.9")


@pytest.mark.gpu
def test_long_sums_of_input_gradients_keep_their_bits() -> None:
    skip_without_fp8()
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
    skip_without_fp8()
    x, weight, grad = (
        normal(*shape, seed=seed).bfloat16()
        for seed, shape in enumerate(((256, 128), (192, 128), (256, 192)))
    )
    results = []
    for device in ("cpu", "cuda"):
        args = [both(each.to(device), fp8, is_grad=each is grad) for each in (x, weight, grad)]
        grads = input_grads(args[2], args[1]), weight_grad(args[2], args[0])
        results.append([made.cpu() for made in (outputs(args[0], args[1]), *grads)])
    wanted, found = results
    all_near(found, wanted, within=0.01)


def test_a_gpu_without_a_type_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cpu, bf16 = torch.device("cuda"), torch.device("cpu"), torch.bfloat16
    for gpu, capability, form, allowed, message in (
        ("A100", (8, 0), "e4m3", [bf16], "8.9 ... A100 has 8.0: leave it out"),
        ("T4", (7, 5), None, [torch.float16, torch.float32], "T4 has 7.5: give --fp16"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, found=gpu: found)
        for dtype in allowed:
            check_matmul_types(None, dtype, cuda)
        check_matmul_types(form, bf16, cpu)
        refused(partial(check_matmul_types, form, bf16, cuda), message)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fp8", [None, HYBRID])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(
    ("into", "of"), [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]
)
def test_a_sink_gets_the_gradient(
    into: str, of: str, fp8: Fp8 | None, device: str, *, adds: bool
) -> None:
    if fp8 and device == "cuda":
        skip_without_fp8()
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


SPECIAL = [None, 0.0, float("nan"), -float("nan"), float("inf"), -float("inf")]
# Parts of a tile, and several.
TENSORS = [*product([(1, 7)], SPECIAL), ((3, 5, 37), None), ((3, 5, 37), float("nan"))]
TENSORS += [((130, 200), None)]


def assert_same_bits(found: Tensor, wanted: Tensor) -> None:
    """A NaN is as good as another."""
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    numbers = ~wanted.float().isnan()
    assert torch.equal(~found.float().isnan(), numbers)
    whole = torch.uint8 if found.element_size() == 1 else torch.int32
    assert torch.equal(found.view(whole)[numbers], wanted.view(whole)[numbers])


@pytest.mark.slow("interprets kernels")
@pytest.mark.bits
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy: of infinities
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
def test_triton_casts_with_torchs_bits(form: Fp8Format, dtype: torch.dtype) -> None:
    with interpreter():
        for seed, (shape, special) in enumerate(TENSORS):
            spread = normal(*shape, seed=seed + 1).exp() ** 3  # some far below the largest
            tensor = (normal(*shape, seed=seed) * spread * 10.0 ** (seed % 5 - 2)).to(dtype)
            if special is not None:
                tensor = tensor * 0.0 if special == 0.0 else tensor
                tensor.view(-1)[5] = special
            plain, fused = (
                operand(tensor, Fp8(form, by), is_grad=True, transposed=True)
                for by in (False, True)
            )
            assert_same_bits(fused.scale, plain.scale)
            assert_same_bits(fused.values, plain.values)
            assert_same_bits(fused.values_t, plain.values_t)


class OnlyMatmuls(TorchDispatchMode):
    """Fails where another operation than a matmul or a view reads a tensor in fp8."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name not in {"aten::_scaled_mm", "aten::view", "aten::t", "aten::flatten"}:
            kinds = {each.dtype for each in args if isinstance(each, Tensor)}
            assert not kinds & {torch.float8_e4m3fn, torch.float8_e5m2}, func
        return func(*args, **(kwargs or {}))


WIDE = replace(CONFIG, hidden_size=32, ffn_hidden_size=48, kv_channels=8, fp8_format="hybrid")


BY_TRITON = {f"fuses_{part}": True for part in ("fp8_casts", "norms", "swiglu", "rotary")}
TOKENS, HIDDEN, FFN, KEY = 16, 32, 48, 2 * 8
WEIGHTS = HIDDEN * (2 * HIDDEN + 2 * KEY + 3 * FFN)
INPUTS = TOKENS * (HIDDEN + HIDDEN + HIDDEN + FFN)  # of Q, K and V; of wo; gate and up; w_down
GRADS = TOKENS * (HIDDEN + 2 * KEY + HIDDEN + 2 * FFN + HIDDEN)
ELEMENTS = 2 * WEIGHTS + 2 * INPUTS + GRADS  # of a block's operands, each once a pass


def run_block(config: LlamaConfig) -> None:
    block = Llama(config).bfloat16().blocks[0]
    with torch.no_grad():
        for seed, parameter in enumerate(block.parameters()):
            parameter.copy_(0.3 * normal(*parameter.shape, seed=seed))
    x = normal(1, TOKENS, HIDDEN, seed=1, dtype=torch.bfloat16).requires_grad_()
    info = TokenInfo(*rotations(config, TOKENS, torch.bfloat16, x.device))
    block(x, info).float().sum().backward()


@pytest.mark.slow("traces a model")
@pytest.mark.bits
def test_a_blocks_casts_move_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of docs/gpu.md; and that what is known of an operand is what a search finds."""

    def checked(tensor: Tensor) -> Tensor | None:
        found = known_largest(tensor)
        if found is not None:
            with _disable_current_modes():
                largest = tensor.abs().amax().float().view_as(found)
                assert_same_bits(found.view(torch.float32), largest)
        return found

    def counted(tensor: Tensor, how: Fp8 | None, **options: Any) -> Operand:
        elements.append(tensor.numel())
        with _disable_current_modes():
            return operand(tensor, how, **options)

    elements: list[int] = []
    monkeypatch.setattr("model.kernels.known_largest", checked)
    for module in (fp8, layers):
        monkeypatch.setattr(module, "operand", counted)
    with interpreter(), bytes_by_kernel() as kernels, OnlyMatmuls():
        run_block(replace(WIDE, **BY_TRITON))
    # Weights twice, attention's output once, the gradients of V and of the block's output.
    looked_for = 2 * WEIGHTS + TOKENS * (HIDDEN + KEY + HIDDEN)
    assert sum(elements) == ELEMENTS, "each operand is cast once a pass"
    searched, cast = kernels["_largest"], kernels["_cast"]
    assert 0 <= searched - 2 * looked_for < 100, "and what the programs have found"
    assert 3 * ELEMENTS <= cast <= 4 * ELEMENTS


def test_a_largest_value_is_forgotten_with_the_values() -> None:
    tensor, largest = normal(4, 6, seed=1), torch.zeros(1)
    assert known_largest(tensor) is None
    remember_largest(tensor, largest)
    for whole in (tensor, tensor.view(24), tensor.detach().unflatten(0, (2, 2))):
        assert known_largest(whole) is largest
    assert known_largest(tensor[:2]) is None
    assert known_largest(tensor.clone()) is None
    tensor.view(24)[3] = 9.0
    assert known_largest(tensor) is None
    part = normal(4, 6, seed=1)[1:]
    remember_largest(part, largest)
    assert known_largest(part) is None
