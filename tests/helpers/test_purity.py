"""An unmarked test fails if it starts a process or takes long; studies run if -m names them."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import pytest_collection_modifyitems
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


@pytest.mark.parametrize(
    ("expression", "are_left"),
    [("", False), ("not slow", False), ("ranks", False), ("verify", True), ("not verify", True)],
)
def test_studies_are_left_out_unless_m_names_them(expression: str, are_left: bool) -> None:
    deselected: list[Any] = []
    config: Any = SimpleNamespace(
        getoption={"markexpr": expression}.__getitem__,
        hook=SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items)),
    )
    quick, study = item(), item("verify", "ranks")
    items = [quick, study]
    pytest_collection_modifyitems(config, items)
    assert (items, deselected) == (([quick, study], []) if are_left else ([quick], [study]))


def test_torch_computes_with_one_thread_in_the_tests_themselves() -> None:
    # conftest.py asks for it, which is too late once something has imported torch.
    assert torch.get_num_threads() == 1
