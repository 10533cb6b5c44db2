"""Helpers of tests: refusals are met by what they name, failures of ranks told, marks held."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paro.distributed.control import Control
from paro.errors import RunError, UserError
from tests.conftest import pytest_collection_modifyitems
from tests.gpu.test_ranks import GROUPS, HO_RING, ROTATED, compare_all, flags_of, train_on_threads
from tests.helpers.outcomes import ProcessStartedError, held
from tests.helpers.rank_threads import run_rank_threads
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.refusals import refused
from tests.helpers.training import assert_same, train
from tests.helpers.warm_process import HANGS_AFTER, warm_process

LINE = "--lr-decay-iters 50 is too much: give --train-iters 60, or less"


def raises(error: BaseException, printed: str = "") -> Callable[[], None]:
    def run() -> None:
        sys.stderr.write(printed)
        raise error

    return run


def prints(text: str) -> Callable[[], int]:
    return lambda: sys.stderr.write(text) and 2


@pytest.mark.parametrize(
    "run",
    [
        raises(UserError(LINE)),
        raises(SystemExit(2), f"tool.py: error: {LINE}\n"),
        prints(f"tool.py: error: {LINE}\n"),
        CompletedProcess([], 2, "", f"tool.py: error: {LINE}\n"),
    ],
)
def test_a_refusal_is_met_by_what_it_names(run: Callable[[], object]) -> None:
    assert refused(run, "--lr-decay-iters 50 ... give --train-iters 60", "too much") == LINE
    for text in ("--lr", "--lr-decay-iters 5", "--train-iters ... --lr-decay-iters", "--seed"):
        with pytest.raises(AssertionError, match="is not in"):
            refused(run, text)
    with pytest.raises(AssertionError, match="ended with 2, not 1"):
        refused(run, status=1)
    assert refused(raises(RunError(LINE)), status=1) == LINE


def test_what_is_no_refusal_fails() -> None:
    texts = ("", "tool.py: error: two\nlines\n", "usage: tool.py\n")
    ended = CompletedProcess([], 1, "", f"tool.py: error: {LINE}\n")
    calls: list[Any] = [lambda: None, *map(prints, texts), raises(UserError("one", "another"))]
    for run in (*calls, ended):
        with pytest.raises(AssertionError):
            refused(run)


def fail() -> None:
    raise ValueError("on purpose")


def leave() -> None:
    os._exit(7)


def hang() -> None:
    threading.Event().wait()


def on_one(what: Callable[[], None], failing: int) -> None:
    if dist.get_rank() == failing:
        what()
    if what is not hang:
        dist.barrier()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("what", "message"),
    [
        (fail, r"rank 2 of 4 failed\n(.*\n)*.*fail\n(.*\n)*ValueError: on purpose"),
        (leave, "rank 2 of 4 failed\nthe process ended with 7"),
        (hang, r"of 4 ranks, no answer within 2\.0 s from 2 "),
    ],
)
def test_a_failure_ends_the_call_and_not_the_next(what: Callable[[], None], message: str) -> None:
    assert len({*run_ranks(os.getpid, 4)}) == 4  # so that a timeout does not cover the start
    with pytest.raises(RankError, match=message):
        run_ranks(on_one, 4, what, 2, timeout=2.0 if what is hang else HANGS_AFTER)
    assert len({*run_ranks(os.getpid, 4)}) == 4


def note_parent(file: Path) -> None:
    file.write_text(str(os.getppid()))


def start_another(folder: Path) -> None:
    note_parent(folder / "outer")
    process = warm_process(note_parent, folder / "inner", name="inner")
    process.start()
    process.join()


@pytest.mark.process
def test_what_a_warm_process_starts_is_forked_from_the_one_server(tmp_path: Path) -> None:
    process = warm_process(start_another, tmp_path, name="outer")
    process.start()
    process.join()
    assert (tmp_path / "outer").read_text() == (tmp_path / "inner").read_text() != str(os.getpid())


CPU = torch.device("cpu")


@pytest.mark.slow("trains on 4 threads, and on none")
def test_threads_train_as_one_process_does() -> None:
    alone, flags = train(flags_of("gloo", "")), flags_of("nccl", f"{ROTATED} {HO_RING}")
    for found in run_rank_threads(lambda on: train(flags, group_size=2, control=on), 4, CPU):
        assert_same(found, alone, flags)


@pytest.mark.verify
@pytest.mark.slow("trains on 4 threads, and on none")
@pytest.mark.parametrize(("group", "place"), [("Muon", 2), ("samples", 3)])
def test_threads_exchange_what_other_cases_do(group: str, place: int) -> None:
    """Messages of Muon to some ranks and from others, a ring's, all-gathers, and all-to-alls."""
    case = GROUPS[group][place]
    compare_all(train_on_threads(CPU, [case]), "gloo", [case])


def test_the_first_failure_ends_all() -> None:
    def fail(control: Control) -> None:
        if control.world.rank == 2:
            raise ValueError("no third rank")
        control.barrier()

    with pytest.raises(RankError, match="no third rank"):
        run_rank_threads(fail, 4, CPU)


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
    message = r"the test starts .*@pytest\.mark\.process"
    with pytest.raises(ProcessStartedError, match=message), held(item()):
        start()


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
