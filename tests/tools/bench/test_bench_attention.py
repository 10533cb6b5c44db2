"""The timing of attention's kernels, on a CPU and as on an H100."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.hopper import H100, hopper
from tools.bench import bench_attention
from tools.bench.bench_attention import main


def test_every_length_is_timed(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    main(["--seq-lengths", "16", "32", "--device", "cpu", "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    found = [(row["seq_length"], row["kernel"]) for row in rows]
    assert found == [(16, "FlashAttention"), (32, "FlashAttention")]
    for row in rows:
        assert [*row["tflops"]] == ["forward", "backward"]
        assert min(row["tflops"].values()) > 0


def test_both_kernels_of_a_hopper_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    measure, timed = bench_attention.measure, []

    def measured(length: int, flash: bool, device: torch.device) -> dict[str, float]:
        assert device.type == "cuda"
        with hopper() as used:
            found = measure(length, flash, torch.device("cpu"))
        timed.append({kernel.name for kernel in used})
        return found

    monkeypatch.setattr(bench_attention, "measure", measured)
    monkeypatch.setattr(bench_attention, "device_of", lambda _name: torch.device("cuda"))
    monkeypatch.setattr(bench_attention, "gpu_of", lambda _device: H100)
    main(["--seq-lengths", "16"])
    assert timed == [{"FLASH_ATTENTION"}, {"CUDNN_ATTENTION"}]
