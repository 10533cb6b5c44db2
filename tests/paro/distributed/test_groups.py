"""Groups for NCCL: every rank makes communicators of its own groups alone, with high priority."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paro.distributed.groups import GroupConfig, make_groups
from paro.topology import Use, make_topology
from tests.helpers.refusals import refused


class Options:
    """Stands for torch's, which only builds with NCCL have."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)
        self.config = SimpleNamespace(max_ctas=None)


class OldOptions(Options):
    """Of a torch that bounds no thread blocks."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        super().__init__(is_high_priority_stream)
        del self.config.max_ctas


def made_by(
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    backend: str,
    *,
    options: type[Options] = Options,
    launch_order: str = "free",
) -> list[dict[str, Any]]:
    """The groups that a rank of 4 makes for an axis of 2, on a GPU of 132 multiprocessors."""
    calls: list[dict[str, Any]] = []

    def new_group(ranks: list[int], **named: Any) -> object:
        calls.append({"ranks": ranks, **named})
        return object()

    monkeypatch.setattr(dist, "new_group", new_group)
    kind = SimpleNamespace(Options=options)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", kind, raising=False)
    topology = make_topology(world_size=4, group_size=2, degrees=(2, 2, 4))
    config = GroupConfig(
        timeout=timedelta(seconds=7),
        backend=backend,
        device=torch.device("cuda", rank),
        launch_order=launch_order,
    )
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    make_groups(topology, rank, {Use.ROTATE: frozenset({topology.axes_between(1, 2)})}, config)
    return calls


def test_only_members_connect_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = made_by(monkeypatch, 3, "nccl")
    assert [call["ranks"] for call in calls] == [[0, 1], [2, 3]]
    assert [call["device_id"] for call in calls] == [None, torch.device("cuda", 3)]


def test_messages_of_a_rotation_have_the_priority_of_comm_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = [call["pg_options"] for call in made_by(monkeypatch, 0, "nccl")]
    assert all(one.is_high_priority_stream for one in options)
    assert [one._timeout for one in options] == [timedelta(seconds=7)] * 2
    assert options[0] is not options[1]  # torch writes the group's name and ranks into them
    assert [call["pg_options"] for call in made_by(monkeypatch, 0, "gloo")] == [None, None]


@pytest.mark.parametrize(("launch_order", "max_ctas"), [("free", 22), ("implicit", None)])
def test_communicators_that_begin_in_any_order_fit_the_gpu_side_by_side(
    launch_order: str, max_ctas: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    calls = made_by(monkeypatch, 0, "nccl", launch_order=launch_order)
    assert [call["pg_options"].config.max_ctas for call in calls] == [max_ctas] * 2
    assert (os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == "1") == (max_ctas is None)


def test_a_torch_that_bounds_no_thread_blocks_keeps_the_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {})
    make = partial(made_by, monkeypatch, 0, "nccl", options=OldOptions)
    refused(make, "--paro-nccl-launch-order implicit")
    assert len(make(launch_order="implicit")) == 2
