"""Memory is measured, not computed."""

from pathlib import Path

import pytest
import torch

from paro.report.memory import (
    MemoryForecast,
    available_host_bytes,
    memory_line,
    peak_memory_bytes,
    peak_reserved_bytes,
)


@pytest.mark.slow("fills memory until it shows")
def test_a_cpu_process_that_grows_has_a_higher_peak() -> None:
    size = 64 * 2**20
    before = peak_memory_bytes(torch.device("cpu"))
    # Larger than the peak so far, whatever earlier tests used and freed.
    block = torch.ones(before + size, dtype=torch.uint8)
    assert peak_memory_bytes(torch.device("cpu")) - before >= size
    del block


MIB = 2**20
FORECAST = MemoryForecast(
    predicted_bytes=5 * MIB, reserved_bytes=6 * MIB, states_bytes=3 * MIB, bytes_before=2 * MIB
)


def test_the_line_shows_the_peak_as_it_is_and_as_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = memory_line(torch.device("cpu"), iteration=1, forecast=FORECAST)
    assert line.startswith("[Rank 0] (after 1 iterations) memory (MB) | max resident: ")
    assert line.endswith(" model was built: 2.0 | model states: 3.0 | predicted peak: 7.0")
    for index, name in enumerate(("memory_allocated", "memory_reserved"), start=1):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda _, index=index: index * MIB)
        monkeypatch.setattr(f"torch.cuda.max_{name}", lambda _, index=index: (4 + index) * MIB)
    line = memory_line(torch.device("cuda", 0), iteration=1, forecast=FORECAST)
    assert line.endswith(
        " | max allocated: 5.0 | reserved: 2.0 | max reserved: 6.0 | model states: 3.0"
        " | predicted peak: 7.0 | predicted reserved: 6.0"
    )


def test_what_a_host_has_left_is_what_its_tightest_limit_leaves(tmp_path: Path) -> None:
    def write(path: str, text: object) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n")

    assert available_host_bytes(tmp_path) is None
    write("proc/meminfo", "MemTotal:    9000 kB\nMemAvailable:    8000 kB")
    assert available_host_bytes(tmp_path) == 8000 * 1024
    write("proc/self/cgroup", "1:cpu:/other\n0::/job/step")
    write("sys/fs/cgroup/job/step/memory.max", "max")
    write("sys/fs/cgroup/job/step/memory.current", 10)
    assert available_host_bytes(tmp_path) == 8000 * 1024
    write("sys/fs/cgroup/job/memory.max", 1000)
    write("sys/fs/cgroup/job/memory.current", 700)
    assert available_host_bytes(tmp_path) == 300
    write("sys/fs/cgroup/job/memory.stat", "anon 1\ninactive_file 40\nactive_file 5")
    assert available_host_bytes(tmp_path) == 345


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_the_allocator_is_asked() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.reset_peak_memory_stats(device)
    before = peak_memory_bytes(device)
    block = torch.empty(2**24, dtype=torch.uint8, device=device)
    del block
    assert peak_memory_bytes(device) == before + 2**24
    assert peak_reserved_bytes(device) >= peak_memory_bytes(device)
    line = memory_line(device, iteration=1, forecast=FORECAST)
    assert " | allocated: " in line
    assert " | max reserved: " in line
