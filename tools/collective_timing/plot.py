"""Draws bandwidth over message size: a panel per op, a line per algorithm, the bound dashed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.shared.picture import drawing, log_scale

Row = Mapping[str, Any]


def plot(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Writes the plot of rows of one axis span."""
    ops = list(dict.fromkeys(row["op"] for row in rows))
    with drawing(path, 1, len(ops), size=(5 * len(ops), 4.5)) as (figure, panels):
        figure.suptitle(title, fontsize="medium")
        for panel, op in zip(panels, ops, strict=True):
            _draw(panel, op, [row for row in rows if row["op"] == op])


def _draw(panel: Any, op: str, rows: Sequence[Row]) -> None:
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        points = [
            (row["bytes"], row["algorithm_bandwidth"] / 1e6)
            for row in rows
            if row["algorithm"] == name
        ]
        panel.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=name)
    bound = sorted(
        {(row["bytes"], row["bytes"] / row["bound_seconds"] / 1e6)
         for row in rows if row["bound_seconds"] is not None}
    )  # fmt: skip
    if bound:
        panel.plot(
            *zip(*bound, strict=True), linestyle="--", color="black", label="what the links allow"
        )
    panel.set(title=op, xlabel="bytes of the whole buffer", ylabel="algorithm bandwidth, MB/s")
    log_scale(panel.xaxis, panel.yaxis)
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")
