"""From measurements to throughput; the peak FLOP/s of devices; memory and profiles."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

from paro.distributed.control import Control
from paro.distributed.exposed_time import ExposedTime
from paro.distributed.world import World
from paro.report.flops import _timed_peak, find_peak, listed_peak
from paro.report.log import Log
from paro.report.memory import (
    MemoryForecast,
    available_host_bytes,
    memory_line,
    peak_memory_bytes,
    peak_reserved_bytes,
)
from paro.report.profiler import MemoryHistory, ProfileConfig, Profiler
from paro.report.record import GroupsRecord, PeakThroughput, scalars_of, summarize
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TINY, train
from tests.paro.report import test_report
from tests.paro.report.test_report import record
from tests.paro.training.test_loop import run_loop

# Two ranks and sequences of 10; the first iteration has a batch of 8 and takes 100 ms.
FACTS = replace(
    test_report.FACTS,
    seq_length=10,
    flops_per_token=1000.0,
    flops_per_token_causal=900.0,
    peak=PeakThroughput(flops_per_second=1e6, source="typed in"),
    model_state_bytes=77,
)
EXPOSED = ExposedTime(gather=0.05, inter=0.01)
FIRST = replace(record(1), lm_loss=4.0, data_wait_ms=2.0, exposed=EXPOSED)
SECOND = replace(
    record(2),
    consumed_samples=24,
    global_batch_size=16,
    lm_loss=3.0,
    learning_rate=0.2,
    iteration_time_ms=300.0,
    intra_bytes=7,
    inter_bytes=8,
)


def test_loss_and_speed_are_means_and_the_rest_is_the_last_iterations() -> None:
    # 24 samples of 10 tokens in 0.4 s are 600 tokens/s, 300 a device.
    metrics = asdict(
        summarize([FIRST, SECOND], FACTS, peak_memory_bytes=55, peak_reserved_bytes=66)
    )
    assert {name: value for name, value in metrics.items() if value} == {
        "iteration": 2,
        "consumed_samples": 24,
        "lm_loss": 3.5,
        "grad_norm": 1.0,
        "learning_rate": 0.2,
        "iteration_time_ms": 200.0,
        "data_wait_ms": 1.0,
        "tokens_per_second": pytest.approx(600.0),
        "tflops_per_device": pytest.approx(3e-7),
        "mfu": pytest.approx(0.3),
        "mfu_causal": pytest.approx(0.27),
        "peak_memory_bytes": 55,
        "peak_reserved_bytes": 66,
        "model_state_bytes": 77,
        "intra_bytes": 7,
        "inter_bytes": 8,
        "exposed_gather_ms": 25.0,
        "exposed_inter_ms": 10.0,
    }


def test_a_dashboard_has_tags_of_what_was_measured() -> None:
    nan = math.nan
    empty = replace(FIRST, skipped=True, has_tokens=False, lm_loss=nan, grad_norm=nan, z_loss=nan)
    full = replace(FIRST, num_zeros=7.0, params_norm=2.5, lm_loss=0.1 + 0.2, z_loss=0.5)
    full = replace(full, decoupled_learning_rate=0.25)
    found = []
    for seen, reserved in ((empty, None), (FIRST, None), (full, 66)):
        metrics = summarize([seen], FACTS, peak_memory_bytes=55, peak_reserved_bytes=reserved)
        found.append(scalars_of(seen, metrics, FACTS, totals={}))
        assert found[-1]["memory/peak-measured-bytes"] == 55
    assert metrics.lm_loss == 0.1 + 0.2, "a single loss keeps every bit"
    assert found[1].keys() - found[0].keys() == {"lm loss", "grad-norm"}
    more = {"num-zeros": 7.0, "params-norm": 2.5, "z-loss": 0.5, "memory/peak-reserved-bytes": 66}
    more["decoupled-learning-rate"] = 0.25
    assert {name: found[2][name] for name in found[2].keys() - found[1].keys()} == more


def test_groups_that_train_alone_have_values_of_their_own() -> None:
    last = GroupsRecord(lm_losses=(4.0, math.nan))
    apart = replace(
        last, lm_losses=(3.0, math.nan), outer_grad_norm=0.5, outer_grad_cosine=0.8, num_left_out=1
    )
    interval = [replace(FIRST, groups=groups) for groups in (apart, last)]
    metrics = summarize(interval, FACTS, peak_memory_bytes=0)
    assert metrics.group_lm_losses == (3.5, None)
    assert (metrics.outer_grad_norm, metrics.outer_grad_cosine) == (0.5, 0.8)
    tags = scalars_of(interval[0], metrics, FACTS, totals={})
    assert {tag: tags[tag] for tag in tags if tag.startswith("outer/")} == {
        "outer/lm-loss-group-0": 3.0,
        "outer/grad-norm": 0.5,
        "outer/grad-cosine": 0.8,
        "outer/groups-left-out": 1,
    }


def test_known_devices_have_data_sheet_peaks() -> None:
    for name, compute, tflops in (
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
    ):
        peak = listed_peak(name, compute)
        assert peak is not None
        assert (peak.flops_per_second, name in peak.source) == (tflops * 1e12, True)
    for name in ("Tesla V100-SXM2-32GB", "NVIDIA A10G"):
        assert listed_peak(name, "bf16") is None, "nothing is guessed"


CPU = torch.device("cpu")


def find_on_a_rank() -> tuple[PeakThroughput, bool]:
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    with mock.patch("paro.report.flops._timed_peak", wraps=_timed_peak) as timed:
        control = Control(world, CPU)
        peak = find_peak(CPU, compute="fp32", peak_tflops=None, control=control)
    return peak, timed.called


@pytest.mark.ranks
def test_the_first_rank_times_its_cpu_for_all() -> None:
    peaks, timed = zip(*run_ranks(find_on_a_rank, 2), strict=True)
    assert timed == (True, False)
    given = find_peak(CPU, compute="fp32", peak_tflops=2.5, control=Control(World(), CPU))
    assert given == PeakThroughput(flops_per_second=2.5e12, source="given by --peak-tflops")
    (peak,) = set(peaks)
    # True of any machine, and false for a wrong unit or count.
    assert 1e8 < peak.flops_per_second < 1e14
    assert "timed at start: fp32 matmul" in peak.source


PROFILED = ProfileConfig(
    profile=True, use_pytorch_profiler=True, profile_step_start=1, profile_step_end=3
)


@pytest.mark.slow("profiles a training")
def test_the_trace_has_the_iterations_asked_for_with_ranges_named_like_the_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that ends before keeps what it has, and what was there."""
    place = tmp_path / "rank0.steps1-3.pt.trace.json"
    for iterations in (2, 5):
        profiler = Profiler(PROFILED, Log(), folder=str(tmp_path))
        run_loop(f"--train-iters {iterations} --eval-iters 0", observers=[profiler])
        events = json.loads(place.read_text())["traceEvents"]
    earlier = place.with_name(f"{place.name}.earlier_1")
    assert sorted(tmp_path.iterdir()) == [place, earlier]
    assert 0 < len(json.loads(earlier.read_text())["traceEvents"]) < len(events)
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert names.count("paro/forward-backward") == names.count("paro/optimizer") == 2
    assert {"paro/update", "paro/forward-compute", "paro/backward-compute"} <= set(names)
    assert any(name.startswith("paro/reduce:") for name in names)
    assert f"profile written to {place}" in capsys.readouterr().out


