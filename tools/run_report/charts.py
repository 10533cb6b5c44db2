"""The charts of runs: drawn once by matplotlib, as pictures and as SVG that follows the page."""

# In SVG every colour is a placeholder that the page's style replaces (`var(--ink)`), so that one
# drawing is readable in light mode, dark mode and on paper. Pictures use the light page's colours.

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from tools.run_report.runs import Run

# Light page, dark page; distinguishable also by brightness and by colour-blind readers.
SERIES = (
    ("#0b5cad", "#6cb2ff"),
    ("#c2410c", "#ff9a5c"),
    ("#0f7b5f", "#4fd1a5"),
    ("#8a2be2", "#c79bff"),
    ("#a16207", "#f2c744"),
    ("#be185d", "#ff8ac0"),
    ("#0e7490", "#5fd7ea"),
    ("#4b5563", "#b6bfcc"),
)
INK, MUTED, GRID = ("#1b2430", "#e6eaf0"), ("#5b6675", "#9aa6b5"), ("#d9dee5", "#39424e")


@dataclass(frozen=True, slots=True)
class Palette:
    """The colours of one drawing."""

    ink: str
    muted: str
    grid: str
    series: tuple[str, ...]

    def of(self, index: int) -> str:
        return self.series[index % len(self.series)]


LIGHT = Palette(INK[0], MUTED[0], GRID[0], tuple(light for light, _ in SERIES))
# Hexadecimal numbers that occur in no drawing by themselves.
PLACEHOLDERS = Palette(
    "#010201", "#010202", "#010203", tuple(f"#0102{16 + i:02x}" for i in range(len(SERIES)))
)
VARIABLES = {
    PLACEHOLDERS.ink: "var(--ink)",
    PLACEHOLDERS.muted: "var(--muted)",
    PLACEHOLDERS.grid: "var(--grid)",
    **{colour: f"var(--c{i})" for i, colour in enumerate(PLACEHOLDERS.series)},
}

Draw = Callable[[Any, Sequence[Run], Palette], None]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: its name, what a reader should know about it, and the function that draws it."""

    name: str
    title: str
    note: str
    draw: Draw
    wide: bool = False


def _curves(
    field: str, label: str, *, agree: bool = True, log: bool = False, marks: bool = False
) -> Draw:
    """A line for each run; `agree`: they may coincide; `marks` validations of the same name."""

    def draw(axis: Any, runs: Sequence[Run], palette: Palette) -> None:
        for index, run in enumerate(runs):
            width, colour = _width(index, runs) if agree else _THIN, palette.of(index)
            _plot(axis, run.series(field), colour, index, label=run.name, width=width)
            if marks:
                _mark_validations(axis, run, field, colour, size=2.0 * width)
        if log:
            axis.set_yscale("log", subs=(2, 5))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
        _name_axes(axis, label)

    return draw


_THIN, _WIDE = 1.6, 5.2  # points


def _width(index: int, runs: Sequence[Run]) -> float:
    """Curves of equal runs overlap: wider ones go below, so that each shows around the next."""
    step = min(1.2, (_WIDE - _THIN) / max(len(runs) - 1, 1))
    return _THIN + step * (len(runs) - 1 - index)


def _plot(
    axis: Any,
    series: tuple[list[float], list[float]],
    colour: str,
    index: int,
    *,
    label: str,
    width: float,
) -> None:
    """Draws a run's line: dashed where its colour repeats, a dot if it is a single point."""
    x, y = series
    dot = {"marker": "o", "markersize": 3 + width} if len(x) == 1 else {}
    line = "-" if index < len(SERIES) else "--"
    axis.plot(x, y, line, color=colour, label=label, linewidth=width, **dot)


def _name_axes(axis: Any, of_y: str) -> None:
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set(xlabel="iteration", ylabel=of_y)


def _mark_validations(axis: Any, run: Run, figure: str, colour: str, *, size: float) -> None:
    for marker, (x, y) in zip(cycle("os^Dv"), run.validations(figure).values(), strict=False):
        axis.plot(x, y, f"{marker}--", color=colour, linewidth=1.0, markersize=size)


