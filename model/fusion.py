"""Chooses at the start which parts of a model Triton computes; compiles blocks by torch.compile."""

# [Note: compiled blocks]
# One graph serves all blocks: weights are inputs of the graph. Attention's core stays outside the
# graph if documents are separate, since every set of lengths would need its own graph, and if the
# core is recomputed or saves scores: the compiler would choose itself what to save for backward.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from model.config import LlamaConfig
from model.cross_entropy import linear_cross_entropy
from model.fp8 import Fp8, Fp8Tensor, known_largest, operand
from model.layers import gated_linear, normed_linears
from model.norm import SharedNorm
from model.rotary import rotate
from paro.errors import UserError, describe
from paro.text import listed

DEVICES = {"cuda"}  # tests add the CPU, for which Triton has an interpreter
_MOST_GRAPHS = 64  # graphs at most of one part of a block; more end the run with an error
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


def compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Compile the function by a backend of torch.compile; graph breaks raise an error."""
    # Blocks with different frozen weights, and evaluation, each have their own graph.
    torch._dynamo.config.recompile_limit = _MOST_GRAPHS
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)


def check_compiler(config: LlamaConfig, device: torch.device) -> None:
    """Raise `UserError` if blocks cannot be compiled here, for example without a C++ compiler."""
    backend = config.torch_compile
    if backend is None:
        return
    if backend == "inductor" and config.fp8_format is not None and device.type == "cpu":
        raise UserError(  # torch 2.13, fp8 from bf16: parts of the operands, and then NaN
            "--torch-compile inductor computes wrong operands in fp8 on a CPU: leave it or "
            "--fp8-format out"
        )
    x = torch.ones(8, device=device, requires_grad=True)
    try:
        compiled(lambda x: x.sin() + 1.0, backend)(x).sum().backward()
    except Exception as error:  # whatever the backend, its compilers or the device's driver raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"--torch-compile {backend} does not work on this {device.type}: {lines[0]}: install "
            "what is missing, or leave the flag out"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusions:
    """Megatron's flags of the fusions that Triton computes if available, besides fp8 casts."""

    bias_swiglu_fusion: bool = True
    apply_rope_fusion: bool = True


class Kernels(NamedTuple):
    """Model configuration with the kernels that run here, and a line about them."""

    config: LlamaConfig
    line: str | None  # log line about the kernels in use; None: there was no choice


@cache
def usable_kernels(
    config: LlamaConfig, fusions: Fusions | None, dtype: torch.dtype, device: torch.device
) -> Kernels:
    """Try the kernels that `fusions` ask for, forward and backward, against the plain versions.

    A rank without Triton, or without the compiler that Triton needs, computes plainly; so do all
    without `fusions`.
    """
    if fusions is None:
        return Kernels(config, None)
    plain = config.torch_compile is None  # else inductor makes the blocks' kernels
    compiled = "" if plain else f"blocks: torch.compile by {config.torch_compile}"
    casts = plain and config.fp8_format is not None
    kernels = (  # name, whether it is asked for, the field that switches it on, trial
        ("norms", plain, "fuses_norms", _try_norm),
        ("SwiGLU", plain and fusions.bias_swiglu_fusion, "fuses_swiglu", _try_swiglu),
        ("rotary embedding", plain and fusions.apply_rope_fusion, "fuses_rotary", _try_rotary),
        ("casts to fp8", casts, "fuses_fp8_casts", _try_casts),
        ("loss", True, "fuses_loss", _try_loss),
    )
    if device.type not in DEVICES:
        return Kernels(config, compiled or None)
    names = listed([name for name, is_on, *_ in kernels if is_on])
    names = f"{compiled}; {names}" if compiled else names
    try:
        from model.kernels import VERSION

        for _, is_on, _, attempt in kernels:
            if is_on:
                attempt(config, dtype, device)
    except Exception as error:  # whatever Triton, its compiler or the device's driver raises
        line = f"{names}: torch's operations, because Triton fails: {describe(error)}"
        if casts:
            line = f"WARNING: fp8 is slower than bf16 without Triton or --torch-compile; {line}"
        return Kernels(config, line)
    fused: dict[str, Any] = {field: True for _, is_on, field, _ in kernels if is_on}
    return Kernels(replace(config, **fused), f"{names}: Triton {VERSION}")


