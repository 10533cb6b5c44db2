"""States are named chunks of flat shards, each element in one; their copies in host memory."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock, call

import pytest
import torch

from paro.checkpoint.background import HostCopy, pin
from paro.checkpoint.chunks import chunked_states
from paro.errors import RunError
from paro.layout import make_layout, whole_chunk
from paro.spec.states import FlatShard
from paro.training.in_memory import _Copier
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


def test_a_block_is_locked_from_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, room, gpu = MagicMock(), torch.empty(1000, dtype=torch.uint8), torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "device", cuda.device)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    cuda.register = cuda.cudaHostRegister
    cuda.register.return_value = 0
    pin(room, gpu)
    on, enter, register, leave = cuda.mock_calls
    assert (on, register) == (call.device(gpu), call.cudaHostRegister(room.data_ptr(), 1000, 0))
    assert (enter[0], leave[0]) == ("device().__enter__", "device().__exit__")
    cuda.register.return_value = 2
    with pytest.raises(RunError, match=r"cannot be page-locked for copies from cuda:3: CUDA error"):
        pin(room, gpu)


def test_copies_share_one_block_and_later_ones_reuse_it() -> None:
    states = chunked_states(make_shards(NNN, 1, filled=True), writers=range(4))
    some = dict(list(states.items())[::2])
    copy = HostCopy()
    copy.take(some)
    first = {id(room) for room in copy._room.values()}
    taken = copy.take(states)
    blocks = {room.untyped_storage().data_ptr() for room in copy._room.values()}
    assert len(blocks) == 2  # of the first save, and of what the second has in addition
    assert first <= {id(room) for room in copy._room.values()}
    values = [v for state in states.values() for v in state.chunks.values()]
    copies = [v for state in taken.values() for v in state.chunks.values()]
    assert len(values) > 10
    for value, copied in zip(values, copies, strict=True):
        assert value.dtype == copied.dtype
        assert torch.equal(value, copied)
    values[0].zero_()
    assert not torch.equal(values[0], copies[0])


def test_its_device_is_set_before_its_stream_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    device, cuda, target = torch.device("cuda", 3), MagicMock(), torch.zeros(2)
    cuda.Stream.return_value.device = device
    for name in ("Stream", "set_device", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    copier = _Copier(device)
    cuda.reset_mock()
    copier(target, torch.ones(2))
    # The stream remembers the device before it, and sets it afterwards.
    assert cuda.mock_calls[:2] == [call.set_device(device), call.stream(cuda.Stream())]
    assert target.tolist() == [1.0, 1.0]
