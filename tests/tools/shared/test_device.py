"""The device of a tool: a GPU if there is one, and one line for one that is not there."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.refusals import refused
from tools.shared.device import device_of


def having(monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)


@pytest.mark.parametrize(
    ("num_gpus", "name", "device"),
    [
        (0, None, "cpu"),
        (2, None, "cuda:0"),
        (2, "cpu", "cpu"),
        (2, "cuda", "cuda:0"),
        (2, "cuda:1", "cuda:1"),
    ],
)
def test_a_device_that_is_there(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, name: str | None, device: str
) -> None:
    having(monkeypatch, num_gpus)
    assert device_of(name) == torch.device(device)


@pytest.mark.parametrize(
    ("num_gpus", "name", "told"),
    [
        (0, "cuda", "--device cuda: torch sees no CUDA device"),
        (1, "cuda:1", "--device cuda:1: torch sees 1 CUDA device here"),
        (2, "cuda:7", "--device cuda:7: torch sees 2 CUDA devices"),
        (2, "cuda:-1", "--device cuda:-1 is unknown"),
        (2, "gpu", "--device gpu is unknown: give cpu, cuda or cuda:1"),
    ],
)
def test_a_device_that_is_not(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, name: str, told: str
) -> None:
    having(monkeypatch, num_gpus)
    refused(lambda: device_of(name), told)
