"""The process of a run: its result, and how its end is reported."""

from __future__ import annotations

import os
from concurrent.futures.process import BrokenProcessPool
from functools import partial

import pytest
import torch
import torch.distributed as dist

from paro.errors import UserError
from tests.helpers.refusals import refused
from tools.bench.peers.run import backends_on, in_own_process

pytestmark = pytest.mark.process


def fail(kind: type[Exception]) -> None:
    raise kind("the peer is broken")


def test_what_a_function_returns_or_raises_comes_back_from_another_process() -> None:
    assert in_own_process(os.getpid) != os.getpid()
    refused(lambda: in_own_process(partial(fail, UserError)), "the peer is broken")
    with pytest.raises(ArithmeticError, match="the peer is broken"):
        in_own_process(partial(fail, ArithmeticError))


def test_a_process_that_was_killed_is_told() -> None:
    with pytest.raises(BrokenProcessPool):
        in_own_process(partial(os._exit, 7))


@pytest.mark.parametrize(
    ("device", "expected"), [("cpu", {"cpu": "gloo"}), ("cuda", {"cpu": "gloo", "cuda": "nccl"})]
)
def test_the_default_group_sums_what_is_on_the_host(device: str, expected: dict[str, str]) -> None:
    backend = dist.Backend(backends_on(torch.device(device)))
    found = dist.distributed_c10d.BackendConfig(backend).get_device_backend_map()
    assert found | expected == found
