"""The process of a turn: its result, and how its end is reported."""

from __future__ import annotations

import os
import sys

import pytest

from paro.errors import UserError
from tests.helpers.refusals import refused
from tools.bench.peers.turn import in_own_process

pytestmark = pytest.mark.process


def test_a_result_comes_back_from_another_process() -> None:
    assert in_own_process(os.getpid) != os.getpid()
    assert in_own_process(lambda: {"losses": [1.0]}) == {"losses": [1.0]}


def test_a_mistake_comes_back_as_one() -> None:
    def mistake() -> None:
        raise UserError("no such device")

    refused(lambda: in_own_process(mistake), "no such device")


def test_a_failure_is_printed_once_and_ends_this_process_too(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise ArithmeticError("the peer is broken")

    with pytest.raises(SystemExit):
        in_own_process(fail)
    assert capfd.readouterr().err.count("ArithmeticError: the peer is broken") == 1


def test_a_process_that_was_killed_is_told() -> None:
    with pytest.raises(RuntimeError, match="ended with 7"):
        in_own_process(lambda: (sys.stdout.flush(), os._exit(7)))
