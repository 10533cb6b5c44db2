"""Host memory for copies from a GPU, page-locked exactly, and the thread that copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from paro.checkpoint.background import HostCopy, pin
from paro.checkpoint.chunks import chunked_states
from paro.errors import RunError
from paro.training.in_memory import _Copier
from tests.paro.checkpoint.toy_run import NNN, make_shards


def test_a_block_is_locked_from_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []

    @contextmanager
    def device(which: torch.device) -> Iterator[None]:
        calls.append(("on", which))
        yield
        calls.append(("off", which))

    def register(*words: int) -> int:
        calls.append(words)
        return status

    status = 0
    monkeypatch.setattr(torch.cuda, "device", device)
    library = SimpleNamespace(cudaHostRegister=register)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: library)
    room, gpu = torch.empty(1000, dtype=torch.uint8), torch.device("cuda", 3)
    pin(room, gpu)
    assert calls == [("on", gpu), (room.data_ptr(), 1000, 0), ("off", gpu)]
    status = 2
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
    device = torch.device("cuda", 3)
    calls: list[object] = []

    @contextmanager
    def stream(_stream: object) -> Iterator[None]:
        calls.append("stream")  # which remembers the device, and sets it afterwards
        yield

    of_thread = SimpleNamespace(device=device, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: of_thread)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    target = torch.zeros(2)
    _Copier(device)(target, torch.ones(2))
    assert calls == [device, "stream"]
    assert target.tolist() == [1.0, 1.0]
