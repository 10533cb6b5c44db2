"""Attention by every kernel against its definition; documents in one call; what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from model import block_attention
from model.attention import Documents, attend, documents_of
from model.block_attention import (
    Partial,
    attend_causally,
    attend_keeping,
    causal_grads,
    check_attention,
)
from model.config import AttentionBackend
from tests.helpers.refusals import refused
from tests.model.values import SMALL, all_near, attention_by_definition, normal

LENGTHS = (5, 2, 7, 1, 6)
CPU = torch.device("cpu")


def heads(num_heads: int, seed: int, dtype: torch.dtype, size: int) -> Tensor:
    """[B, S, N, H] with three samples of odd length."""
    return normal(3, 7, num_heads, size, seed=seed, dtype=dtype).requires_grad_()


def compare(
    run: Callable[[Tensor, Tensor, Tensor], Tensor],
    apart: bool,
    dtype: torch.dtype,
    groups: int,
    size: int = 6,
) -> None:
    results, lengths = [], LENGTHS if apart else None
    for function in (run, lambda *qkv: attention_by_definition(*qkv, lengths)[0]):
        leaves = tuple(heads(count, i, dtype, size) for i, count in enumerate((4, groups, groups)))
        out = function(*leaves)
        out.backward(heads(4, 4, out.dtype, size).detach())
        results.append([out, *(leaf.grad for leaf in leaves)])
    all_near(*results, within=1e-5 if dtype == torch.float32 else 2e-2)


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


def test_the_kernel_is_tried_and_named() -> None:
    assert check_attention(SMALL, torch.float32, CPU) == "auto, for these heads FlashAttention"
    math = replace(SMALL, attention_backend="unfused")
    assert check_attention(math, torch.bfloat16, CPU) == "unfused, matrix products and a softmax"
    fused = replace(SMALL, attention_backend="fused")
    refused(lambda: check_attention(fused, torch.float32, CPU), "--attention-backend fused")
