"""The charts of runs: drawn once by matplotlib, as pictures and as SVG that follows the page."""

# Pictures have the colours of the light page. In SVG a variable of the page's style replaces each
# (`var(--ink)`), so that one drawing is readable in light mode, dark mode and on paper.

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from tools.run_report.runs import Run
from tools.shared.picture import figure_of, label_of, log_scale

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
NAMED = {"ink": INK, "muted": MUTED, "grid": GRID, **{f"c{i}": c for i, c in enumerate(SERIES)}}

Draw = Callable[[Any, Sequence[Run]], None]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: its name, what a reader should know about it, and the function that draws it."""

    name: str
    title: str
    note: str
    draw: Draw
    wide: bool = False


def _curves(
    label: str,
    *fields: str,
    agree: bool = True,
    log: bool = False,
    percent: bool = False,
    marks: str = "",
) -> Draw:
    """Draw lines for each run, those of a second field dotted; `agree`: runs may coincide.

    `marks` is the figure of validations that are drawn too, a shape for each set.
    """

    def draw(axis: Any, runs: Sequence[Run]) -> None:
        for index, run in enumerate(runs):
            width, colour = _width(index, runs) if agree else _THIN, _colour(index)
            lines = "-" if index < len(SERIES) else "--", ":"  # dashed where the colour repeats
            for field, line in zip(fields, lines, strict=False):
                x, y = run.series(field, scale=100.0 if percent else 1.0)
                dot = {"marker": "o", "markersize": 3 + width} if len(x) == 1 else {}
                name = label_of(run.name) if field == fields[0] else None
                axis.plot(x, y, line, color=colour, label=name, linewidth=width, **dot)
            for marker, (x, y) in zip(cycle("os^Dv"), run.validations(marks).values()):
                axis.plot(x, y, f"{marker}--", color=colour, linewidth=1.0, markersize=2.0 * width)
        if log:
            log_scale(axis.yaxis, subs=(2, 5))
            axis.yaxis.set_minor_formatter("{x:g}")
        if percent:
            axis.set_ylim(bottom=0)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set(xlabel="iteration", ylabel=label)

    return draw


_THIN, _WIDE = 1.6, 5.2  # points


def _width(index: int, runs: Sequence[Run]) -> float:
    """Return the width of a curve: wider ones go below, so that each shows around the next."""
    step = min(1.2, (_WIDE - _THIN) / max(len(runs) - 1, 1))
    return _THIN + step * (len(runs) - 1 - index)


def _colour(index: int) -> str:
    return SERIES[index % len(SERIES)][0]


_FIRST_KIND = 3  # the first colours are those of the runs
Parts = Mapping[str, float | None]


def _bars(label: str, parts_of: Callable[[Run], Parts]) -> Draw:
    """Return a bar per run, made of parts; the first run on top."""

    def draw(axis: Any, runs: Sequence[Run]) -> None:
        places, left = range(len(runs)), [0.0] * len(runs)
        of_runs = [parts_of(run) for run in runs]
        for index, part in enumerate(dict.fromkeys(name for parts in of_runs for name in parts)):
            widths = [parts.get(part) or 0.0 for parts in of_runs]
            colour = _colour(index + _FIRST_KIND)
            axis.barh(places, widths, left=left, height=0.6, color=colour, label=label_of(part))
            left = [begin + width for begin, width in zip(left, widths, strict=True)]
        totals = axis.barh(places, left, color="none")
        axis.bar_label(totals, fmt="{:.4g}", padding=5, color=INK[0], fontsize=9)
        axis.set_yticks(list(places), [label_of(run.name) for run in runs])
        axis.invert_yaxis()
        axis.margins(x=0.16)
        axis.grid(axis="y", visible=False)
        axis.set_xlabel(label)
        _legend(axis)

    return draw


def _legend(axis: Any) -> None:
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
        labelcolor=INK[0],
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
    """Return medians of fields by the parts' names."""
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
        _curves("nats per token", "lm_loss", marks="lm_loss"),
        wide=True,
    ),
    Chart(
        BITS,
        "Bits per byte of held-out text",
        "Runs with different tokenizers compare by it. A shape for each set.",
        _curves("bits per byte", marks=BITS),
        wide=True,
    ),
    Chart(
        "throughput",
        "Throughput",
        "Tokens per second of all ranks, means since the line before.",
        _curves("tokens/s", "tokens_per_second", agree=False),
    ),
    Chart(
        "mfu",
        "Model FLOPs utilization",
        "Solid: attention counted in full. Dotted: causal attention counted half.",
        _curves("% of the peak", "mfu", "mfu_causal", agree=False, percent=True),
    ),
    Chart(
        "grad_norm",
        "Gradient norm",
        "Before clipping.",
        _curves("norm", "grad_norm", log=True),
    ),
    Chart("learning_rate", "Learning rate", "", _curves("learning rate", "learning_rate")),
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
    """Return the charts of runs; that of bits per byte only if a run has some."""
    has_bits = any(run.validations(BITS) for run in runs)
    return [chart for chart in CHARTS if chart.name != BITS or has_bits]


_STYLE = {
    "svg.fonttype": "none",
    "text.color": INK[0],
    "axes.labelcolor": MUTED[0],
    "axes.edgecolor": GRID[0],
    "xtick.color": MUTED[0],
    "ytick.color": MUTED[0],
    "grid.color": GRID[0],
    "axes.grid": True,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "font.size": 10,
    "axes.labelsize": 10,
}


@contextmanager
def _figure(chart: Chart, runs: Sequence[Run]) -> Iterator[Any]:
    bars = chart.name in ("iteration", "exposed", "bytes", "memory")
    size = (11.0 if chart.wide else 5.4, 1.4 + 0.42 * len(runs) if bars else 3.2)
    style = {**_STYLE, "svg.hashsalt": chart.name}
    with figure_of(1, 1, size=size, style=style) as (figure, (axis,)):
        chart.draw(axis, runs)
        yield figure


def as_png(chart: Chart, runs: Sequence[Run]) -> bytes:
    """Return a PNG on white, with a title and the names of the runs."""
    with _figure(chart, runs) as figure:
        (axis,) = figure.axes
        figure.suptitle(chart.title, fontsize=12)
        if axis.get_legend() is None and axis.get_legend_handles_labels()[0]:
            _legend(axis)
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=130, facecolor="white")
    return stream.getvalue()


def _of_page(tag: str, chart: Chart) -> str:
    """Return a tag with the page's colours and font, and with an id that no other drawing has."""
    for name, (light, _) in NAMED.items():
        tag = tag.replace(light, f"var(--{name})")
    tag = re.sub(r'\bid="|url\(#|href="#', rf"\g<0>{chart.name}-", tag)
    return re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", tag)


def as_svg(chart: Chart, runs: Sequence[Run]) -> str:
    """Return an `<svg>` element whose colours are the page's."""
    with _figure(chart, runs) as figure:
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Only in tags: names of runs between them may have any text.
    text = re.sub("<[^>]*>", lambda tag: _of_page(tag[0], chart), text)
    width = re.search(r'<svg[^>]*\bwidth="([^"]*)"', text)
    assert width is not None, "an SVG without a width"
    head, body = text.split(">", 1)
    head = re.sub(r'\s(?:width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{chart.title}">{body}'
