"""Which of torch's recorders is read, and where torch writes on its own."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as recorders
from torch.distributed import distributed_c10d

from paro.distributed import flight_recorder
from paro.distributed.flight_recorder import record_flights, recorded_collectives
from paro.distributed.world import World


@pytest.mark.parametrize(
    ("backends", "read"), [(("gloo", "nccl"), "NCCL's"), (("gloo", "gloo"), "others")]
)
def test_nccl_s_recorder_is_read_where_any_group_is_nccl_s(
    monkeypatch: pytest.MonkeyPatch, backends: tuple[str, ...], read: str
) -> None:
    """The default group is gloo's under every backend."""

    def dump(name: str) -> bytes:
        return pickle.dumps({"entries": [], "recorder": name})

    groups = {object(): (backend, None) for backend in backends}
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(type(distributed_c10d._world), "pg_map", property(lambda _: groups))
    monkeypatch.setattr(recorders, "_dump_nccl_trace", lambda: dump("NCCL's"), raising=False)
    monkeypatch.setattr(recorders, "_dump_fr_trace", lambda: dump("others"))
    monkeypatch.setattr(flight_recorder, "read_world", lambda: World(local_rank=3))
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    recorded = recorded_collectives()
    assert devices == ([3] if "nccl" in backends else [])
    assert recorded is not None
    assert pickle.loads(recorded)["recorder"] == read


def test_ranks_with_one_number_in_their_groups_write_different_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = set()
    for rank in (0, 8):
        for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT", raising=False)
        record_flights(str(tmp_path), rank)
        written.add(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}0")  # as torch does for both
    assert len(written) == 2
    assert not any(Path(name).name.startswith("rank_") for name in written)
