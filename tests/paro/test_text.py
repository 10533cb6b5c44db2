"""Counts, bytes and tables as formatted for messages."""

from __future__ import annotations

import pytest

from paro.errors import count_text
from paro.text import align, ranks_text, size_text


def test_one_is_no_plural() -> None:
    assert [count_text(n, "micro-batch") for n in (1, 2)] == ["1 micro-batch", "2 micro-batches"]
    assert [count_text(n, "rank") for n in (1, 16)] == ["1 rank", "16 ranks"]


def test_a_rank_alone_has_no_group() -> None:
    assert ranks_text(1, 1) == "1 rank"
    assert ranks_text(4, 1) == "4 ranks in groups of 1"
    assert ranks_text(4, 4) == "4 ranks in one group"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(12, "12 bytes"), (26_400, "26.4 kB"), (1_000_000, "1.0 MB"), (13_476_000_000, "13.5 GB")],
)
def test_no_size_is_written_as_nothing(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text


def test_parts_are_written_in_the_unit_of_their_sum() -> None:
    assert size_text(26_400_000, like=13_476_000_000) == "0.0 GB"


def test_columns_are_as_wide_as_their_widest() -> None:
    rows = [["a", "bb", "c"], ["ccc", "d", ""]]
    assert align(rows) == "a    bb  c\nccc   d"
    assert align(rows, left=(1, -1)) == "  a  bb  c\nccc  d"
