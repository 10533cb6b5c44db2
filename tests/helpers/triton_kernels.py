"""Kernels of GPUs on a CPU: Triton's, interpreted or compiled, and stand-ins for an H100's."""

# The interpreter is chosen by an environment variable when Triton is first imported, so conftest.py
# sets it where there is no GPU; what compiles or needs a GPU has a process of its own.

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import _disable_current_modes

from model import block_attention, fusion
from model.block_attention import Gpu
from paro.optim import adamw, muon
from paro.quantization import blocks

CAPABILITIES = (80, 90, 100)  # of A100, H100 and H200, B200


def skip_on_gpus() -> None:
    """There Triton does not interpret, and tests marked `gpu` compare the kernels themselves."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("a GPU is here: tests marked gpu run the kernels on it")


@contextmanager
def interpreter() -> Iterator[None]:
    """In the block a CPU has the kernels, interpreted."""
    skip_on_gpus()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fusion, "DEVICES", {"cpu"})
        patch.setattr(adamw, "TRITON_DEVICES", {"cpu"})
        patch.setattr(blocks, "DEVICES", {"cpu"})
        _let_scalars_be_indices(patch)
        forget_choices()
        try:
            yield
        finally:
            forget_choices()


def _let_scalars_be_indices(patch: pytest.MonkeyPatch) -> None:
    """Triton 3.6, with torch 2.11, takes int() of an array of one, which NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    as_it_is = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        as_it_is(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    patch.setattr(interpreter, "_patch_lang_tensor", patched)


@contextmanager
def bytes_by_kernel() -> Iterator[dict[str, int]]:
    """What the kernels that the interpreter runs in the block read and write, by their names.

    A dispatch mode sees nothing of them.
    """
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    moved: dict[str, int] = {}
    running: list[str] = []
    launch = GridExecutor.__call__
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def count(pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        moved[running[-1]] += int(mask.data.sum()) * size

    def launched(grid: Any, *args: Any, **kwargs: Any) -> None:
        running.append(grid.fn.__name__)
        moved.setdefault(running[-1], 0)
        with _disable_current_modes():  # it copies arguments
            launch(grid, *args, **kwargs)
        running.pop()

    def loaded(builder: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        count(pointers, mask)
        return load(builder, pointers, mask, *others)

    def stored(builder: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        count(pointers, mask)
        return store(builder, pointers, value, mask, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", launched)
        patch.setattr(InterpreterBuilder, "create_masked_load", loaded)
        patch.setattr(InterpreterBuilder, "create_masked_store", stored)
        yield moved


def forget_choices() -> None:
    fusion.usable_kernels.cache_clear()
    adamw.choose_adamw.cache_clear()
    muon.choose_muon_kernels.cache_clear()
    blocks.choose_kernels.cache_clear()


def compiled(kernel: Any, *args: Any, capabilities: tuple[int, ...], **options: Any) -> str:
    """The PTX of a kernel for what it is launched with, for the oldest GPU that runs it.

    Machine code is made for the GPUs that are asked for. The interpreter accepts more.
    """
    from triton.runtime.jit import mangle_type

    bound = kernel.signature.bind(
        *args, **{k: options[k] for k in kernel.arg_names if k in options}
    )
    bound.apply_defaults()
    given = bound.arguments
    constants = {p.name: given[p.name] for p in kernel.params if p.is_constexpr}
    constants |= {name: None for name, value in given.items() if value is None}
    types = {n: "constexpr" if n in constants else mangle_type(v) for n, v in given.items()}
    return _ptx(kernel, tuple(types.items()), tuple(constants.items()), capabilities)


@cache
def _ptx(
    kernel: Any,
    types: tuple[tuple[str, str], ...],
    constants: tuple[tuple[str, object], ...],
    capabilities: tuple[int, ...],
) -> str:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_source

    places = {(kernel.arg_names.index(name),): value for name, value in constants}
    source = ASTSource(kernel, signature=dict(types), constexprs=places)
    oldest = 90 if dict(constants).get("NATIVE") else 80  # which has fp8
    codes = {
        capability: compile_source(source, target=GPUTarget("cuda", capability, 32)).asm
        for capability in capabilities
        if capability >= oldest
    }
    for capability, code in codes.items():
        assert f".target sm_{capability}" in code["ptx"]
        assert len(code["cubin"]) > 1000
    ptx: str = codes[min(codes)]["ptx"]
    return ptx


# cuDNN's operators are registered for the CPU, so torch checks what they are given against their
# schemas. They compute in fp32 by the definition, and refuse what cuDNN, or a plan of it that torch
# has kept, would compute wrong.

H100 = Gpu(capability=(9, 0), cudnn=91900)

aten = torch.ops.aten


def _repeated(x_BKTH: Tensor, q_BNSH: Tensor) -> Tensor:
    return x_BKTH.float().repeat_interleave(q_BNSH.shape[1] // x_BKTH.shape[1], 1)


def _scores(q_BNSH: Tensor, k_BKTH: Tensor, is_causal: bool) -> Tensor:
    """Scaled scores in fp32; a causal mask begins at the first query and the first key."""
    scores_BNST = q_BNSH.float() @ _repeated(k_BKTH, q_BNSH).mT * q_BNSH.shape[-1] ** -0.5
    hidden = torch.ones_like(scores_BNST, dtype=torch.bool).triu(1)
    return scores_BNST.masked_fill(hidden, float("-inf")) if is_causal else scores_BNST


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    computes_lse: bool,
    dropout: float = 0.0,
    is_causal: bool = False,
) -> tuple[Any, ...]:
    assert bias is None
    assert computes_lse
    assert dropout == 0.0
    scores = _scores(q, k, is_causal)
    lse_BNS1 = scores.logsumexp(-1, keepdim=True)
    out = torch.empty_like(q).copy_((scores - lse_BNS1).exp() @ _repeated(v, q))
    none, number = torch.empty(0), torch.zeros((), dtype=torch.int64)
    return out, lse_BNS1, none, none, q.shape[2], k.shape[2], number, number, none


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_BNS1: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    seed, offset, bias, *bounds, queries, keys, dropout, is_causal = rest
    assert (queries, keys, dropout) == (q.shape[2], k.shape[2], 0.0)
    assert bias is None
    assert bounds == [None, None]
    assert seed.dtype == offset.dtype == torch.int64
    assert lse_BNS1.shape == (*q.shape[:3], 1)
    assert lse_BNS1.dtype == torch.float32
    assert lse_BNS1.is_contiguous()
    assert lse_BNS1.storage_offset() == 0
    assert grad.transpose(1, 2).is_contiguous()
    assert out.transpose(1, 2).is_contiguous()
    p = (_scores(q, k, is_causal) - lse_BNS1).exp()
    row = (grad.float() * out.float()).sum(-1, keepdim=True)
    ds = p * (grad.float() @ _repeated(v, q).mT - row) * q.shape[-1] ** -0.5
    dq, dk, dv = ds @ _repeated(k, q), ds.mT @ q.float(), p.mT @ grad.float()
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _flash(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    *lengths, dropout, is_causal, _ = rest
    assert lengths == [None, None, q.shape[1], k.shape[1]]
    first = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*first, dropout, is_causal)
    return [out.transpose(1, 2), lse]


def _flash_backward(*args: Any) -> list[Tensor]:
    *tensors, lse, _, _, queries, keys, dropout, is_causal, _, _ = args
    assert (queries, keys) == (tensors[1].shape[1], tensors[2].shape[1])
    assert lse.is_contiguous()
    first = (x.transpose(1, 2) for x in tensors)
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return [x.transpose(1, 2) for x in grads(*first, lse, dropout, is_causal)]


@contextmanager
def hopper(tile: int = block_attention.TILE) -> Iterator[list[SDPBackend]]:
    """In the block parts are computed by the kernels of an H100, whose names are listed."""
    used: list[SDPBackend] = []

    def chosen(q: Tensor, k: Tensor, causal: bool, flash: bool) -> SDPBackend:
        kernel = H100.block_kernel(q.shape[-1], q.shape[1], k.shape[1], causal=causal)
        used.append(SDPBackend.FLASH_ATTENTION if flash else kernel)
        return used[-1]

    library = torch.library.Library("aten", "IMPL")
    name = "_scaled_dot_product_cudnn_attention"
    for operator, function in ((name, _forward), (f"{name}_backward", _backward)):
        library.impl(operator, function, "CPU")
    with (
        patch.object(block_attention, "TILE", tile),
        patch.object(block_attention, "_block_kernel", chosen),
        patch.object(aten, "_flash_attention_forward", _flash),
        patch.object(aten, "_flash_attention_backward", _flash_backward),
    ):
        yield used
    library._destroy()
