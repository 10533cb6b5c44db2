"""Places the labels of a plot's points where they cover neither each other nor what is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from math import ceil, dist
from typing import Any, NamedTuple

Point = tuple[float, float]

_FONT = 8  # points, as of the ticks
_MARKER = 4  # points from the center of a marker to its edge, with some air
_DIRECTIONS = tuple(way for way in product((1, -1, 0), (1, -1, 0)) if way != (0, 0))
_DISTANCES = (5, 8, 12, 18, 26, 36, 48, 64, 84, 110)  # in points, of a label from its point
_FAR = 8  # from here on a line leads from a label to its point
_HIDDEN = 1000  # the cost of a label over another; that of one over a marker or a line is 1


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: Box) -> bool:
        wide = self.left < other.right and other.left < self.right
        return wide and self.bottom < other.top and other.bottom < self.top

    def contains(self, other: Box) -> bool:
        wide = self.left <= other.left and other.right <= self.right
        return wide and self.bottom <= other.bottom and other.top <= self.top


def box_of(artist: Any) -> Box:
    """The rectangle of a text, or of axes, where it was drawn."""
    extent = artist.get_window_extent()
    return Box(extent.x0, extent.y0, extent.x1, extent.y1)


def place_labels(axes: Any, labels: dict[Point, str], lines: Sequence[Sequence[Point]]) -> None:
    """Writes labels beside their points, off all points and lines; nothing may be added after."""
    axes.figure.canvas.draw()  # before it nothing has a place
    axes.figure.set_layout_engine("none")
    for axis in (axes.xaxis, axes.yaxis):
        _hide_covered([*axis.get_majorticklabels(), *axis.get_minorticklabels()])
    scale = axes.figure.dpi / 72
    pixels = axes.transData.transform
    drawn = [_around(pixels(point), _MARKER * scale) for point in labels]
    for line in lines:
        drawn += _along([pixels(point) for point in line], 2 * scale)
    left, bottom, right, top = box_of(axes)
    inside = Box(left + scale, bottom + scale, right - scale, top - scale)
    taken: list[Box] = []
    for point, text in sorted(labels.items()):
        x, y = pixels(point)
        written = axes.annotate(text, point, fontsize=_FONT)
        size = box_of(written)
        written.remove()

        def cost(way: tuple[float, Box]) -> tuple[int, float]:
            distance, box = way
            hidden = not inside.contains(box) or any(map(box.overlaps, taken))
            return _HIDDEN * hidden + sum(map(box.overlaps, drawn)), distance

        distance, box = min(_beside((x, y), size, scale), key=cost)
        taken.append(box)
        axes.annotate(
            text, point, xytext=((box.left - x) / scale, (box.bottom - y) / scale),
            textcoords="offset points", verticalalignment="bottom", fontsize=_FONT,
            arrowprops={"arrowstyle": "-", "color": "gray", "linewidth": 0.6, "shrinkA": 0}
            if distance >= _FAR else None,
        )  # fmt: skip


def _beside(place: Point, size: Box, scale: float) -> Iterator[tuple[float, Box]]:
    """Boxes of a label's size around a point, nearest first, with their distances in points."""
    width, height = size.right - size.left, size.top - size.bottom
    for distance, (right, up) in product(_DISTANCES, _DIRECTIONS):
        left = place[0] + right * distance * scale + width * (right - 1) / 2
        bottom = place[1] + up * distance * scale + height * (up - 1) / 2
        yield distance, Box(left, bottom, left + width, bottom + height)


def _around(place: Point, radius: float) -> Box:
    x, y = place
    return Box(x - radius, y - radius, x + radius, y + radius)


def _along(line: Sequence[Point], radius: float) -> Iterator[Box]:
    """Boxes that cover a line."""
    for (x, y), (right, up) in pairwise(line):
        count = ceil(dist((x, y), (right, up)) / radius)
        for step in range(count + 1):
            share = step / max(1, count)
            yield _around((x + share * (right - x), y + share * (up - y)), radius)


def _hide_covered(texts: Sequence[Any]) -> None:
    """Hides the texts that those before them cover."""
    taken: list[Box] = []
    for text in texts:
        box = box_of(text)
        text.set_visible(not any(map(box.overlaps, taken)))
        if text.get_visible():
            taken.append(box)