def _draw_bits(axis: Any, runs: Sequence[Run], palette: Palette) -> None:
    for index, run in enumerate(runs):
        size = 2.0 * _width(index, runs)
        _mark_validations(axis, run, BITS, palette.of(index), size=size)
    _name_axes(axis, "bits per byte")


def _draw_mfu(axis: Any, runs: Sequence[Run], palette: Palette) -> None:
    for index, run in enumerate(runs):
        full = run.series("mfu", scale=100.0)
        _plot(axis, full, palette.of(index), index, label=run.name, width=_THIN)
        x, y = run.series("mfu_causal", scale=100.0)
        axis.plot(x, y, ":", color=palette.of(index), linewidth=1.4)
    _name_axes(axis, "% of the peak")
    axis.set_ylim(bottom=0)


_FIRST_KIND = 3  # the first colours are those of the runs
Parts = Mapping[str, float | None]


def _bars(label: str, parts_of: Callable[[Run], Parts]) -> Draw:
    """A bar per run, made of parts; the first run on top."""

    def draw(axis: Any, runs: Sequence[Run], palette: Palette) -> None:
        places, left = range(len(runs)), [0.0] * len(runs)
        of_runs = [parts_of(run) for run in runs]
        for index, part in enumerate(dict.fromkeys(name for parts in of_runs for name in parts)):
            widths = [parts.get(part) or 0.0 for parts in of_runs]
            colour = palette.of(index + _FIRST_KIND)
            axis.barh(places, widths, left=left, height=0.6, color=colour, label=part)
            left = [begin + width for begin, width in zip(left, widths, strict=True)]
        for place, total in zip(places, left, strict=True):
            axis.annotate(
                f"{total:.4g}",
                (total, place),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                color=palette.ink,
                fontsize=9,
            )
        axis.set_yticks(list(places), [run.name for run in runs])
        axis.invert_yaxis()
        axis.margins(x=0.16)
        axis.grid(axis="y", visible=False)
        axis.set_xlabel(label)
        _legend(axis, palette)

    return draw


def _legend(axis: Any, palette: Palette) -> None:
    handles, labels = axis.get_legend_handles_labels()
    columns = min(len(handles), 3)
    # matplotlib fills columns, but legends are read by rows.
    order = [i for column in range(columns) for i in range(column, len(handles), columns)]
    axis.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=columns,
        frameon=False,
        fontsize=9,
        labelcolor=palette.ink,
        borderaxespad=0.3,
        handlelength=1.0,
        columnspacing=1.2,
    )


def _predicted_memory(run: Run) -> Parts:
    predicted = run.facts.get("predicted") or {}
    return {
        kind.replace("-", " "): num_bytes / 1e6
        for kind, num_bytes in predicted.items()
        if kind != "total"
    }


def _medians(fields: Mapping[str, str], *, scale: float = 1.0) -> Callable[[Run], Parts]:
    """Medians of fields by the parts' names."""
    return lambda run: {part: run.typical(name, scale=scale) for part, name in fields.items()}


def _iteration(run: Run) -> Parts:
    exposed, data = run.exposed_ms() or 0.0, run.typical("data_wait_ms") or 0.0
    whole = run.typical("iteration_time_ms") or 0.0
    computing = max(0.0, whole - exposed - data)
    return {"computing": computing, "communication": exposed, "data": data}