def _try_norm(config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> None:
    width = config.hidden_size
    x, scale = _values((3, 1, width), dtype, device), _values((width,), dtype, device)
    weight = _values((2, width), dtype, device)

    for_cast = config.fp8_format is not None

    def run(x: Tensor, scale: Tensor, fused: bool) -> Tensor:
        norm = SharedNorm(x, scale, config.norm_epsilon, fused=fused, for_cast=for_cast)
        return torch.cat(normed_linears(norm, x, scale, weight, passes_x=True), dim=-1)

    _compare(run, (x, scale))


def _try_loss(config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = _values((1, 3, 8), dtype, device), _values((65, 8), dtype, device)
    labels, ones = torch.tensor([[0, 64, 7]], device=device), torch.ones(1, 3, device=device)
    _compare(lambda x, w, fused: linear_cross_entropy(x, w, labels, ones, fused=fused), (x, weight))


def _try_swiglu(config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> None:
    gate, up = _values((3, 65), dtype, device), _values((3, 65), dtype, device)
    weight = torch.eye(65, dtype=dtype, device=device)
    _compare(lambda g, u, fused: gated_linear(g, u, weight, fused=fused), (gate, up))


def _try_rotary(config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> None:
    angles = _values((3, 1, config.kv_channels // 2), torch.float32, device)
    cos, sin = torch.cat((angles.cos(), angles.cos()), -1).to(dtype), angles.sin().to(dtype)
    x = _values((2, 3, config.num_query_groups, config.kv_channels), dtype, device)
    _compare(lambda x, fused: rotate(x, cos, sin, fused=fused), (x,))


def _try_casts(config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raise `RuntimeError` unless Triton's casts have the bits of torch's, as ranks must agree."""
    assert config.fp8_format is not None
    values = 448.0 * _values((130, 65), torch.float32, device)
    values[1, 2] = 448.0  # the scale is a power of two, and many values lie halfway
    for is_grad in (False, True):
        plain, fused = (
            operand(values.to(dtype), Fp8(config.fp8_format, by), is_grad=is_grad, transposed=True)
            for by in (False, True)
        )
        assert isinstance(plain, Fp8Tensor)
        assert isinstance(fused, Fp8Tensor)
        same = torch.equal(plain.scale, fused.scale)
        for expected, actual in ((plain.values, fused.values), (plain.values_t, fused.values_t)):
            same &= torch.equal(expected.view(torch.uint8), actual.view(torch.uint8))
        if not same:
            raise RuntimeError("casts to fp8 differ from those of torch's operations")
    _check_largest(values.to(dtype))


def _check_largest(values: Tensor) -> None:
    """Raise `RuntimeError` unless every kernel finds the amax of the tensor that it writes."""
    from model.kernels import norm, norm_backward, rotate, swiglu, swiglu_backward

    scale, angles = values[0].contiguous(), values.new_ones(len(values), values.shape[-1] - 1)
    y, rstd = norm(values, scale, 1e-5)
    for tensor in (
        y,
        norm_backward(y, values, scale, rstd, y, for_cast=True)[0],
        swiglu(values, y, for_cast=True),
        *swiglu_backward(y.clone(), values, y, for_cast=True),
        rotate(values[:, None, None, 1:], angles, angles[:, ::2], inverse=True, for_cast=True),
    ):
        largest = known_largest(tensor)
        if largest is None or float(largest.view(torch.float32)) != float(tensor.abs().amax()):
            raise RuntimeError("largest values are not those of torch's operations")


def _values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    numel = torch.Size(shape).numel()
    return torch.linspace(-3.0, 3.0, numel, device=device).sin_().view(shape).to(dtype)


def _compare(run: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    """Raise `RuntimeError` unless values and gradients agree to the type's rounding."""
    results = []
    for fused in (False, True):
        leaves = [each.clone().requires_grad_() for each in inputs]
        out = run(*leaves, fused=fused)
        out.backward(torch.ones_like(out))
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for plain, fused in zip(*results, strict=True):
        error = F.l1_loss(fused.float(), plain.float()) / plain.float().abs().mean()
        if not error <= _TOLERANCE[plain.dtype]:
            raise RuntimeError(f"results differ by {float(error):.2g} from torch's operations")
