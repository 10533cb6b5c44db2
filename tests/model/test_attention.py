"""Attention by every kernel against its definition; documents in one call; what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from model import attention
from model.attention import Documents, as_varlen, attend, check_attention, documents_of, varlen_for
from model.config import AttentionBackend, LlamaConfig
from tests.helpers.refusals import refused
from tests.model.values import all_near, assert_near, normal

CONFIG = LlamaConfig(
    num_layers=1,
    hidden_size=24,
    ffn_hidden_size=8,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=6,
    max_position_embeddings=16,
    vocab_size=9,
)
LENGTHS = (5, 2, 7, 1, 6)
CPU = torch.device("cpu")


def heads(num_heads: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[B, S, N, H] with two samples of odd length."""
    return normal(3, 7, num_heads, 6, seed=seed, dtype=dtype).requires_grad_()


def defined(
    q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, lengths: Sequence[int] | None
) -> Tensor:
    """Attention by its definition, in fp32; with documents of these lengths apart."""
    repeats = q_BSNH.shape[2] // k_BSKH.shape[2]
    q, k, v = (x.float().transpose(1, 2) for x in (q_BSNH, k_BSKH, v_BSKH))
    k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    batch, _, seq, _ = q.shape
    seen = torch.ones(seq, seq, dtype=torch.bool).tril()[None]
    if lengths is not None:
        number_BS = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        number_BS = number_BS.view(batch, seq)
        seen = seen & (number_BS[:, :, None] == number_BS[:, None])
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return (scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1) @ v).transpose(1, 2)


def compare(
    run: Callable[[Tensor, Tensor, Tensor], Tensor], apart: bool, dtype: torch.dtype, groups: int
) -> None:
    results = []
    for function in (run, lambda *qkv: defined(*qkv, LENGTHS if apart else None)):
        leaves = heads(4, 1, dtype), heads(groups, 2, dtype), heads(groups, 3, dtype)
        out = function(*leaves)
        out.backward(heads(4, 4, out.dtype).detach())
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


def one_by_one(q: Tensor, k: Tensor, v: Tensor, bounds_N: Tensor, longest: int) -> Tensor:
    lengths = bounds_N.diff().tolist()
    assert max(lengths) == longest
    parts = zip(*(part.split(lengths) for part in (q, k, v)), strict=True)
    return torch.cat([attend(*(x[None] for x in part), backend="unfused")[0] for part in parts])


class StandIn:
    """Stands for torch's varlen_attn with the parameters of a version."""

    def __init__(self, *options: str, takes_groups: bool = False) -> None:
        names = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", *options)
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
        self._options = set(options)
        self.takes_groups = takes_groups or "enable_gqa" in options
        self.key_heads = 0  # of the last call

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        query, key, value, bounds_N, other_bounds_N, longest, other_longest = args
        assert options.keys() == self._options
        assert options.get("is_causal", True)
        assert options.get("window_size", (-1, 0)) == (-1, 0)
        self.key_heads = key.shape[1]
        groups = query.shape[1] != self.key_heads
        assert "enable_gqa" not in self._options or options["enable_gqa"] == groups
        if groups and not self.takes_groups:
            raise ValueError("queries and keys have different numbers of heads")
        assert torch.equal(bounds_N, other_bounds_N)
        assert longest == other_longest
        return one_by_one(query, key, value, bounds_N, longest)


SIGNATURES = {
    "causal by a flag": StandIn("is_causal"),
    "causal by a window": StandIn("window_size"),
    "groups without a word": StandIn("window_size", takes_groups=True),  # torch 2.11
    "groups of queries too": StandIn("window_size", "enable_gqa"),  # torch 2.13
}


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("signature", SIGNATURES)
def test_documents_in_one_call(
    signature: str, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    of_version = SIGNATURES[signature]
    run = as_varlen(of_version, CPU)

    def varlen(*args: Tensor | int) -> Tensor:
        calls.append(len(args))
        return run(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "varlen_for", lambda *_: varlen)
    bounds_N = torch.tensor([0, 5, 7, 14, 15, 21], dtype=torch.int32)
    documents = Documents(LENGTHS, bounds_N)
    compare(lambda q, k, v: attend(q, k, v, "auto", documents), True, torch.float32, groups)
    assert len(calls) == 1
    assert of_version.key_heads == (groups if of_version.takes_groups else 4)


class FakeHeads(NamedTuple):
    """What is asked of queries on a GPU that is not there."""

    device: torch.device
    itemsize: int
    shape: tuple[int, ...]


@pytest.mark.parametrize(
    ("dtype", "size", "capability", "taken"),
    [
        (torch.bfloat16, 64, (8, 0), True),
        (torch.float16, 256, (9, 0), True),
        (torch.float32, 64, (9, 0), False),
        (torch.bfloat16, 512, (9, 0), False),
        (torch.bfloat16, 20, (9, 0), False),
        (torch.float16, 64, (7, 5), False),
    ],
)
def test_one_call_takes_what_flash_attention_takes(
    dtype: torch.dtype,
    size: int,
    capability: tuple[int, int],
    taken: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attention._find_varlen.cache_clear()
    assert varlen_for(heads(4, 1, torch.bfloat16), "auto") is None, "this is a CPU"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(attention, "_agree", lambda *_: True)  # needs the GPU
    given = FakeHeads(torch.device("cuda"), dtype.itemsize, (1, 2, 4, size))
    found = varlen_for(given, "auto")  # type: ignore[arg-type]
    attention._find_varlen.cache_clear()
    assert (found is not None) == taken


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [4, 2])
def test_documents_in_one_call_on_a_gpu(groups: int) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(3, 7, count, 64, generator=generator).to("cuda", torch.bfloat16)
        for count in (4, groups, groups)
    )
    documents = documents_of(LENGTHS, 3, q.device)
    assert documents is not None
    assert varlen_for(q, "auto") is not None
    found = attend(q, k, v, "auto", documents)
    assert_near(found.cpu(), defined(q.cpu(), k.cpu(), v.cpu(), LENGTHS), within=2e-2)


def test_the_kernel_is_tried_and_named() -> None:
    assert check_attention(CONFIG, torch.float32, CPU) == "auto, for these heads FlashAttention"
    math = replace(CONFIG, attention_backend="unfused")
    assert check_attention(math, torch.bfloat16, CPU) == "unfused, matrix products and a softmax"
    fused = replace(CONFIG, attention_backend="fused")
    refused(lambda: check_attention(fused, torch.float32, CPU), "--attention-backend fused")
