"""Published gains of partial training, and those measured in emulated clusters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median

from tools.bench.planning.rounds import rows_of

MEASURED = Path(__file__).resolve().parents[3] / "examples" / "measured"
SPEEDS = ("25mbit", "100mbit")
MICRO_BATCHES = 4
PAIRS = (  # figure, what trains, slower, faster, published
    ("R5", "sixteenth", "NGG", "NIG", 1.15),
    ("R5", "sixteenth", "NGG", "NII", 1.21),
    ("R6", "sixteenth", "GGG", "III", 2.64),
    ("R6", "sixteenth", "GGG", "IIG", 2.66),
    ("R7", "adapters", "GGG", "ING", 1.44),
)
WORDS = {"sixteenth": "a sixteenth trains", "adapters": "adapters of 3/1000"}


def speeds_over(folder: Path, shape: str, baseline: str) -> dict[str, list[float]]:
    """How many times as fast as the baseline each strategy took its steps, turn by turn."""
    seconds: dict[str, dict[int, float]] = {}
    for row in rows_of(folder):
        if (row["shape"], row["micro_batches"]) == (shape, MICRO_BATCHES):
            strategy = row["setting"].partition("@")[0]
            seconds.setdefault(strategy, {})[row["turn"]] = row["seconds"]
    return {
        strategy: [
            seconds[baseline][turn] / found[turn] for turn in found if turn in seconds[baseline]
        ]
        for strategy, found in seconds.items()
    }


def partial_table(folder: Path = MEASURED) -> Iterator[str]:
    """A Markdown table: published and measured, with the least and the most of all turns."""
    heads = "".join(f" measured, {speed.removesuffix('mbit')} Mbit/s |" for speed in SPEEDS)
    yield f"| | figure | published |{heads}"
    yield "|---|---|---|" + "---|" * len(SPEEDS)
    for name, shape, slower, faster, published in PAIRS:
        cells = []
        for speed in SPEEDS:
            turns = speeds_over(folder / f"part-{speed}", shape, slower)[faster]
            cells.append(f"{median(turns):.2f} ({min(turns):.2f}-{max(turns):.2f})")
        what = f"{WORDS[shape]}, {faster} over {slower}"
        yield f"| {name} | {what} | {published:.2f} | {' | '.join(cells)} |"
