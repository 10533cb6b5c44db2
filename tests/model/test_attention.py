"""Attention by every kernel, and blocks of it, merged, against its definition in fp64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from model import block_attention
from model.attention import Documents, SavedAttention, attend, documents_of
from model.block_attention import (
    CausalAttention,
    Gpu,
    PartialAttention,
    attend_block,
    attend_saving,
    block_grads,
    check_attention,
    gpu_of,
    kernels_of,
)
from model.config import AttentionBackend
from tests.helpers.refusals import refused
from tests.helpers.triton_kernels import H100, hopper
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
    late = torch.arange(TOKENS, device=grad.device) >= CUT
    out, lse, dq, dk, dv = defined(q, k, v, grad * late[:, None, None])
    return [out[:, CUT:], lse[:, CUT:], dq[:, CUT:], dk, dv]


MARGIN = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2e-2}
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def compare(run: Run, apart: bool, dtype: torch.dtype, groups: int, size: int = 6) -> None:
    q, k, v, grad = inputs(groups, dtype, size=size)
    leaves = [part.detach().requires_grad_() for part in (q, k, v)]
    out = run(*leaves)
    found = [out, *torch.autograd.grad(out, leaves, grad)]
    wanted, _, *grads = defined(q, k, v, grad, LENGTHS if apart else None)
    all_near(found, [wanted, *grads], within=MARGIN[dtype])


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["auto", "flash", "unfused", "local"])
def test_every_kernel_of_a_cpu_computes_attention(
    backend: AttentionBackend, dtype: torch.dtype, groups: int
) -> None:
    for documents in (None, documents_of(LENGTHS, 3, CPU)):
        attended = partial(attend, backend=backend, documents=documents)
        compare(lambda *qkv, own=attended: own(qkv), bool(documents), dtype, groups)


def test_bounds_are_for_gpus_with_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    assert documents_of(None, 3, CPU) is documents_of((7, 7, 7), 3, CPU) is None
    assert documents_of(LENGTHS, 3, CPU) == Documents(LENGTHS, None)
    monkeypatch.setattr(Tensor, "pin_memory", lambda bounds_N: bounds_N)
    monkeypatch.setattr(Tensor, "to", lambda bounds_N, *_, **__: bounds_N)
    for capability, bounds in (((8, 0), [0, *itertools.accumulate(LENGTHS)]), ((7, 5), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, own=capability: own)
        bounds_N = documents_of(LENGTHS, 3, torch.device("cuda")).bounds_N
        assert (bounds_N if bounds_N is None else bounds_N.tolist()) == bounds


@pytest.mark.parametrize("groups", [4, 2])
def test_one_call_takes_what_flash_attention_takes(
    groups: int, monkeypatch: pytest.MonkeyPatch
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
        out, lse = CausalAttention(Documents(LENGTHS)).attend((q[None], k[None], v[None]))
        return out[0], lse[0].t()

    def flash_grads(*args: Any) -> list[Tensor]:
        *tensors, out, lse_NT = args[:6]
        check("backward", *args[6:])
        whole = PartialAttention(out[None], lse_NT.t()[None])
        grad, q, k, v = (part[None] for part in tensors)
        grads = CausalAttention(Documents(LENGTHS)).grads(grad, (q, k, v), whole)
        return [part[0] for part in grads]

    monkeypatch.setattr(block_attention, "_flash", flash)
    monkeypatch.setattr(block_attention, "_flash_grads", flash_grads)

    for backend, dtype, size, taken in (
        ("auto", torch.bfloat16, 64, True),
        ("flash", torch.float16, 256, True),
        ("auto", torch.float32, 64, False),
        *(("auto", torch.bfloat16, size, False) for size in (512, 20)),
        ("unfused", torch.bfloat16, 64, False),
    ):
        calls.clear()
        attended = partial(attend_saving, backend, documents=documents, saved=None)
        compare(lambda *qkv, own=attended: own(qkv), True, dtype, groups, size)
        assert calls == (["forward", "backward"] if taken else [])


def test_the_kernel_is_tried_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_attention(SMALL, torch.float32, CPU) == "auto, for these heads FlashAttention"
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: SDPBackend.MATH.value)
    assert "keep all scores" in check_attention(SMALL, torch.float32, CPU)
    math = replace(SMALL, attention_backend="unfused")
    assert check_attention(math, torch.bfloat16, CPU) == "unfused, matrix products and a softmax"
    fused = replace(SMALL, attention_backend="fused")
    refused(lambda: check_attention(fused, torch.float32, CPU), "--attention-backend fused")


# Kernels of parts

FLASH, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
A100, B300, RTX = (H100._replace(capability=sm) for sm in ((8, 0), (10, 3), (12, 0)))


def test_the_kernel_of_a_part_is_one_that_is_right_and_fast() -> None:
    def kernel(gpu: Gpu, head: int, queries: int, keys: int) -> SDPBackend:
        return gpu.block_kernel(head, queries, keys, causal=queries == keys)

    assert kernel(H100, 128, 4096, 4096) is kernel(B300, 64, 4096, 4096) is CUDNN
    assert kernel(H100, 128, 1000, 1000) is CUDNN
    by_flash = [
        kernel(A100, 128, 4096, 4096),
        kernel(RTX, 128, 4096, 4096),  # torch does not prefer it there
        kernel(H100._replace(cudnn=91500), 128, 4096, 4096),  # reads beyond sequences
        kernel(H100._replace(cudnn=0), 128, 4096, 4096),
        kernel(H100, 136, 4096, 4096),
        kernel(H100, 128, 1, 1),
        kernel(H100, 128, 4096, 2112),  # a tile with 64 keys
        kernel(H100, 128, 1, 128),
    ]
    assert {*by_flash} == {FLASH}


def test_flash_attention_is_taken_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(block_attention, "gpu_of", lambda _device: H100)
    monkeypatch.setattr(block_attention, "chosen_kernel", lambda *_: CUDNN)
    for dtype, size, backend, wanted in (
        (torch.bfloat16, 128, "auto", (CUDNN, CUDNN, FLASH)),
        (torch.bfloat16, 256, "auto", (CUDNN, FLASH, FLASH)),
        (torch.bfloat16, 128, "flash", (CUDNN, FLASH, FLASH)),
        (torch.bfloat16, 128, "fused", (CUDNN, CUDNN, CUDNN)),
        (torch.float32, 128, "auto", (CUDNN, CUDNN, CUDNN)),
    ):
        q, k, v, _ = inputs(2, dtype, size=size)
        assert kernels_of((q, k, v), backend) == wanted, (dtype, size, backend)
    monkeypatch.setattr(block_attention, "gpu_of", lambda _device: H100._replace(capability=(7, 5)))
    q, k, v, _ = inputs(2, torch.float16)
    assert kernels_of((q, k, v), "auto") == (CUDNN, CUDNN, CUDNN)


def test_a_cudnn_that_torch_refuses_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where LD_LIBRARY_PATH has an older one, torch raises the first time it is asked."""

    def version() -> int:
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    found = gpu_of.__wrapped__(torch.device("cuda"))
    assert (found, found.takes_cudnn) == (H100._replace(cudnn=0), False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("tile", [1, 64])
def test_parts_by_the_kernels_of_a_hopper_are_attention(
    tile: int, groups: int, dtype: torch.dtype
) -> None:
    """A square by cuDNN, and a rectangle by it or by FlashAttention."""
    q, k, v, grad = inputs(groups, dtype)
    with hopper(tile) as used:
        found, grads = two_blocks(q, k, v, grad)
    all_near([*found, *grads], of_last_queries(q, k, v, grad), within=MARGIN[dtype])
    rectangle = CUDNN if tile == 1 else FLASH
    assert used == [rectangle, CUDNN, rectangle, CUDNN]


def a_part(parts: Sequence[Tensor], *, causal: bool, flash: bool = False) -> list[Tensor]:
    """Output, log-sum-exp and gradients of some keys, where there are other keys, too."""
    q, k, v, grad, *others = parts
    own = attend_block((q, k, v), causal=causal, flash=flash)
    whole = PartialAttention(own.out_BSNH.to(torch.float32, copy=True), own.lse_BSN.clone())
    whole.merge_(attend_block((q, *others), flash=flash))
    given = PartialAttention(whole.out_BSNH.to(q.dtype), whole.lse_BSN)
    return [*own, *block_grads(grad, (q, k, v), given, causal=causal, flash=flash)]


@pytest.mark.slow("computes large tensors")
@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("shift", [0, -120])
@pytest.mark.parametrize(
    ("queries", "keys", "causal"),
    [
        *((256, 256, True), (192, 192, True), (200, 200, True), (1, 1, True)),
        *((256, 256, False), (128, 384, False), (256, 192, False), (1, 128, False)),
    ],
)
def test_parts_of_any_size_are_attention(
    queries: int, keys: int, shift: float, device: torch.device, *, causal: bool
) -> None:
    """By the kernel that is chosen and by FlashAttention, against fp32.

    With scores below the logarithm of the least number a kernel whose last tile has rows that it
    does not mask makes NaN.
    """
    sizes = ((queries, 4), (keys, 2), (keys, 2), (queries, 4), (128, 2), (128, 2))
    parts = [normal(2, *size, 64, seed=n, dtype=torch.bfloat16) for n, size in enumerate(sizes)]
    for part, value in ((parts[0], 8), (parts[1], shift), (parts[4], shift)):
        part[..., 0] = value  # of scores, scaled
    with hopper(1):
        wanted = a_part([part.float() for part in parts], causal=causal)
    assert (float(wanted[1].max()) < -88.7) == (shift < 0)
    on_device = [part.to(device) for part in parts]
    for flash in (False, True):
        found = a_part(on_device, causal=causal, flash=flash)
        all_near([part.cpu() for part in found], wanted, within=3e-2)


@pytest.mark.parametrize(("backend", "kernel"), [("auto", CUDNN), ("flash", FLASH)])
@pytest.mark.parametrize("apart", [False, True])
def test_what_is_kept_is_attention(
    backend: AttentionBackend, kernel: SDPBackend, *, apart: bool
) -> None:
    documents = documents_of(LENGTHS, 3, CPU) if apart else None

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_saving(backend, (q, k, v), documents, SavedAttention())

    with hopper() as used:
        compare(run, apart, torch.float32, 2)
    assert {*used} == {FLASH if apart else kernel}


# Blocks


def two_blocks(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor
) -> tuple[PartialAttention, list[Tensor]]:
    """Causal attention of the last queries: the keys before them, and their own."""
    late, early, own = slice(CUT, None), slice(CUT), (slice(None), slice(CUT, None))
    first = attend_block((q[:, late], k[:, early], v[:, early]))
    whole = PartialAttention(first.out_BSNH.float(), first.lse_BSN)
    whole.merge_(attend_block((q[own], k[own], v[own]), causal=True))
    total = PartialAttention(whole.out_BSNH.to(q.dtype), whole.lse_BSN)
    dq, dk, dv = (torch.zeros_like(part, dtype=torch.float32) for part in (q, k, v))
    for keys, causal in ((early, False), (late, True)):
        parts = q[own], k[:, keys], v[:, keys]
        found = block_grads(grad[own], parts, total, causal=causal)
        dq[own] += found[0]
        dk[:, keys] += found[1]
        dv[:, keys] += found[2]
    return total, [dq[own], dk, dv]


# FlashAttention of a GPU is for 16 bits.
PLACES = [(CPU, torch.float32), (CPU, torch.bfloat16)]
PLACES += [pytest.param(torch.device("cuda"), torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.mark.parametrize(("device", "dtype"), [*PLACES, (CPU, torch.float16)])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_merged_blocks_are_attention(dtype: torch.dtype, groups: int, device: torch.device) -> None:
    q, k, v, grad = inputs(groups, dtype, device)
    found, grads = two_blocks(q, k, v, grad)
    all_near([*found, *grads], of_last_queries(q, k, v, grad), within=MARGIN[dtype])
    assert found.lse_BSN.dtype == torch.float32


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("groups", [4, 2])
def test_squares_keep_documents_apart(
    dtype: torch.dtype, groups: int, lengths: tuple[int, ...] | None, device: torch.device
) -> None:
    q, k, v, grad = inputs(groups, dtype, device)
    attention = CausalAttention(documents_of(lengths, SAMPLES, device))
    whole = attention.attend((q, k, v))
    grads = attention.grads(grad, (q, k, v), whole)
    wanted = defined(q, k, v, grad, lengths)
    all_near([*whole, *grads], wanted, within=MARGIN[dtype])


def test_scores_far_apart_merge() -> None:
    """The exponential of a difference of scores may overflow."""
    q, k, v, grad = (part * 40 for part in inputs(HEADS, torch.float32))
    found, _ = two_blocks(q, k, v, grad)
    all_near(found, of_last_queries(q, k, v, grad)[:2], within=1e-5)
