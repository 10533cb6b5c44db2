"""The thread that copies states to the host works on the GPU of its rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from paro.training.local_copies import _Copier


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