BITS = "bits_per_byte"
CHARTS = (
    Chart(
        "loss",
        "Loss",
        "Lines: training. Marks: held-out data, a shape for each set.",
        _curves("lm_loss", "nats per token", marks=True),
        wide=True,
    ),
    Chart(
        BITS,
        "Bits per byte of held-out text",
        "Runs with different tokenizers compare by it. A shape for each set.",
        _draw_bits,
        wide=True,
    ),
    Chart(
        "throughput",
        "Throughput",
        "Tokens per second of all ranks, means since the line before.",
        _curves("tokens_per_second", "tokens/s", agree=False),
    ),
    Chart(
        "mfu",
        "Model FLOPs utilization",
        "Solid: attention counted in full. Dotted: causal attention counted half.",
        _draw_mfu,
    ),
    Chart(
        "grad_norm",
        "Gradient norm",
        "Before clipping.",
        _curves("grad_norm", "norm", log=True),
    ),
    Chart("learning_rate", "Learning rate", "", _curves("learning_rate", "learning rate")),
    Chart(
        "iteration",
        "Where an iteration goes",
        "Medians: waiting for communication and for batches, and the rest, which is computing.",
        _bars("ms per iteration", _iteration),
    ),
    Chart(
        "exposed",
        "Exposed communication",
        "By what was waited for; medians.",
        _bars(
            "ms of an iteration in which computing waits",
            _medians(
                {
                    "gathers": "exposed_gather_ms",
                    "reductions": "exposed_reduce_ms",
                    "publishing": "exposed_publish_ms",
                    "attention": "exposed_context_ms",
                }
            ),
        ),
    ),
    Chart(
        "bytes",
        "Bytes sent",
        "Exact, counted where they are sent; medians.",
        _bars(
            "MB sent by a rank in an iteration",
            _medians({"inside groups": "intra_bytes", "between groups": "inter_bytes"}, scale=1e-6),
        ),
    ),
    Chart(
        "memory",
        "Memory",
        "By formula, at the moment of a step that needs most; measured peaks are in the table.",
        _bars("MB on a rank, predicted at the peak", _predicted_memory),
    ),
)


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """The charts of runs; that of bits per byte only if a run has some."""
    has_bits = any(run.validations(BITS) for run in runs)
    return [chart for chart in CHARTS if chart.name != BITS or has_bits]


@contextmanager
def _figure(chart: Chart, runs: Sequence[Run], palette: Palette) -> Iterator[Any]:
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("agg")  # no screen is needed
    pyplot = importlib.import_module("matplotlib.pyplot")
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": chart.name,
        "text.color": palette.ink,
        "axes.labelcolor": palette.muted,
        "axes.edgecolor": palette.grid,
        "xtick.color": palette.muted,
        "ytick.color": palette.muted,
        "grid.color": palette.grid,
        "axes.grid": True,
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "font.size": 10,
        "axes.labelsize": 10,
    }
    bars = chart.name in ("iteration", "exposed", "bytes", "memory")
    height = 1.4 + 0.42 * len(runs) if bars else 3.2
    with matplotlib.rc_context(style):
        size = (11.0 if chart.wide else 5.4, height)
        figure, axis = pyplot.subplots(figsize=size, layout="constrained")
        try:
            chart.draw(axis, runs, palette)
            yield figure
        finally:
            pyplot.close(figure)


def as_png(chart: Chart, runs: Sequence[Run]) -> bytes:
    """A PNG on white, with a title and the names of the runs."""
    with _figure(chart, runs, LIGHT) as figure:
        (axis,) = figure.axes
        figure.suptitle(chart.title, fontsize=12)
        if axis.get_legend() is None and axis.get_legend_handles_labels()[0]:
            _legend(axis, LIGHT)
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=130, facecolor="white")
    return stream.getvalue()


def as_svg(chart: Chart, runs: Sequence[Run]) -> str:
    """An `<svg>` element whose colours are the page's."""
    with _figure(chart, runs, PLACEHOLDERS) as figure:
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    # Element ids are the drawing's own; on a page with several drawings they must differ.
    text = re.sub(r'\bid="|url\(#|href="#', rf"\g<0>{chart.name}-", text)
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", text)
    width = re.search(r'<svg[^>]*\bwidth="([^"]*)"', text)
    assert width is not None, "an SVG without a width"
    head, body = text.split(">", 1)
    head = re.sub(r'\s(?:width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{chart.title}">{body}'
