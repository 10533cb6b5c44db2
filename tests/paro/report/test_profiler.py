"""Profiles cover the requested iterations and ranks; memory is measured and predicted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paro.report.log import Log
from paro.report.memory import (
    MemoryForecast,
    available_host_bytes,
    memory_line,
    peak_memory_bytes,
    peak_reserved_bytes,
)
from paro.report.profiler import MemoryHistory, ProfileConfig, Profiler
from tests.helpers.training import TINY, train
from tests.paro.training.test_loop import run_loop


def config(**changes: object) -> ProfileConfig:
    values: dict[str, object] = {
        "profile": True,
        "use_pytorch_profiler": True,
        "profile_step_start": 1,
        "profile_step_end": 3,
    }
    return ProfileConfig(**(values | changes))  # type: ignore[arg-type]


def test_the_trace_has_the_iterations_asked_for_with_ranges_named_like_the_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profiler = Profiler(config(), Log(), folder=str(tmp_path))
    run_loop("--train-iters 5 --eval-iters 0", observers=[profiler])
    place = tmp_path / "rank0.steps1-3.pt.trace.json"
    events = json.loads(place.read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert names.count("paro/forward-backward") == names.count("paro/optimizer") == 2
    assert {"paro/update", "paro/forward-compute", "paro/backward-compute"} <= set(names)
    assert any(name.startswith("paro/reduce:") for name in names)
    assert f"profile written to {place}" in capsys.readouterr().out


def test_a_run_that_ends_before_keeps_what_it_has_and_what_was_there(tmp_path: Path) -> None:
    place = tmp_path / "rank0.steps1-3.pt.trace.json"
    place.write_text("of an earlier run")
    profiler = Profiler(config(), Log(), folder=str(tmp_path))
    run_loop("--train-iters 2 --eval-iters 0", observers=[profiler])
    earlier = place.with_name(f"{place.name}.earlier_1")
    assert sorted(tmp_path.iterdir()) == [place, earlier]
    assert earlier.read_text() == "of an earlier run"
    assert json.loads(place.read_text())["traceEvents"]


def test_for_a_profiler_outside_the_range_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.profiler.start", lambda: marks.append("start"))
    monkeypatch.setattr("torch.cuda.profiler.stop", lambda: marks.append("stop"))
    ours, others = (config(use_pytorch_profiler=False, profile_ranks=(rank,)) for rank in (0, 1))
    profilers = [Profiler(each, Log(), folder=None) for each in (ours, others)]
    for iteration in range(5):
        marks.append(str(iteration))
        for profiler in profilers:
            profiler.begins("training", iteration)
    for profiler in profilers:
        profiler.ends()
    assert marks == ["0", "1", "start", "2", "3", "stop", "4"]


def test_without_a_gpu_there_is_nothing_to_mark_or_to_record(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Profiler(config(use_pytorch_profiler=False), Log(), folder=None).begins("training", 1)
    place = tmp_path / "snapshot.pickle"
    recording = config(record_memory_history=True, memory_snapshot_path=str(place))
    MemoryHistory(recording, Log(), torch.device("cpu")).ends()
    printed = capsys.readouterr().out
    assert "--profile has no effect" in printed
    assert "--record-memory-history has no effect" in printed
    assert not place.exists()


def test_the_snapshot_of_an_earlier_start_is_kept_and_later_ones_replace_the_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[dict[str, object]] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **kw: calls.append(kw))
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", None, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", dict)
    place = tmp_path / "snapshot.pickle"
    place.write_text("of an earlier start that ran out of memory")
    recording = config(record_memory_history=True, memory_snapshot_path=str(place))
    history = MemoryHistory(recording, Log(), torch.device("cuda"))
    history.begins("saving", 1)
    history.ends()
    elsewhere = tmp_path / "new" / "folder" / "snapshot.pickle"
    recording = config(record_memory_history=True, memory_snapshot_path=str(elsewhere))
    MemoryHistory(recording, Log(), torch.device("cuda")).begins("saving", 1)
    assert elsewhere.exists()
    earlier = tmp_path / "snapshot.pickle.earlier_1"
    assert sorted(tmp_path.glob("snapshot*")) == [place, earlier]
    assert earlier.read_text() == "of an earlier start that ran out of memory"
    assert calls[:2] == [{"context": "alloc"}, {"enabled": None}], "no stack is taken at a free"


@pytest.mark.gpu
def test_a_gpus_allocations_are_written(tmp_path: Path) -> None:
    place = tmp_path / "snapshot.pickle"
    recording = config(record_memory_history=True, memory_snapshot_path=str(place))
    history = MemoryHistory(recording, Log(), torch.device("cuda"))
    flags = f"{TINY} --train-iters 2 --global-batch-size 2 --recompute-granularity full"
    train(flags.replace(" gloo ", " nccl "))
    history.ends()
    assert place.stat().st_size > 10_000
    (recorded,) = torch.cuda.memory._snapshot()["device_traces"][:1]
    kept = torch.ones(1000, device="cuda")
    assert kept.sum() == 1000
    (later,) = torch.cuda.memory._snapshot()["device_traces"][:1]
    assert len(later) == len(recorded), "it records on"


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
