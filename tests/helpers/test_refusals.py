"""A refusal is met by its status, its one line and what it names; anything else fails the test."""

from __future__ import annotations

import sys
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from paro.errors import RunError, UserError
from tests.helpers.refusals import refused

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
        with pytest.raises(AssertionError, match="is not told"):
            refused(run, text)
    with pytest.raises(AssertionError, match="ended with 2, not 1"):
        refused(run, status=1)


def test_a_run_that_cannot_go_on_has_another_status() -> None:
    assert refused(raises(RunError(LINE)), status=1) == LINE


@pytest.mark.parametrize(
    "run",
    [
        lambda: None,
        prints(""),
        prints("tool.py: error: two\nlines\n"),
        prints("usage: tool.py\n"),
        raises(UserError("one", "another")),
        CompletedProcess([], 1, "", f"tool.py: error: {LINE}\n"),
    ],
)
def test_what_is_no_refusal_fails(run: Callable[[], object]) -> None:
    with pytest.raises(AssertionError):
        refused(run)
