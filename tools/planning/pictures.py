"""Plots of plans: memory against time, a step's streams and trace, and scaling curves."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from paro.errors import count_text
from paro.planning.estimator import Estimate
from paro.planning.planner import SearchResult
from paro.planning.search_space import PlanRequest
from paro.planning.simulation import StreamActivity
from paro.strategy import legal_letters
from tools.shared.picture import drawing, log_scale, name_rows

COLORS = {
    "forward": "#4c78a8", "backward": "#54a24b", "recompute": "#9ecae9", "update": "#b279a2",
    "other": "#bab0ac", "gather": "#f58518", "reduce": "#e45756", "finish": "#9d3434",
    "publish": "#eeca3b", "context": "#72b7b2", "agree": "#79706e", "wait": "#eeeeee",
    "rotate": "#ff9da6", "exchange": "#9d755d", "offload": "#d67195",
}  # fmt: skip


def draw_front(
    path: Path, request: PlanRequest, rows: Sequence[Estimate], result: SearchResult
) -> None:
    """Plot memory against time: strategies with the flags as given, and the Pareto front."""
    from tools.planning.labels import place_labels  # with matplotlib, which takes long to import

    limit = request.device_bytes / 1e9
    with drawing(path, 1, 1, size=(9, 5.5)) as (figure, (axes,)):
        axes.plot(
            [e.memory_bytes / 1e9 for e in result.front],
            [e.seconds for e in result.front],
            "-o", color="#4c78a8", label="the best of all candidates", markersize=4,
        )  # fmt: skip
        for label, marker, fits in (("fits", "s", True), ("does not fit", "x", False)):
            chosen = [row for row in rows if row.fits is fits]
            if chosen:
                axes.plot(
                    [row.memory_bytes / 1e9 for row in chosen], [row.seconds for row in chosen],
                    marker, color="#e45756", label=f"at the flags as given, {label}",
                )  # fmt: skip
        axes.axvline(limit, color="gray", linestyle="--", label=f"a device: {limit:g} GB")
        axes.set(xlabel="memory of a rank, GB", ylabel="seconds a step")
        log_scale(axes.xaxis, axes.yaxis)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter("{x:g}")
            axis.set_tick_params(which="both", labelsize=8, length=3, pad=4)
        axes.set_title(f"{count_text(request.world_size, 'rank')} on {request.machine.name}")
        figure.legend(loc="outside lower center", ncols=4, fontsize=8)
        front = [(e.memory_bytes / 1e9, e.seconds) for e in result.front]
        bottom, top = axes.get_ylim()
        place_labels(axes, _together(rows), [front, [(limit, bottom), (limit, top)]])


def _together(rows: Sequence[Estimate]) -> dict[tuple[float, float], str]:
    """Return the names of strategies at the same place, by the position of the first."""
    names: dict[tuple[float, float], str] = {}
    for row in rows:
        memory, seconds, name = row.memory_bytes / 1e9, row.seconds, row.candidate.name
        near = (
            point
            for point in names
            if max(abs(math.log(point[0] / memory)), abs(math.log(point[1] / seconds))) < 0.01
        )
        point = next(near, (memory, seconds))
        names[point] = f"{names[point]} {name}" if point in names else name
    return names


def draw_timeline(
    path: Path, activities: Sequence[StreamActivity], name: str, *, actor: str = "group"
) -> None:
    """Plot every stream's activities in one or more steps; later ones cover earlier ones."""
    streams = sorted({(s.actor, s.stream) for s in activities if s.stream != "wait"}, key=_rank)
    several = len({actor for actor, _ in streams}) > 1
    with drawing(path, 1, 1, size=(14, 0.5 * len(streams) + 1.6)) as (_, (axes,)):
        for activity in activities:
            if (activity.actor, activity.stream) in streams:
                row = streams.index((activity.actor, activity.stream))
                axes.barh(row, activity.end - activity.start, left=activity.start,
                          color=COLORS[activity.kind], height=0.8)  # fmt: skip
        labels = [f"{actor} {a}: {s}" if several else s for a, s in streams]
        unit = "seconds; a stream is a use and the axes that it serves"
        axes.set(xlim=(0, max(s.end for s in activities)), xlabel=unit, title=name)
        shown = {activity.kind for activity in activities if activity.stream != "wait"}
        name_rows(axes, labels, {kind: COLORS[kind] for kind in COLORS if kind in shown})


def _rank(stream: tuple[int, str]) -> tuple[int, bool, str]:
    return stream[0], stream[1] != "compute", stream[1]


def chrome_trace(activities: Sequence[StreamActivity]) -> str:
    """Return the trace as JSON: a process per group, a thread per stream; times in microseconds."""
    streams = sorted({(activity.actor, activity.stream) for activity in activities})
    events: list[dict[str, object]] = []
    for number, (actor, stream) in enumerate(streams):
        name = {"name": stream}
        events.append({"ph": "M", "name": "thread_name", "pid": actor, "tid": number, "args": name})
    for actor in sorted({actor for actor, _ in streams}):
        name = {"name": f"ranks of group {actor}"}
        events.append({"ph": "M", "name": "process_name", "pid": actor, "args": name})
    for activity in activities:
        events.append(
            {
                "ph": "X",
                "name": activity.name,
                "cat": activity.kind,
                "pid": activity.actor,
                "tid": streams.index((activity.actor, activity.stream)),
                "ts": activity.start * 1e6,
                "dur": (activity.end - activity.start) * 1e6,
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def draw_scaling(path: Path, curves: dict[str, list[tuple[int, float]]], name: str) -> None:
    """Plot MFU against the number of ranks."""
    with drawing(path, 1, 1, size=(9, 5)) as (_, (axes,)):
        for label, points in curves.items():
            best = label not in legal_letters()
            axes.plot(
                [n for n, _ in points], [100 * mfu for _, mfu in points],
                "-o", label=label, markersize=6 if best else 3, linewidth=3 if best else 1.2,
                color="#bab0ac" if best else None,
            )  # fmt: skip
        ranks = sorted({n for points in curves.values() for n, _ in points})
        log_scale(axes.xaxis, base=2)
        axes.set_xticks(ranks, [f"{n:,}" for n in ranks], fontsize=8)
        axes.set(xlabel="ranks", ylabel="MFU, %", title=name, ylim=(0, None))
        axes.grid(axis="y", color="#eeeeee")
        axes.legend(fontsize=8)
