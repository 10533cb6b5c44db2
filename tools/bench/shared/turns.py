"""Measurements on a shared machine: ranks to start, contenders in turns, ratios of neighbours."""

from __future__ import annotations

import json
import os
import subprocess
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from paro.errors import flag_of

Item = TypeVar("Item")
ROOT = Path(__file__).resolve().parents[3]


def torchrun(num_ranks: int) -> list[str]:
    """Return the words that start a script on so many ranks of this machine."""
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]


def start_training(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a training in the repository's root, with a thread a rank; `log` gets its output."""
    with log.open("w") as stream:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
        )


def training_flags(args: Namespace, *same: str, **others: object) -> list[str]:
    """Return the flags of pretrain_llama.py for the trainings of a comparison, on mock data.

    `same` are flags of `args` that the trainer has too, `others` those that `args` does not give.
    """
    flags: dict[str, object] = {
        "mock_data": None,
        "tokenizer_type": "NullTokenizer",
        "make_vocab_size_divisible_by": 1,
        "max_position_embeddings": args.seq_length,
        "lr_decay_style": "constant",
        **others,
    }
    names = [flag.replace("-", "_") for flag in same]
    flags |= {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.num_query_groups:
        flags |= {"group_query_attention": None, "num_query_groups": args.num_query_groups}
    if args.dtype == "bf16":
        flags["bf16"] = None
    if args.recompute:
        flags["recompute_granularity"] = "full"
    words = ((flag_of(name), value) for name, value in flags.items())
    return [str(word) for pair in words for word in pair if word is not None]


def rows_in(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines; one that a kill cut short is passed over."""
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(json.JSONDecodeError):
            yield json.loads(line)


def order_of_round(contenders: Sequence[Item], index: int) -> list[Item]:
    """Return every contender once, with another one first in every round."""
    start = index % len(contenders)
    return [*contenders[start:], *contenders[:start]]


def median_known(values: Iterable[float | None]) -> float | None:
    """Return the median of the known values; None without any."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def median_ratio(times: Iterable[float], others: Iterable[float]) -> float:
    """Return the median of the ratios of neighbours in time: a shared machine's speed drifts."""
    return median(time / other for time, other in zip(times, others, strict=True))
