"""Attention by every kernel, and blocks of it, merged, against its definition in fp64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from model import block_attention
from model.attention import Documents, attend, documents_of
from model.block_attention import (
    Partial,
    attend_block,
    attend_causally,
    attend_keeping,
    block_grads,
    causal_grads,
    check_attention,
)
from model.config import AttentionBackend
from tests.helpers.refusals import refused
from tests.model.values import SMALL, all_near, attention_by_definition, normal

CPU = torch.device("cpu")
GPU = pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)
SAMPLES, TOKENS, HEADS = 3, 7, 4
CUT = 3  # the first block's keys, which is a rectangle; the second is a square
LENGTHS = (5, 2, 7, 1, 6)  # of documents


def inputs(
    groups: int, dtype: torch.dtype, device: torch.device = CPU, size: int = 16
) -> list[Tensor]:
    """q, k, v and a gradient, in tensors of which they are every other token."""
    return [
        normal(SAMPLES, 2 * TOKENS, heads, size, seed=seed, dtype=dtype).to(device)[:, ::2]
        for seed, heads in enumerate((HEADS, groups, groups, HEADS))
    ]


def defined(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, lengths: tuple[int, ...] | None = None
) -> list[Tensor]:
    """Output, log-sum-exp and the gradients of q, k and v, in fp64."""
    leaves = [part.double().requires_grad_() for part in (q, k, v)]
    out, lse = attention_by_definition(*leaves, lengths)
    return [out, lse, *torch.autograd.grad(out, leaves, grad.double())]


def of_last_queries(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """The same for the queries of the second block."""
    late = torch.arange(TOKENS, device=grad.device) >= CUT
    out, lse, dq, dk, dv = defined(q, k, v, grad * late[:, None, None])
    return [out[:, CUT:], lse[:, CUT:], dq[:, CUT:], dk, dv]


def margin(dtype: torch.dtype) -> float:
    return 3e-6 if dtype == torch.float32 else 2e-2


def compare(
    run: Callable[[Tensor, Tensor, Tensor], Tensor],
    apart: bool,
    dtype: torch.dtype,
    groups: int,
    size: int = 6,
) -> None:
    q, k, v, grad = inputs(groups, dtype, size=size)
    leaves = [part.detach().requires_grad_() for part in (q, k, v)]
    out = run(*leaves)
    found = [out, *torch.autograd.grad(out, leaves, grad)]
    wanted, _, *grads = defined(q, k, v, grad, LENGTHS if apart else None)
    all_near(found, [wanted, *grads], within=margin(dtype))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["auto", "flash", "unfused", "local"])
def test_every_kernel_of_a_cpu_computes_attention(
    backend: AttentionBackend, dtype: torch.dtype, groups: int, *, apart: bool
) -> None:
    documents = documents_of(LENGTHS, 3, CPU) if apart else None
    compare(lambda q, k, v: attend(q, k, v, backend, documents), apart, dtype, groups)


def test_one_document_a_sample_needs_nothing() -> None:
    assert documents_of(None, 3, CPU) is None
    assert documents_of((7, 7, 7), 3, CPU) is None
    assert documents_of(LENGTHS, 3, CPU) == Documents(LENGTHS, None)


@pytest.mark.parametrize("capability", [(9, 0), (8, 0), (7, 5)])
def test_bounds_are_for_gpus_with_flash_attention(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(Tensor, "pin_memory", lambda bounds_N: bounds_N)
    monkeypatch.setattr(Tensor, "to", lambda bounds_N, *_, **__: bounds_N)
    documents = documents_of(LENGTHS, 3, torch.device("cuda"))
    assert documents is not None
    bounds_N = documents.bounds_N
    assert (bounds_N is not None) == (capability >= (8, 0))
    assert bounds_N is None or bounds_N.tolist() == [0, *itertools.accumulate(LENGTHS)]


@pytest.mark.parametrize(
    ("backend", "dtype", "size", "taken"),
    [
        ("auto", torch.bfloat16, 64, True),
        ("flash", torch.float16, 256, True),
        ("auto", torch.float32, 64, False),
        ("auto", torch.bfloat16, 512, False),
        ("auto", torch.bfloat16, 20, False),
        ("unfused", torch.bfloat16, 64, False),
    ],
)
@pytest.mark.parametrize("groups", [4, 2])
def test_one_call_takes_what_flash_attention_takes(
    backend: AttentionBackend,
    dtype: torch.dtype,
    size: int,
    groups: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    taken: bool,
) -> None:
    """With stand-ins for FlashAttention on a GPU, which has no other way to take documents."""
    bounds_N = torch.tensor([0, 5, 7, 14, 15, 21], dtype=torch.int32)
    documents = Documents(LENGTHS, bounds_N)
    calls: list[str] = []

    def check(name: str, *rest: Any) -> None:
        calls.append(name)
        assert rest == (bounds_N, bounds_N, max(LENGTHS), max(LENGTHS), True)

    def flash(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        check("forward", *rest)
        out, lse = attend_causally(q[None], k[None], v[None], Documents(LENGTHS))
        return out[0], lse[0].t()

    def flash_grads(*args: Any) -> list[Tensor]:
        *tensors, out, lse_NT = args[:6]
        check("backward", *args[6:])
        whole = Partial(out[None], lse_NT.t()[None])
        grad, q, k, v = (part[None] for part in tensors)
        return [part[0] for part in causal_grads(grad, q, k, v, whole, Documents(LENGTHS))]

    monkeypatch.setattr(block_attention, "_flash", flash)
    monkeypatch.setattr(block_attention, "_flash_grads", flash_grads)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_keeping(backend, q, k, v, documents, None)

    compare(run, True, dtype, groups, size)
    assert calls == (["forward", "backward"] if taken else [])


def test_the_kernel_is_tried_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_attention(SMALL, torch.float32, CPU) == "auto, for these heads FlashAttention"
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: SDPBackend.MATH.value)
    assert "keep all scores" in check_attention(SMALL, torch.float32, CPU)
    math = replace(SMALL, attention_backend="unfused")
    assert check_attention(math, torch.bfloat16, CPU) == "unfused, matrix products and a softmax"
    fused = replace(SMALL, attention_backend="fused")
    refused(lambda: check_attention(fused, torch.float32, CPU), "--attention-backend fused")


# Blocks


def two_blocks(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Partial, list[Tensor]]:
    """Causal attention of the last queries: the keys before them, and their own."""
    late, early, own = slice(CUT, None), slice(CUT), (slice(None), slice(CUT, None))
    first = attend_block(q[:, late], k[:, early], v[:, early])
    whole = Partial(first.out_BSNH.float(), first.lse_BSN)
    whole.merge_(attend_block(q[own], k[own], v[own], causal=True))
    total = Partial(whole.out_BSNH.to(q.dtype), whole.lse_BSN)
    dq, dk, dv = (torch.zeros_like(part, dtype=torch.float32) for part in (q, k, v))
    for keys, causal in ((early, False), (late, True)):
        found = block_grads(grad[own], q[own], k[:, keys], v[:, keys], total, causal=causal)
        dq[own] += found[0]
        dk[:, keys] += found[1]
        dv[:, keys] += found[2]
    return total, [dq[own], dk, dv]


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_merged_blocks_are_attention(dtype: torch.dtype, groups: int, device: torch.device) -> None:
    if device.type == "cuda" and dtype == torch.float32:
        pytest.skip("FlashAttention is for 16 bits")
    q, k, v, grad = inputs(groups, dtype, device)
    found, grads = two_blocks(q, k, v, grad)
    all_near([*found, *grads], of_last_queries(q, k, v, grad), within=margin(dtype))
    assert found.lse_BSN.dtype == torch.float32


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_keep_documents_apart(
    dtype: torch.dtype, groups: int, lengths: tuple[int, ...] | None, device: torch.device
) -> None:
    if device.type == "cuda" and dtype == torch.float32:
        pytest.skip("FlashAttention is for 16 bits")
    q, k, v, grad = inputs(groups, dtype, device)
    documents = documents_of(lengths, SAMPLES, device)
    whole = attend_causally(q, k, v, documents)
    grads = causal_grads(grad, q, k, v, whole, documents)
    wanted = defined(q, k, v, grad, lengths)
    all_near([*whole, *grads], wanted, within=margin(dtype))


def test_scores_far_apart_merge() -> None:
    """The exponential of a difference of scores may overflow."""
    q, k, v, grad = (part * 40 for part in inputs(HEADS, torch.float32))
    found, _ = two_blocks(q, k, v, grad)
    all_near(found, of_last_queries(q, k, v, grad)[:2], within=1e-5)
