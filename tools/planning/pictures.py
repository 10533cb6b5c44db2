"""Pictures of plans: memory against time, a step's streams, scaling curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from data.atomic_file import replacing
from paro.planning.planner import Case, Estimate, Plan
from paro.planning.simulation import Span

COLORS = {
    "forward": "#4c78a8", "backward": "#54a24b", "recompute": "#9ecae9", "update": "#b279a2",
    "other": "#bab0ac", "gather": "#f58518", "reduce": "#e45756", "finish": "#9d3434",
    "publish": "#eeca3b", "agree": "#79706e", "wait": "#eeeeee",
}  # fmt: skip


def _canvas(width: float, height: float) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError("pictures need matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _save(figure: Any, path: Path) -> None:
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix.removeprefix(".") or "png", dpi=120)


def draw_front(path: Path, case: Case, rows: Sequence[Estimate], found: Plan) -> None:
    """Memory against time: the strategies at the flags as given, and the front of all settings."""
    figure, axes = _canvas(9, 5.5)
    axes.plot(
        [e.memory_bytes / 1e9 for e in found.front],
        [e.seconds for e in found.front],
        "-o", color="#4c78a8", label="Pareto front of all settings", markersize=4,
    )  # fmt: skip
    for row in rows:
        place = row.memory_bytes / 1e9, row.seconds
        axes.plot(*place, "s" if row.fits else "x", color="#e45756")
        axes.annotate(row.setting.strategy.name, place, xytext=(4, 3), textcoords="offset points",
                      fontsize=8)  # fmt: skip
    axes.axvline(case.limit_bytes / 1e9, color="gray", linestyle="--", label="memory of a device")
    axes.set(xscale="log", yscale="log", xlabel="memory of a rank, GB", ylabel="seconds a step")
    axes.set_title(f"{case.world_size} ranks on {case.machine.name}")
    axes.legend()
    _save(figure, path)


def draw_timeline(path: Path, spans: Sequence[Span], name: str) -> None:
    """What every stream does in a step."""
    streams = sorted({(s.actor, s.stream) for s in spans if s.stream != "wait"}, key=_rank)
    figure, axes = _canvas(14, 0.6 * len(streams) + 1.6)
    for span in spans:
        if (span.actor, span.stream) in streams:
            row = streams.index((span.actor, span.stream))
            axes.barh(row, span.end - span.start, left=span.start, color=COLORS[span.kind],
                      height=0.8)  # fmt: skip
    axes.set_yticks(range(len(streams)), [f"group {a}: {s}" for a, s in streams])
    axes.invert_yaxis()
    axes.set(xlabel="seconds", title=name)
    kinds = [kind for kind in COLORS if any(span.kind == kind for span in spans)]
    for kind in kinds:
        axes.barh(0, 0, color=COLORS[kind], label=kind)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    _save(figure, path)


def _rank(stream: tuple[int, str]) -> tuple[int, bool, str]:
    return stream[0], stream[1] != "compute", stream[1]


def draw_scaling(path: Path, curves: dict[str, list[tuple[int, float]]], name: str) -> None:
    """MFU over the number of ranks."""
    figure, axes = _canvas(9, 5)
    for label, points in curves.items():
        axes.plot([n for n, _ in points], [100 * mfu for _, mfu in points], "-o", label=label,
                  markersize=4)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set(xlabel="ranks", ylabel="MFU, %", title=name, ylim=(0, None))
    axes.legend(fontsize=8)
    _save(figure, path)


class Pair(Protocol):
    """A published figure and ours."""

    @property
    def name(self) -> str: ...

    @property
    def what(self) -> str: ...

    @property
    def published(self) -> float: ...

    @property
    def ours(self) -> float: ...

    @property
    def tolerance(self) -> float | None: ...

    @property
    def holds(self) -> bool: ...


def draw_pairs(path: Path, pairs: Sequence[Pair]) -> None:
    """Ours over published, a row each, with the band in which ours is to be."""
    figure, axes = _canvas(11, 0.22 * len(pairs) + 1.2)
    kinds = {
        "within its band": ("o", "#4c78a8"),
        "outside": ("X", "#e45756"),
        "only its order counts": ("o", "#bab0ac"),
    }
    for row, pair in enumerate(pairs):
        if pair.tolerance is None:
            kind = "only its order counts"
        else:
            kind = "within its band" if pair.holds else "outside"
            axes.barh(row, 2 * pair.tolerance, left=1 - pair.tolerance, height=1, color="#f0f3f7")
        marker, color = kinds[kind]
        axes.plot(pair.ours / pair.published, row, marker, color=color, markersize=5)
    for kind, (marker, color) in kinds.items():
        axes.plot([], [], marker, color=color, label=kind)
    axes.set_yticks(range(len(pairs)), [f"{p.name}: {p.what}" for p in pairs], fontsize=8)
    axes.set_ylim(len(pairs) - 0.5, -0.5)
    axes.axvline(1.0, color="gray", linewidth=0.8)
    axes.set(xlabel="ours / published", title="The papers' figures and the planner's")
    axes.legend(fontsize=8, loc="lower right")
    _save(figure, path)
