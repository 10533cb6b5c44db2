"""Plots of figures: which files can be drawn, and drawings that are written completely or not."""

from __future__ import annotations

import importlib
import importlib.util
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paro.errors import UserError, one_line
from tools.shared.output import output_file

FORMATS = (".png", ".svg", ".pdf")
_LABEL_CHARS = 32


def check_can_draw(path: Path | None, flag: str = "--plot") -> None:
    """Raise `UserError` before a measurement if a picture of it could not be drawn."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{flag} {path} is a folder: name a file in it")
    if path.suffix not in FORMATS:
        raise UserError(f"{flag} {path}: the name must end in {', '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"{flag} needs matplotlib: pip install -r requirements.txt")


def check_outputs(args: Namespace, *flags: str, pictures: Sequence[str] = ()) -> None:
    """Raise `UserError` early for files of these flags that could not be written at the end."""
    for flag in (*flags, *pictures):
        path: Path | None = getattr(args, flag.removeprefix("--").replace("-", "_"))
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise UserError(f"{flag} {path} cannot be written: is its folder there?")
        if flag in pictures:
            check_can_draw(path, flag)


@contextmanager
def figure_of(
    rows: int,
    columns: int,
    *,
    size: tuple[float, float],
    style: Mapping[str, Any] | None = None,
    **subplots: Any,
) -> Iterator[tuple[Any, list[Any]]]:
    """Make a figure of `size` inches and its panels, row by row, in a style.

    Other arguments of matplotlib's `subplots` may be given too. No text in it is read as a formula:
    names of runs, files and machines may hold a dollar or a backslash. Axes of logarithms have
    their numbers from `log_scale`, since matplotlib's own are formulas.
    """
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("agg")  # no screen is needed
    pyplot = importlib.import_module("matplotlib.pyplot")
    with matplotlib.rc_context({"text.parse_math": False, **(style or {})}):
        figure, panels = pyplot.subplots(
            rows, columns, figsize=size, squeeze=False, layout="constrained", **subplots
        )
        try:
            yield figure, [*panels.flat]
        finally:
            pyplot.close(figure)


@contextmanager
def drawing(
    path: Path, rows: int, columns: int, *, size: tuple[float, float], **subplots: Any
) -> Iterator[tuple[Any, list[Any]]]:
    """Yield a figure like `figure_of`, written to a file when the block succeeds."""
    with figure_of(rows, columns, size=size, **subplots) as (figure, panels):
        yield figure, panels
        with output_file(path) as temporary:
            figure.savefig(temporary, format=path.suffix.removeprefix("."), dpi=150)


def log_scale(*axes: Any, **scale: Any) -> None:
    """Make x or y axes of panels logarithmic, with plain numbers; `scale` as for matplotlib."""
    ticker = importlib.import_module("matplotlib.ticker")
    for axis in axes:
        getattr(axis.axes, f"set_{axis.axis_name}scale")("log", **scale)
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(ticker.LogFormatter(labelOnlyBase=False))


def label_of(name: str) -> str:
    """Return a name as the label of a curve or a row: short, and not left out of a legend.

    matplotlib leaves out labels that begin with _, and with a very long one no room is left.
    """
    return f"{' ' if name.startswith('_') else ''}{one_line(name, _LABEL_CHARS)}"


def name_rows(axes: Any, names: Sequence[str], colors: Mapping[str, str]) -> None:
    """Label rows of bars, counted downwards, and add a legend of the colors."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    for kind, color in colors.items():
        axes.barh(0, 0, color=color, label=kind)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
