"""States are named chunks of flat shards, and every element is in exactly one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paro.checkpoint.chunks import chunked_states
from paro.layout import make_layout, whole_chunk
from paro.spec.states import FlatShard
from tests.paro.checkpoint.toy_run import NNN, SHAPES, STATES, make_shards, save_checkpoint


def shard_of(numel: int, *, start: int, stop: int) -> FlatShard:
    layout = make_layout([whole_chunk("p", (numel,))], world_size=1)
    values = torch.arange(start, stop, dtype=torch.float32)
    return FlatShard(layout=layout, start=start, values=values, state="param")


def test_a_range_becomes_part_row_full_rows_part_row() -> None:
    layout = make_layout([whole_chunk("p", (6, 4))], world_size=1)
    values = torch.arange(3.0, 18.0)
    shard = FlatShard(layout=layout, start=3, values=values, state="exp_avg")
    state = chunked_states([shard], writers={0})["exp_avg.p"]
    assert state.shape == (6, 4)
    assert list(state.chunks) == [(0, 3), (1, 0), (4, 0)]
    assert [tuple(part.shape) for part in state.chunks.values()] == [(1, 1), (3, 4), (1, 2)]
    assert torch.equal(state.chunks[1, 0], torch.arange(4.0, 16.0).view(3, 4))


def test_every_rank_knows_every_state_and_replicas_share_the_writing() -> None:
    expected = {
        f"{state}.{name}"
        for name in SHAPES
        for state in (STATES[:1] if name.startswith("frozen") else STATES)
    }
    seen = {name: torch.zeros(SHAPES[name.partition(".")[2]]) for name in expected}
    num_bytes = []
    for rank in range(NNN.world_size):
        states = chunked_states(make_shards(NNN, rank, filled=True), writers=range(4))
        assert states.keys() == expected
        for name, state in states.items():
            for offsets, part in state.chunks.items():
                sizes = zip(offsets, part.shape, strict=True)
                seen[name][tuple(slice(start, start + size) for start, size in sizes)] += 1
        parts = [part for state in states.values() for part in state.chunks.values()]
        num_bytes.append(sum(part.nbytes for part in parts))
    assert all((count == 1).all() for count in seen.values())
    assert max(num_bytes) < 1.4 * min(num_bytes)  # padding is a large part of so small a model


def test_what_is_written_at_once_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paro.checkpoint.chunks.MAX_ITEM_BYTES", 64)
    layout = make_layout([whole_chunk("p", (6, 10))], world_size=1)
    values = torch.arange(layout.numel, dtype=torch.float32)
    shard = FlatShard(layout=layout, start=0, values=values, state="param")
    parts = chunked_states([shard], writers={0})["param.p"].chunks
    assert {tuple(part.shape) for part in parts.values()} == {(1, 10)}
    assert list(parts) == [(row, 0) for row in range(6)]
    assert list(chunked_states([shard])["param.p"].chunks) == [(0, 0)]


@pytest.mark.parametrize(
    ("shards", "complaint"),
    [
        ([shard_of(16, start=0, stop=8)], "param.p: 8 of "),
        ([shard_of(16, start=0, stop=0)], "param.p: 0 of "),
        (
            [shard_of(16, start=0, stop=16), shard_of(16, start=8, stop=12)],
            "Failed to validate global plan",
        ),
    ],
    ids=["hole", "nobody writes", "overlap"],
)
def test_holes_and_overlaps_are_not_saved(
    tmp_path: Path, shards: list[FlatShard], complaint: str
) -> None:
    with pytest.raises((AssertionError, ValueError), match=complaint):
        save_checkpoint(tmp_path, 1, shards, {})
    assert list(tmp_path.iterdir()) == []
