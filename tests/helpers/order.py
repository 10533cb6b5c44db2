"""The order in which the workers of pytest-xdist run all tests, so that they end together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.outcomes import MAY_START

SLOWEST = Path(__file__).parents[2] / "examples" / "measured" / "slowest-tests.txt"


def in_order(items: Sequence[pytest.Item], num_workers: int) -> list[pytest.Item]:
    """Orders tests so that each worker starts with its share of those that start processes.

    Each worker gets an equal number of successive tests and, once idle, takes some from the end of
    another's: cheap ones, which no worker waits for. Files stay together, the longest first, each
    with the worker that has least to do.
    """
    groups: dict[str, list[pytest.Item]] = {}
    cheap = []
    for item in items:
        if any(map(item.get_closest_marker, MAY_START)):
            groups.setdefault(item.nodeid.partition("::")[0], []).append(item)
        else:
            cheap.append(item)
    # A worker that imports a library for one slow test has it for the next.
    cheap.sort(key=_reason)
    seconds = _seconds_of_files()
    lengths = {file: max(seconds.get(file, 0.0), float(len(groups[file]))) for file in groups}
    shares: list[list[pytest.Item]] = [[] for _ in range(num_workers)]
    totals = [0.0] * num_workers
    for file in sorted(groups, key=lambda file: -lengths[file]):
        worker = totals.index(min(totals))
        shares[worker] += groups[file]
        totals[worker] += lengths[file]
    ordered: list[pytest.Item] = []
    for worker, share in enumerate(shares):
        size = (len(items) - len(ordered)) // (num_workers - worker)
        missing = max(size - len(share), 0)
        ordered += share + cheap[:missing]
        del cheap[:missing]
    return ordered + cheap


def _reason(item: pytest.Item) -> tuple[bool, str]:
    slow = item.get_closest_marker("slow")
    return (True, "") if slow is None else (False, slow.args[0])


def _seconds_of_files() -> dict[str, float]:
    """Reads what the slowest tests of each file took together."""
    seconds: dict[str, float] = {}
    text = SLOWEST.read_text(encoding="utf-8")
    for taken, file in re.findall(r"^([\d.]+)s +(\S+?)::", text, re.M):
        seconds[file] = seconds.get(file, 0.0) + float(taken)
    return seconds
