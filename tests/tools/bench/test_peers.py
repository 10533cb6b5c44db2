"""Parts of compare_peers.py: figures of hand-made runs, processes, masters of AdamW."""

from __future__ import annotations

import math
import os
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from paro.errors import UserError
from tests.helpers.refusals import refused
from tools.bench.peers.figures import DisagreementError, TimedRun, check_agreement, compare
from tools.bench.peers.replicated import MASTERS_AT_ONCE, MasterAdamW
from tools.bench.peers.run import in_own_process
from tools.bench.peers.task import state_bytes


def timed_run(name: str, seconds: float = 1.0, **changed: Any) -> TimedRun:
    figures: dict[str, Any] = {
        "cpu_seconds": 4.0 * seconds,
        "state_bytes": 1_000_000,
        "peak_bytes": 3_000_000,
        "nic_bytes": 500_000,
        "losses": [5.0, 4.0],
        "grad_norms": [1.0, 2.0],
    }
    return TimedRun(contender=name, seconds=seconds, **{**figures, **changed})


def test_a_ratio_is_the_median_of_pairs_and_not_the_ratio_of_medians() -> None:
    rounds = {
        "slow": [timed_run("slow", 4.0), timed_run("slow", 10.0), timed_run("slow", 6.0)],
        "fast": [timed_run("fast", 2.0), timed_run("fast", 9.0), timed_run("fast", 2.0)],
    }
    slow, fast = compare(rounds, "slow")
    assert (slow["speed"], slow["slowest"], slow["fastest"]) == (1.0, 1.0, 1.0)
    assert fast["speed"] == 2.0  # median of 2, 10/9 and 3; the ratio of medians is 6 / 2
    assert (fast["slowest"], fast["fastest"]) == (10.0 / 9.0, 3.0)


def test_who_differs_is_named() -> None:
    first = timed_run("ddp")
    check_agreement(first, timed_run("near", losses=[5.0, 4.0004]), tolerance=1e-4)
    with pytest.raises(DisagreementError, match=r"far differs from ddp: losses 4\.1 .* in step 2"):
        check_agreement(first, timed_run("far", losses=[5.0, 4.1]), tolerance=1e-2)
    with pytest.raises(DisagreementError, match="losses nan"):
        check_agreement(first, timed_run("lost", losses=[5.0, math.nan]), tolerance=1e-2)
    scaled = timed_run("scaled", grad_norms=[4.0, 8.0])  # which Adam does not feel
    with pytest.raises(DisagreementError, match=r"scaled differs from ddp: grad_norms 4 and 1"):
        check_agreement(first, scaled, tolerance=1e-2)


def fail(kind: type[Exception]) -> None:
    raise kind("the peer is broken")


@pytest.mark.process
def test_what_a_function_returns_or_raises_comes_back_from_another_process() -> None:
    assert in_own_process(os.getpid) != os.getpid()
    refused(lambda: in_own_process(partial(fail, UserError)), "the peer is broken")
    with pytest.raises(ArithmeticError, match="the peer is broken"):
        in_own_process(partial(fail, ArithmeticError))


@pytest.mark.process
def test_a_process_that_was_killed_is_told() -> None:
    with pytest.raises(BrokenProcessPool):
        in_own_process(partial(os._exit, 7))


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
