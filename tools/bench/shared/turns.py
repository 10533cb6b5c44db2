"""Measurements on a shared machine: ranks to start, contenders in turns, ratios of neighbours."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


def torchrun(num_ranks: int) -> list[str]:
    """Python's words before a script that start it on so many ranks of this machine."""
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]


def given(args: Namespace, *flags: str) -> dict[str, object]:
    """What is given of some flags, by flag without its dashes."""
    values = {flag: getattr(args, flag.replace("-", "_")) for flag in flags}
    return {flag: value for flag, value in values.items() if value is not None}


def words_of(flags: Mapping[str, object]) -> list[str]:
    """The words of a command line by flag without its dashes; a switch has the value None."""
    words = ((f"--{flag}", value) for flag, value in flags.items())
    return [str(word) for pair in words for word in pair if word is not None]


def rows_in(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; one that a kill cut short is passed over."""
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(json.JSONDecodeError):
            yield json.loads(line)


def order_of_round(names: Sequence[str], index: int) -> list[str]:
    """Every name once, with another one first in every round."""
    start = index % len(names)
    return [*names[start:], *names[:start]]


def median_known(values: Iterable[float | None]) -> float | None:
    """The median of those that are known; None without any."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def median_ratio(times: Iterable[float], others: Iterable[float]) -> float:
    """The median of the ratios of neighbours in time: a shared machine's speed drifts."""
    return median(time / other for time, other in zip(times, others, strict=True))
