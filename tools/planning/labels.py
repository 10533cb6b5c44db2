"""Places the labels of a plot's points where they cover neither each other nor the drawing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from math import ceil, dist
from typing import Any

from matplotlib.transforms import Bbox

Point = tuple[float, float]

_FONT = 8  # points, as of the ticks
_MARKER = 4  # points from the center of a marker to its edge, with some air
_DIRECTIONS = tuple(way for way in product((1, -1, 0), (1, -1, 0)) if way != (0, 0))
_DISTANCES = (5, 8, 12, 18, 26, 36, 48, 64, 84, 110)  # in points, of a label from its point
_FAR = 8  # from here on a line leads from a label to its point
_HIDDEN = 1000  # the cost of a label over another; that of one over a marker or a line is 1


def place_labels(axes: Any, labels: dict[Point, str], lines: Sequence[Sequence[Point]]) -> None:
    """Write labels next to their points, off all points and lines; nothing may be added after."""
    axes.figure.canvas.draw()  # before it nothing has a place
    axes.figure.set_layout_engine("none")
    for axis in (axes.xaxis, axes.yaxis):
        _hide_covered([*axis.get_majorticklabels(), *axis.get_minorticklabels()])
    scale = axes.figure.dpi / 72
    pixels = axes.transData.transform
    drawn = [_around(pixels(point), _MARKER * scale) for point in labels]
    for line in lines:
        drawn += _along([pixels(point) for point in line], 2 * scale)
    inside = axes.get_window_extent().padded(-scale)
    placed: list[Bbox] = []
    for point, text in sorted(labels.items()):
        x, y = pixels(point)
        written = axes.annotate(text, point, fontsize=_FONT)
        size = written.get_window_extent()
        written.remove()

        def cost(way: tuple[float, Bbox]) -> tuple[int, float]:
            distance, box = way
            hidden = not is_within(box, inside) or box.count_overlaps(placed) > 0
            return _HIDDEN * hidden + box.count_overlaps(drawn), distance

        distance, box = min(_beside((x, y), size, scale), key=cost)
        placed.append(box)
        axes.annotate(
            text, point, xytext=((box.x0 - x) / scale, (box.y0 - y) / scale),
            textcoords="offset points", verticalalignment="bottom", fontsize=_FONT,
            arrowprops={"arrowstyle": "-", "color": "gray", "linewidth": 0.6, "shrinkA": 0}
            if distance >= _FAR else None,
        )  # fmt: skip


def is_within(box: Bbox, other: Bbox) -> bool:
    return bool(other.contains(*box.min) and other.contains(*box.max))


def _beside(point: Point, size: Bbox, scale: float) -> Iterator[tuple[float, Bbox]]:
    """Yield boxes of a label's size around a point, nearest first, with their distances
    in points."""
    for distance, (right, up) in product(_DISTANCES, _DIRECTIONS):
        left = point[0] + right * distance * scale + size.width * (right - 1) / 2
        bottom = point[1] + up * distance * scale + size.height * (up - 1) / 2
        yield distance, Bbox.from_bounds(left, bottom, size.width, size.height)


def _around(point: Point, radius: float) -> Bbox:
    return Bbox([point, point]).padded(radius)


def _along(line: Sequence[Point], radius: float) -> Iterator[Bbox]:
    """Yield boxes that cover a line."""
    for (x, y), (right, up) in pairwise(line):
        count = ceil(dist((x, y), (right, up)) / radius)
        for step in range(count + 1):
            share = step / max(1, count)
            yield _around((x + share * (right - x), y + share * (up - y)), radius)


def _hide_covered(texts: Sequence[Any]) -> None:
    """Hide the texts that earlier ones cover."""
    placed: list[Bbox] = []
    for text in texts:
        box = text.get_window_extent()
        text.set_visible(not box.count_overlaps(placed))
        if text.get_visible():
            placed.append(box)
