"""Flat order, padding, pieces, and the rectangles that a checkpoint stores."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paro.layout import (
    ALIGN,
    Box,
    UnitLayout,
    make_layout,
    make_sliced_layout,
    parameter_runs,
    rectangles,
    whole_box,
)

NEEDS_PADDING = {"norm": (5,), "weight": (3, 7), "scalar": ()}


def _layout(world_size: int = 6) -> UnitLayout:
    boxes = [whole_box(name, shape) for name, shape in NEEDS_PADDING.items()]
    return make_layout(boxes, decayed=frozenset({"weight"}), world_size=world_size)


def test_decayed_first_aligned_and_padded_for_the_world() -> None:
    layout = _layout()
    assert [placed.box.name for placed in layout.boxes] == ["weight", "norm", "scalar"]
    assert all(placed.offset % ALIGN == 0 for placed in layout.boxes)
    assert layout.decayed_stop == 24
    assert layout.numel == 48


def test_gaps_and_pieces_cover_the_buffer_once() -> None:
    layout = _layout()
    covered = np.zeros(layout.numel, dtype=int)
    for begin, end in layout.gaps():
        covered[begin:end] += 1
    for start in range(0, layout.numel, layout.numel // 6):
        for piece in layout.pieces(start, start + layout.numel // 6):
            covered[piece.offset : piece.offset + piece.high - piece.low] += 1
    assert (covered == 1).all()


@st.composite
def boxes_and_ranges(draw: st.DrawFn) -> tuple[Box, int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    start = tuple(draw(st.integers(0, size - 1)) for size in shape)
    extent = tuple(
        draw(st.integers(1, size - first)) for size, first in zip(shape, start, strict=True)
    )
    box = Box(name="p", shape=shape, start=start, extent=extent)
    low = draw(st.integers(0, box.numel))
    return box, low, draw(st.integers(low, box.numel))


@given(boxes_and_ranges())
def test_rectangles_and_runs_name_the_elements_of_a_range_in_order(
    case: tuple[Box, int, int],
) -> None:
    box, low, high = case
    parameter = np.arange(int(np.prod(box.shape))).reshape(box.shape)
    cut = tuple(slice(a, a + e) for a, e in zip(box.start, box.extent, strict=True))
    flat = parameter[cut].reshape(-1)

    runs = [list(range(begin, end)) for begin, end in parameter_runs(box, low, high)]
    assert [index for run in runs for index in run] == list(flat[low:high])

    position = low
    for part in rectangles(box, low, high):
        assert part.low == position
        corner = tuple(slice(a, a + e) for a, e in zip(part.start, part.extent, strict=True))
        assert list(parameter[corner].reshape(-1)) == list(flat[part.low : part.high])
        position = part.high
    assert position == high


@given(boxes_and_ranges())
def test_a_range_takes_few_rectangles(case: tuple[Box, int, int]) -> None:
    box, low, high = case
    assert len(list(rectangles(box, low, high))) <= max(1, 2 * len(box.shape) - 1)


def test_a_sliced_layout_holds_every_element_once() -> None:
    shapes = {"wq": (12, 7), "bq": (12,), "wo": (7, 12), "w_up": (13, 3)}
    cuts = {"wq": 0, "bq": 0, "wo": 1, "w_up": 0}
    layout = make_sliced_layout(shapes, cuts=cuts, number=4, world_size=8)
    assert layout.numel % (8 * 8) == 0
    seen = {name: np.zeros(shape) for name, shape in shapes.items()}
    for start in range(0, layout.numel, layout.numel // 4):
        stop = start + layout.numel // 4
        for piece in layout.pieces(start, stop):
            box = piece.box
            assert (piece.offset - start < layout.num_decayed(start, stop)) == (box.name != "bq")
            assert (piece.low, piece.high) == (0, box.numel), "cut by the end of its slice"
            where = tuple(slice(a, a + b) for a, b in zip(box.start, box.extent, strict=True))
            seen[box.name][where] += 1
    assert all((counts == 1).all() for counts in seen.values())
