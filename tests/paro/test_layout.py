"""Flat order, padding, ranges of chunks, and the chunks that a checkpoint stores."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paro.layout import (
    ALIGN,
    ParamChunk,
    UnitLayout,
    make_layout,
    make_sliced_layout,
    parameter_runs,
    split_range,
    whole_chunk,
)

NEEDS_PADDING = {"norm": (5,), "weight": (3, 7), "scalar": ()}


def _layout(world_size: int = 6) -> UnitLayout:
    chunks = [whole_chunk(name, shape) for name, shape in NEEDS_PADDING.items()]
    return make_layout(chunks, world_size=world_size)


def test_matrices_first_aligned_and_padded_for_the_world() -> None:
    layout = _layout()
    assert [placed.chunk.name for placed in layout.chunks] == ["weight", "norm", "scalar"]
    assert all(placed.offset % ALIGN == 0 for placed in layout.chunks)
    assert layout.matrix_stop == 24
    assert layout.numel == 48


def test_gaps_and_pieces_cover_the_buffer_once() -> None:
    layout = _layout()
    covered = np.zeros(layout.numel, dtype=int)
    for begin, end in layout.gaps():
        covered[begin:end] += 1
    for start in range(0, layout.numel, layout.numel // 6):
        for part in layout.chunk_ranges(start, start + layout.numel // 6):
            covered[part.offset : part.offset + part.high - part.low] += 1
    assert (covered == 1).all()


@st.composite
def chunks_and_ranges(draw: st.DrawFn) -> tuple[ParamChunk, int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    start = tuple(draw(st.integers(0, size - 1)) for size in shape)
    extent = tuple(
        draw(st.integers(1, size - first)) for size, first in zip(shape, start, strict=True)
    )
    chunk = ParamChunk(name="p", shape=shape, offsets=start, sizes=extent)
    low = draw(st.integers(0, chunk.numel))
    return chunk, low, draw(st.integers(low, chunk.numel))


@given(chunks_and_ranges())
def test_chunks_and_runs_name_the_elements_of_a_range_in_order(
    case: tuple[ParamChunk, int, int],
) -> None:
    chunk, low, high = case
    parameter = np.arange(int(np.prod(chunk.shape))).reshape(chunk.shape)
    cut = tuple(slice(a, a + e) for a, e in zip(chunk.offsets, chunk.sizes, strict=True))
    flat = parameter[cut].reshape(-1)

    runs = [list(range(begin, end)) for begin, end in parameter_runs(chunk, low, high)]
    assert [index for run in runs for index in run] == list(flat[low:high])

    position = low
    for begin, part in split_range(chunk, low, high):
        assert begin == position
        position += part.numel
        corner = tuple(slice(a, a + e) for a, e in zip(*part, strict=True))
        assert list(parameter[corner].reshape(-1)) == list(flat[begin:position])
    assert position == high


@given(chunks_and_ranges())
def test_a_range_takes_few_chunks(case: tuple[ParamChunk, int, int]) -> None:
    chunk, low, high = case
    assert len(list(split_range(chunk, low, high))) <= max(1, 2 * len(chunk.shape) - 1)


def test_a_sliced_layout_holds_every_element_once() -> None:
    shapes = {"wq": (12, 7), "bq": (12,), "wo": (7, 12), "w_up": (13, 3)}
    cuts = {"wq": 0, "bq": 0, "wo": 1, "w_up": 0}
    layout = make_sliced_layout(shapes, cuts=cuts, number=4, world_size=8)
    assert layout.numel % (8 * 8) == 0
    seen = {name: np.zeros(shape) for name, shape in shapes.items()}
    for start in range(0, layout.numel, layout.numel // 4):
        stop = start + layout.numel // 4
        for part in layout.chunk_ranges(start, stop):
            chunk = part.chunk
            assert (part.offset - start < layout.matrix_stop) == (chunk.name != "bq")
            assert (part.low, part.high) == (0, chunk.numel), "cut by the end of its slice"
            where = tuple(slice(a, a + b) for a, b in zip(chunk.offsets, chunk.sizes, strict=True))
            seen[chunk.name][where] += 1
    assert all((counts == 1).all() for counts in seen.values())
