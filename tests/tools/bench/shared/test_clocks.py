"""Clocks of a GPU: means over spans of time, and of a part while the GPU works."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.tools.bench.shared.clock_files import BEGIN, write_clocks
from tools.bench.shared.clocks import CLOCKS, clock_of, clock_text, recorded, working_clock

SAMPLES = ("900, 100.0, 50", "1700, 600.0, 60", "300, 90.0, 60", "1800, 700.0, 60", "9, 9.0, 9", "")


@pytest.mark.parametrize(
    ("samples", "told"),
    [
        (SAMPLES, ", SM clock 1750 MHz, 650 W"),  # neither before, between nor after the spans
        (("900, 100.0, 50", "[N/A], 9, 9", "17"), ", SM clock and power not sampled"),
        ((), ""),
    ],
)
def test_a_clock_is_the_mean_of_the_spans(
    samples: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    spans = [(BEGIN + 0.75, BEGIN + 1.25), (BEGIN + 2.75, BEGIN + 3.0)]
    assert clock_text(clock_of(write_clocks(tmp_path / CLOCKS, *samples), spans)) == told


def test_a_part_s_clock_is_the_mean_since_its_begin_while_the_gpu_works(tmp_path: Path) -> None:
    own = ("300, 70.0, 40", "1900, 600.0, 60", "1700, 700.0, 64", "[N/A], 9, 9", "17")
    file = write_clocks(tmp_path / CLOCKS, "5, 900.0, 90", *own)
    assert working_clock(file, BEGIN + 0.5).startswith("SM clock 1800 MHz, 650 W, 62 C: ")
    assert "2 of 3 samples" in working_clock(file, BEGIN + 0.5)
    assert "not recorded" in working_clock(file, BEGIN + 9.0)


@pytest.mark.process
def test_a_machine_without_nvidia_smi_records_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sh").symlink_to(shutil.which("sh") or "/bin/sh")
    monkeypatch.setenv("PATH", str(tmp_path))
    with recorded(tmp_path / CLOCKS) as file:
        pass
    assert working_clock(file, 0.0) == "SM clock and power were not recorded"
    assert clock_of(file, [(0.0, 1e10)]) == {}
