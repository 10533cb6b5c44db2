"""An unmarked test fails if it starts a process or, under a limit, takes long."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.purity import MAY_START, ProcessStartedError, held


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
def test_a_marked_one_may(mark: str) -> None:
    with held(item(mark)):
        popen()


def test_torch_computes_with_one_thread_in_the_tests_themselves() -> None:
    # conftest.py asks for it, which is too late once something has imported torch.
    assert torch.get_num_threads() == 1
