"""An unmarked test fails if it starts a process or, under a limit, takes long."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers import purity
from tests.helpers.purity import MAY_START, ProcessStartedError, held, timed


def item(*marks: str) -> Any:
    return SimpleNamespace(nodeid="the test", get_closest_marker=lambda name: name in marks or None)


def popen() -> None:
    subprocess.run(["true"], check=True)


def fork() -> None:
    process = multiprocessing.get_context("fork").Process(target=os.getpid)
    process.start()
    process.join()


def spawn() -> None:
    multiprocessing.get_context("spawn").Process(target=os.getpid).start()


@pytest.mark.parametrize("start", [popen, fork, spawn])
def test_an_unmarked_test_starts_no_process(start: Callable[[], None]) -> None:
    told = r"the test starts .*@pytest\.mark\.process"
    with pytest.raises(ProcessStartedError, match=told), held(item()):
        start()


@pytest.mark.process
@pytest.mark.parametrize("mark", MAY_START)
@pytest.mark.parametrize("start", [popen, fork])
def test_a_marked_one_may(start: Callable[[], None], mark: str) -> None:
    with held(item(mark)):
        start()


def busy() -> None:
    began = time.process_time()
    while time.process_time() - began < 0.02:
        pass


def test_a_long_test_fails_and_gives_its_reason_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purity, "slowness", lambda: 1.0)
    with timed(item(), 1.0):
        busy()
    with timed(item("slow"), 0.01):
        busy()
    told = r"of processor time, more than 0\.01 s"
    with pytest.raises(pytest.fail.Exception, match=told), timed(item(), 0.01):
        busy()
    monkeypatch.setattr(purity, "slowness", lambda: 100.0)  # of a machine that has more time
    with timed(item(), 0.01):
        busy()


def test_a_machine_is_as_slow_as_its_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    assert purity.slowness() >= 1.0
    monkeypatch.setattr(purity, "_FLOPS", 1e20)
    assert purity.slowness() > 1e4


def test_torch_computes_with_one_thread_in_the_tests_themselves() -> None:
    # conftest.py asks for it, which is too late once something has imported torch.
    assert torch.get_num_threads() == 1
