"""The study of bits: its flags are those of a run, and its table and picture of what was found."""

from __future__ import annotations

from pathlib import Path

from paro.arguments.parser import parse_args
from tools.bench.shared.trainings import Found, Losses
from tools.bench.study_bits import (
    FLAGS,
    JOBS,
    LONG,
    SEEDS,
    SHORT,
    VARIANTS,
    key_of,
    plot,
    table,
)


def found_of(above: float) -> Found:
    """Results in which fewer bits lose `above` at the end and twice that in the first half."""
    found: Found = {}
    for variant, iterations, seed in JOBS:
        more = above * (not variant.name.startswith("16"))
        quarter = iterations // 4
        found[key_of((variant, iterations, seed))] = Losses(
            # The first is within the warm-up, the last beyond the first half.
            loss=[(1, 9.0 + more), (quarter, 6.0 + 2 * more), (iterations, 4.0 + 9 * more)],
            held_out=[(10, 5.0), (iterations, 4.0 + seed / 100 + more)],
            seconds=1.0,
        )
    return found


def test_the_table_compares_seed_by_seed(tmp_path: Path) -> None:
    found = found_of(0.0125)
    lines = table(found).splitlines()
    none = "+0.0000: +0.0000, +0.0000, +0.0000"
    assert f"| 16/16 | {SHORT} | 3 | 4.0200 | {none} | {none} |" in lines
    once, twice = (f"+{x}: " + ", ".join([f"+{x}"] * 3) for x in ("0.0125", "0.0250"))
    assert f"| 4/4 | {SHORT} | 3 | 4.0325 | {once} | {twice} |" in lines
    assert f"| 4/4 | {LONG} | 1 | 4.0225 | +0.0125: +0.0125 | +0.0250: +0.0250 |" in lines
    assert len(lines) == 2 + len(VARIANTS) + 2
    del found[key_of((VARIANTS[0], SHORT, SEEDS[0]))]
    assert f"| 8/8 | {SHORT} | 2 | 4.0375 | +0.0125: +0.0125, +0.0125 | +0.0250" in table(found)
    plot(found, tmp_path / "bits.png")
    assert (tmp_path / "bits.png").stat().st_size > 5_000


def test_flags_are_those_of_a_run() -> None:
    for variant in VARIANTS:
        args = parse_args([*f"{FLAGS} {variant.flags}".split(), "--train-iters", "4"])
        bits = f"{args.paro_inter_grad_bits}/{args.paro_inter_param_bits}"
        assert variant.name.split()[0] == bits
