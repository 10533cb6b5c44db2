"""Bytes of states, and AdamW over master parameters."""

from __future__ import annotations

import torch
from torch import nn

from tools.bench.peers.replicated import MASTERS_AT_ONCE, MasterAdamW
from tools.bench.peers.task import state_bytes

SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def test_a_storage_counts_once_and_whole_unless_it_is_given_up_or_a_scalar() -> None:
    flat, other = torch.zeros(100, dtype=torch.bfloat16), torch.zeros(7)
    given_up = torch.zeros(100)
    given_up.untyped_storage().resize_(0)
    held = [flat[:10], flat[50:], other, other.view(7, 1), torch.tensor(3.0), given_up]
    assert state_bytes(held) == 200 + 28


def test_an_fp32_parameter_is_its_own_master() -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(5, 3)) for _ in range(MASTERS_AT_ONCE + 3)]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    optimizer = MasterAdamW(ours, **SETTINGS)
    reference = torch.optim.AdamW(theirs, **SETTINGS, fused=True)
    for _ in range(3):
        for own, other in zip(ours, theirs, strict=True):
            own.grad = torch.randn(5, 3)
            other.grad = own.grad.clone()
        optimizer.step()
        reference.step()
    assert all(torch.equal(own, other) for own, other in zip(ours, theirs, strict=True))
    assert state_bytes([*ours, *optimizer.held()]) == 3 * 4 * sum(p.numel() for p in ours)


def test_masters_keep_what_bf16_would_lose() -> None:
    parameter = nn.Parameter(torch.full((4,), 256.0, dtype=torch.bfloat16))
    optimizer = MasterAdamW([parameter], **{**SETTINGS, "weight_decay": 0.0, "lr": 0.25})
    for _ in range(4):  # each 0.25, a quarter of bf16's resolution here
        parameter.grad = torch.full((4,), -1.0, dtype=torch.bfloat16)
        optimizer.step()
        assert parameter.grad is not None, "gradients stay views of their buckets"
    (master, *moments) = (tensor for tensor in optimizer.held() if tensor.dim() > 0)
    assert master.dtype == torch.float32
    torch.testing.assert_close(master, torch.full((4,), 257.0))
    assert len(moments) == 2
