"""Chooses at the start which parts of a block Triton computes; the others have plain versions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from model.config import LlamaConfig
from model.fp8 import Fp8, Scaled, operand
from model.layers import gated_linear
from model.rotary import rotate

DEVICES = {"cuda"}  # tests add the CPU, for which Triton has an interpreter
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusions:
    """What Triton shall compute, if it can, beside casts to fp8; Megatron's flags."""

    bias_swiglu_fusion: bool = True
    apply_rope_fusion: bool = True


class Kernels(NamedTuple):
    """The model's configuration with the kernels that run here, and a line about them."""

    config: LlamaConfig
    line: str | None  # None: there is no choice


@cache
def usable_kernels(
    config: LlamaConfig, fusions: Fusions | None, dtype: torch.dtype, device: torch.device
) -> Kernels:
    """Tries the kernels that `fusions` ask for, forward and backward, against the plain versions.

    A rank without Triton, or without the compiler that Triton needs, computes plainly; so do all
    without `fusions`.
    """
    if fusions is None:
        return Kernels(config, None)
    casts = config.fp8_format is not None
    asked = {
        "SwiGLU": (fusions.bias_swiglu_fusion, _try_swiglu),
        "rotary embedding": (fusions.apply_rope_fusion, _try_rotary),
        "casts to fp8": (casts, _try_casts),
    }
    if config.torch_compile is not None:
        return Kernels(config, f"blocks: torch.compile by {config.torch_compile}")
    if device.type not in DEVICES:
        return Kernels(config, None)
    *most, last = ["", *(name for name, (wanted, _) in asked.items() if wanted)]
    names = f"{', '.join(most[1:])} and {last}" if most[1:] else last
    if not names:
        return Kernels(config, "SwiGLU and rotary embedding: torch's operations, as the flags ask")
    try:
        from model.kernels import VERSION

        for wanted, attempt in asked.values():
            if wanted:
                attempt(config, dtype, device)
    except Exception as error:  # whatever Triton, its compiler or the device's driver raises
        first = str(error).strip().partition("\n")[0]
        reason = f"{type(error).__name__}: {first}"
        line = f"{names}: torch's operations, because Triton fails: {reason}"
        if casts:
            line = f"WARNING: fp8 is slower than bf16 without Triton or --torch-compile; {line}"
        return Kernels(config, line)
    chosen = replace(
        config,
        fuses_swiglu=fusions.bias_swiglu_fusion,
        fuses_rotary=fusions.apply_rope_fusion,
        fuses_fp8_casts=casts,
    )
    return Kernels(chosen, f"{names}: Triton {VERSION}")


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
    """`RuntimeError` unless the bits are the same; ranks without Triton cast as the others do."""
    assert config.fp8_format is not None
    values = 448.0 * _values((130, 65), torch.float32, device)
    values[1, 2] = 448.0  # the scale is a power of two, and many values lie halfway
    for is_grad in (False, True):
        plain, fused = (
            operand(values.to(dtype), Fp8(config.fp8_format, by), is_grad=is_grad, transposed=True)
            for by in (False, True)
        )
        assert isinstance(plain, Scaled)
        assert isinstance(fused, Scaled)
        same = torch.equal(plain.scale, fused.scale)
        for wanted, found in ((plain.values, fused.values), (plain.values_t, fused.values_t)):
            same &= torch.equal(wanted.view(torch.uint8), found.view(torch.uint8))
        if not same:
            raise RuntimeError("casts to fp8 differ from those of torch's operations")


def _values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    numel = torch.Size(shape).numel()
    return torch.linspace(-3.0, 3.0, numel, device=device).sin_().view(shape).to(dtype)


def _compare(run: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    """`RuntimeError` unless values and gradients agree to the type's rounding."""
    found = []
    for fused in (False, True):
        leaves = [each.clone().requires_grad_() for each in inputs]
        out = run(*leaves, fused=fused)
        out.backward(torch.ones_like(out))
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for plain, fused in zip(*found, strict=True):
        error = F.l1_loss(fused.float(), plain.float()) / plain.float().abs().mean()
        if not error <= _TOLERANCE[plain.dtype]:
            raise RuntimeError(f"results differ by {float(error):.2g} from torch's operations")