def test_for_a_profiler_outside_the_range_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.profiler.start", lambda: marks.append("start"))
    monkeypatch.setattr("torch.cuda.profiler.stop", lambda: marks.append("stop"))
    ours, others = (
        replace(PROFILED, use_pytorch_profiler=False, profile_ranks=(rank,)) for rank in (0, 1)
    )
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
    Profiler(replace(PROFILED, use_pytorch_profiler=False), Log(), folder=None).begins(
        "training", 1
    )
    place = tmp_path / "snapshot.pickle"
    recording = replace(PROFILED, record_memory_history=True, memory_snapshot_path=str(place))
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
    recording = replace(PROFILED, record_memory_history=True, memory_snapshot_path=str(place))
    history = MemoryHistory(recording, Log(), torch.device("cuda"))
    history.begins("saving", 1)
    history.ends()
    elsewhere = tmp_path / "new" / "folder" / "snapshot.pickle"
    recording = replace(PROFILED, record_memory_history=True, memory_snapshot_path=str(elsewhere))
    MemoryHistory(recording, Log(), torch.device("cuda")).begins("saving", 1)
    assert elsewhere.exists()
    earlier = tmp_path / "snapshot.pickle.earlier_1"
    assert sorted(tmp_path.glob("snapshot*")) == [place, earlier]
    assert earlier.read_text() == "of an earlier start that ran out of memory"
    assert calls[:2] == [{"context": "alloc"}, {"enabled": None}], "no stack is taken at a free"


@pytest.mark.gpu
def test_a_gpus_allocations_are_written(tmp_path: Path) -> None:
    place = tmp_path / "snapshot.pickle"
    recording = replace(PROFILED, record_memory_history=True, memory_snapshot_path=str(place))
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


MIB = 2**20
FORECAST = MemoryForecast(
    predicted_bytes=5 * MIB, reserved_bytes=6 * MIB, states_bytes=3 * MIB, bytes_before=2 * MIB
)


def test_the_line_has_the_peak_and_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    rss = psutil.Process().memory_info().rss  # counted page by page, so not to the byte
    assert 0.9 * rss <= peak_memory_bytes(torch.device("cpu")) < 2**40
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


def test_what_a_host_has_left_is_what_its_tightest_limit_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: str, text: object) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n")

    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8000))
    assert available_host_bytes(tmp_path) == 8000
    write("proc/self/cgroup", "1:cpu:/other\n0::/job/step")
    write("sys/fs/cgroup/job/step/memory.max", "max")
    write("sys/fs/cgroup/job/step/memory.current", 10)
    assert available_host_bytes(tmp_path) == 8000
    write("sys/fs/cgroup/job/memory.max", 1000)
    write("sys/fs/cgroup/job/memory.current", 700)
    assert available_host_bytes(tmp_path) == 300
    write("sys/fs/cgroup/job/memory.stat", "anon 1\ninactive_file 40\nactive_file 5")
    assert available_host_bytes(tmp_path) == 345


@pytest.mark.gpu
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
