"""Absurd input is answered by one line that names the flag or the file, at once."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from data.sample_order import Bounds, OrderPlan
from paro.arguments.parser import build_parser
from paro.errors import UserError
from tests.helpers.flags import configured
from tests.helpers.refusals import refused

LAUNCH = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data "
    "--vocab-size 63 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --train-iters 4 "
    "--distributed-backend gloo --dry-run --world-size 4 --ranks-per-node 2"
)
VALUES = (0, -1, 10**6, 10**9, 10**12, 10**30)
SECONDS = 5.0


def numeric_flags() -> list[tuple[str, int]]:
    """Every flag that takes numbers, and how many."""
    return [
        (action.option_strings[0], action.nargs if isinstance(action.nargs, int) else 1)
        for action in build_parser()._actions
        if getattr(action.type, "__name__", "") in ("int", "float")
    ]


def test_every_numeric_flag_takes_a_value_or_refuses_it_in_one_line() -> None:
    flags, rng = numeric_flags(), random.Random(7)
    assert len(flags) > 60
    for flag, count in flags:
        values = [str(rng.choice(VALUES)) for _ in range(count)]
        begin, line = time.monotonic(), "--"
        try:
            configured([*LAUNCH.split(), flag, *values])
        except UserError as error:
            line = str(error)
        assert "--" in line, f"{flag} {values}: {line}"
        assert len(line.splitlines()) == 1, f"{flag} {values}: {line}"
        assert time.monotonic() - begin < SECONDS, f"{flag} {values}"


YAML = {
    "bombs": "a: &a [x, x, x, x, x, x, x, x, x]\n"
    + "".join(
        f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    "anchors": "seed: &a 3\n",
    "deep": "lr: " + "[" * 1000,
    "long": "# " + "x" * 2**16,
    "crowded": "".join(f"a{number}: 1\n" for number in range(1500)),
}


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("bombs", "line 1: anchors and aliases"),
        ("anchors", "line 1: anchors and aliases"),
        ("deep", "line 1: is nested too deeply"),
        ("long", "has 65,538 bytes, more than the 65,536 that may be read"),
        ("crowded", "has 1500 keys, and there are"),
    ],
)
def test_a_yaml_file_that_grows_is_refused(name: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text(YAML[name])
    begin = time.monotonic()
    refused(lambda: configured(["--yaml-cfg", str(path)]), f"--yaml-cfg {path} ... {line}")
    assert time.monotonic() - begin < SECONDS


def test_an_order_has_bounds() -> None:
    order = {"tokens_per_epoch": 100, "num_samples": 10**10, "seq_length": 4, "seed": 1}
    refused(
        lambda: OrderPlan(bounds=Bounds(0, 1), **order),
        "10000000000 samples are ... --train-iters",
    )
