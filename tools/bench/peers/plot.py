"""Draws the comparison: a panel of bars per figure, and the loss curves that agree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench.peers.figures import Rounds, Row
from tools.shared.picture import drawing

OURS, THEIRS = "tab:orange", "tab:blue"
PANELS = (
    ("seconds per step", "seconds", 1.0),
    ("tokens per second", "tokens_per_second", 1.0),
    ("model states, MB on a rank", "state_bytes", 1e6),
    ("peak memory, MB on a rank", "peak_bytes", 1e6),
    ("sent by all NICs, MB per step", "nic_bytes", 1e6),
)


def plot(path: Path, title: str, summaries: Sequence[Row], rounds: Rounds) -> None:
    """Writes the plot; a figure that was not measured leaves its panel empty."""
    with drawing(path, 2, 3, size=(16, 9)) as (figure, (*bars, curves)):
        figure.suptitle(title)
        for panel, (label, field, unit) in zip(bars, PANELS, strict=True):
            _draw_bars(
                panel, label, {row["contender"]: _scaled(row, field, unit) for row in summaries}
            )
        for above, (name, turns) in enumerate(reversed(rounds.items())):
            # The curves coincide: wider ones go below.
            steps, width = range(1, len(turns[0].losses) + 1), 2 * (len(rounds) - above)
            curves.plot(steps, turns[0].losses, linewidth=width, label=name)
        curves.set(title="loss", xlabel="step")
        curves.legend(fontsize="x-small")


def _scaled(row: Row, field: str, unit: float) -> float | None:
    value: float | None = row[field]
    return None if value is None else value / unit


def _draw_bars(axis: Any, label: str, values: dict[str, float | None]) -> None:
    axis.set_title(label)
    if not any(values.values()):
        axis.text(0.5, 0.5, "not measured here", ha="center", transform=axis.transAxes)
        axis.set_axis_off()
        return
    colours = [OURS if name.startswith("paro:") else THEIRS for name in values]
    drawn = axis.barh(list(values), [value or 0.0 for value in values.values()], color=colours)
    texts = ["-" if value is None else f"{value:.4g}" for value in values.values()]
    axis.bar_label(drawn, texts, padding=2, fontsize="small")
    axis.margins(x=0.2)
    axis.invert_yaxis()  # the first contender on top, as in the table
