"""The page that compares measured with predicted steps, and its plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tools.bench.planning.comparison import CONSTANT_BYTES, MOST_ALIKE, Comparison, Pair
from tools.shared.output import markdown_table
from tools.shared.picture import drawing, log_scale

HEAD = """\
<!-- Written by python tools/bench/study_plan.py report --folder {folder}: change that. -->
# Measured steps and the planner's.

Written by `python tools/bench/study_plan.py report --folder {folder}` from the rows and machine
files there, which `tools/bench/study_plan.py measure` measured in emulated clusters of 2 nodes x
4 ranks on 2 cores, with a NIC for each rank or one as fast as four for each node. A round
measures the machine, and every strategy in one turn or several; what stands here are medians over
all turns of all rounds, whose number the first table has. Of a turn a measured step is the median
of 3 (of 4 micro-batches: of 2), each as long as its slowest rank. The machine's device is measured
by training the same shape on every rank alone.

![measured and predicted](steps.png)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """One cluster, shape, collective and number of micro-batches."""

    cluster: str
    collective: str
    micro_batches: int
    compared: Comparison

    @property
    def title(self) -> str:
        ending = "es" if self.micro_batches > 1 else ""
        return f"{self.cluster}, {self.collective}, {self.micro_batches} micro-batch{ending}"


def page(folder: Path, chapters: Sequence[Chapter], shapes: dict[str, str]) -> str:
    """Return the page in Markdown."""
    lines = [
        HEAD.rstrip("\n").format(folder=folder.as_posix()),
        "",
        *(f"- {name}: `{flags}`" for name, flags in shapes.items()),
        "",
        *_summary(chapters),
    ]
    for chapter in chapters:
        lines += ["", f"**{chapter.title}**", "", *_rows(chapter)]
    return "\n".join(lines) + "\n"


def _summary(chapters: Sequence[Chapter]) -> list[str]:
    text = (
        f"Pairs are those whose steps differ by more than {MOST_ALIKE - 1:.0%}, by the median of "
        "their ratios turn by turn, and *clear* if they do so in three of four turns; *auto* is "
        "its choice under limits that let in one strategy, all of them and some in between: how "
        "much longer it takes than the best measured one that fits, at the most."
    )
    heads = "| turns | median error | worst | pairs ordered wrongly | of the clear ones"
    rows = [
        (c.title, min(len(row.by_turn) for row in c.compared.rows), *_cells(c.compared))
        for c in chapters
    ]
    everything = _cells(*(c.compared for c in chapters))
    rows.append(("**all**", "", *(f"**{cell}**" for cell in everything)))
    lines = [text, "", *markdown_table(f"{heads} | auto, at most", rows)]
    memory = [e for c in chapters for row in c.compared.rows if (e := row.memory_error) is not None]
    if memory:
        lines += [
            "",
            f"Memory: what malloc has given out at most beyond what the process had before, within "
            f"{max(map(abs, memory)):.1%} of the prediction plus at most "
            f"{CONSTANT_BYTES / 1e6:.0f} MB; the median is within {median(map(abs, memory)):.1%}.",
        ]
    return lines


def _cells(*compared: Comparison) -> tuple[str, ...]:
    """Return the errors, the pairs and the choices of comparisons, taken together."""
    errors = [abs(row.error) for each in compared for row in each.rows]
    pairs = [pair for each in compared for pair in each.pairs()]
    clear = [pair for pair in pairs if pair.is_clear]
    choices = [choice for each in compared for choice in each.choices]
    most = f"{max(choices) - 1:.1%}" if choices else ""  # for what rotates, auto was not run
    return f"{median(errors):.1%}", f"{max(errors):.1%}", _wrong(pairs), _wrong(clear), most


def _wrong(pairs: Sequence[Pair]) -> str:
    return f"{sum(pair.is_wrong for pair in pairs)} of {len(pairs)}"


def _rows(chapter: Chapter) -> list[str]:
    rows = [
        (
            *(row.strategy, f"{row.seconds:.3f}", f"{row.predicted:.3f}", f"{row.error:+.1%}"),
            "" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.1f}",
            f"{row.predicted_bytes / 1e6:.1f}",
            *map(_waits, (row.measured_exposed, row.exposed)),
        )
        for row in sorted(chapter.compared.rows, key=lambda row: row.seconds)
    ]
    heads = "| measured s | predicted s | error | peak MB | predicted MB | waits, measured"
    return markdown_table(f"{heads} | waits, predicted", rows)


def _waits(exposed: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {seconds:.2f}" for kind, seconds in exposed.items() if seconds > 5e-3)


def draw(path: Path, chapters: Sequence[Chapter]) -> None:
    """Draw predicted over measured seconds, a panel for each kind of cluster and shape."""
    names = list(dict.fromkeys(chapter.cluster for chapter in chapters))
    columns = 2 if len(names) > 1 else 1
    rows = -(-len(names) // columns)
    with drawing(path, rows, columns, size=(5.2 * columns, 4.6 * rows)) as (_, panels):
        for panel, name in zip(panels, names, strict=False):
            mine = [chapter for chapter in chapters if chapter.cluster == name]
            _draw_panel(panel, name, mine)


def _draw_panel(panel: Any, name: str, chapters: Sequence[Chapter]) -> None:
    points = [row for chapter in chapters for row in chapter.compared.rows]
    ends = [
        min(min(row.seconds, row.predicted) for row in points) / 1.2,
        max(max(row.seconds, row.predicted) for row in points) * 1.2,
    ]
    panel.plot(ends, ends, color="gray", linewidth=0.8)
    for factor in (0.9, 1.1):
        panel.plot(ends, [factor * end for end in ends], ":", color="gray", linewidth=0.8)
    for chapter, marker in zip(chapters, "os^v", strict=False):
        compared = chapter.compared.rows
        label = f"{chapter.collective}, {chapter.micro_batches} micro-batches"
        xs, ys = [row.seconds for row in compared], [row.predicted for row in compared]
        panel.plot(xs, ys, marker, markersize=4, label=label)
        for row in compared:
            panel.annotate(row.strategy, (row.seconds, row.predicted), fontsize=5)
    log_scale(panel.xaxis, panel.yaxis)
    panel.set(xlabel="measured, s a step", ylabel="predicted")
    panel.set_title(name)
    panel.legend(fontsize=7, loc="upper left")
