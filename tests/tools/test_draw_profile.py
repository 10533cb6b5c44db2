"""Profiles: time of a profile's steps, traces of GPUs, pictures, and files that are not traces."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paro.distributed.comm_stream import stream_name
from paro.optim.offload import STREAMS
from paro.topology import StreamKind
from tests.helpers.refusals import measured, printed, refused
from tests.helpers.scripts import run_script
from tests.helpers.training import TINY
from tools.draw_profile import main, read_profile
from tools.planning.pictures import COLORS
from tools.profiles.kernel_class import (
    ATTENTION,
    COPIES,
    ELEMENTWISE,
    MATRIX,
    NCCL,
    OPTIMIZER,
    OTHER,
)


def event(name: str, start_ms: float, end_ms: float, *, tid: int = 1) -> dict[str, Any]:
    span = {"ts": 1e3 * start_ms, "dur": 1e3 * (end_ms - start_ms)}
    return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": tid, **span}


def write_trace(path: Path, *more: dict[str, Any], rank: int = 2) -> Path:
    """Two steps of 100 ms; the first computes for 40 ms and the second for 20 ms."""
    events = [
        event("ProfilerStep#0", 1000, 1100),
        event("paro/forward-compute", 1010, 1050),
        event("paro/wait:gather", 1020, 1030),
        event("paro/wait:publish", 1022, 1028),  # inside another
        event("paro/wait:reduce", 1090, 1100),
        event("paro/lane:gather 0 intra", 1012, 1030, tid=2),
        event("ProfilerStep#1", 1100, 1200),
        event("paro/backward-compute", 1100, 1125),
        event("paro/update", 1125, 1130),
        event("paro/wait:publish", 1110, 1120),
        event("paro/lane:reduce 1 inter", 1150, 1190, tid=3),
        event("paro/lane:gather 0 intra", 1190, 1260, tid=2),  # continues after the last step
        event("paro/forward-compute", 1210, 1250),
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
    ]
    trace = {"distributedInfo": {"rank": rank}, "traceEvents": [*events, *more]}
    path.write_text(json.dumps(trace))
    return path


def test_a_step_is_computing_waits_and_the_rest(tmp_path: Path) -> None:
    message, written = measured(main, write_trace(tmp_path / "rank2.json"))
    header, row = message.splitlines()[-2:]
    assert header.endswith("gather 0 intra  reduce 1 inter")
    assert row.split() == ["2", "100.0", "25.0", "5.0", "5.0", "5.0", "0.0", "60.0", "14.0", "20.0"]
    assert written["device"] == "cpu"
    (rank,) = written["ranks"]
    assert (rank["rank"], rank["num_steps"]) == (2, 2)
    assert rank["computing_seconds"] == pytest.approx(0.05)
    assert rank["lane_seconds"] == pytest.approx({"gather 0 intra": 0.028, "reduce 1 inter": 0.04})


def test_every_comm_stream_has_a_color() -> None:
    names = [stream_name(stream) for stream in (*((kind,) for kind in StreamKind), *STREAMS)]
    assert {name.partition(" ")[0] for name in names} <= COLORS.keys()


def test_what_is_no_profile_is_refused_in_one_line(tmp_path: Path) -> None:
    whole = write_trace(tmp_path / "whole.json")
    bad = {
        "missing": (None, "No such file"),
        "binary": (b"\x89PNG", "is not UTF-8 text; give what --use-pytorch-profiler wrote"),
        "without events": (b"{}", "traceEvents: is missing"),
        "rank": (b'{"traceEvents": [], "distributedInfo": {"rank": -1}}', "Info.rank: -1"),
        "idle": (b'{"traceEvents": []}', "no step of a training"),
        "backwards": (
            b'{"traceEvents": [{"ph": "X", "ts": 1, "dur": -1, "name": "ProfilerStep#1"}]}',
            "traceEvents: [0].dur: -1 is not allowed",
        ),
    }
    for name, (content, message) in bad.items():
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        refused(partial(printed, main, whole, path), str(path), message)
    refused(partial(printed, main, whole, whole), "of one rank")
    refused(partial(printed, main, whole, "--plot", tmp_path / "steps.txt"), "--plot")


@pytest.mark.ranks
def test_the_trainer_writes_what_is_read(tmp_path: Path) -> None:
    words = f"{TINY} --global-batch-size 4 --train-iters 4 --eval-iters 0 --paro-strategy GGG"
    profile = (
        "--profile --use-pytorch-profiler --profile-step-start 1 --profile-step-end 3 "
        f"--profile-ranks 0 1 --tensorboard-dir {tmp_path}"
    )
    command = ["pretrain_llama.py", *words.split(), *profile.split()]
    trained = run_script(command, 2)
    assert trained.returncode == 0, trained.stderr
    for rank in (0, 1):
        read = read_profile(tmp_path / f"rank{rank}.steps1-3.pt.trace.json")
        assert (read.rank, read.num_steps) == (rank, 2)
        assert read.computing() > 0.0
        parts = read.computing() + sum(map(read.waited, ("gather", "reduce", "publish")))
        assert 0.0 < parts < read.seconds
        assert list(read.lanes()) == ["gather 0 intra", "reduce 0 intra"]
        assert all(0.0 < busy < read.seconds for busy in read.lanes().values())


GEMM = "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT"
FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4> >(Params)"
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
)
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
COPY = "Memcpy DtoD (Device -> Device)"


def on_gpu(name: str, start: float, end: float, stream: int, cat: str = "kernel") -> dict[str, Any]:
    """Work of a GPU from `start` to `end`, in ms."""
    args = {} if cat == "gpu_user_annotation" else {"device": 0, "stream": stream}
    place = {"pid": 0, "tid": stream, "args": {"External id": 1, **args}}
    times = {"ts": 1e3 * start, "dur": 1e3 * (end - start)}
    return {"ph": "X", "cat": cat, "name": name, **times, **place}


def gpu_events() -> list[dict[str, Any]]:
    """Two steps of 50 ms from 2000 ms on; the host's began at 1000 ms."""
    mark = "gpu_user_annotation"
    return [
        on_gpu("ProfilerStep#0", 2000, 2050, 7, mark),
        on_gpu("ProfilerStep#1", 2050, 2100, 7, mark),
        on_gpu("ProfilerStep#1", 2040, 2300, 20, mark),  # of another stream
        on_gpu("paro/update", 2080, 2090, 7, mark),
        on_gpu("paro/lane:gather 0 intra", 2010, 2120, 20, mark),
        on_gpu(GEMM, 1980, 1990, 7),  # before the steps
        on_gpu(GEMM, 1995, 2020, 7),  # 20 ms in the steps
        on_gpu(FLASH, 2020, 2030, 7),
        on_gpu(GATHER, 2010, 2040, 20),  # 10 ms exposed, of these 4 beside a copy
        on_gpu(COPY, 2033, 2037, 24, "gpu_memcpy"),
        on_gpu(GEMM, 2045, 2060, 7),
        on_gpu(ADD, 2060, 2070, 7),
        on_gpu(ADD, 2080, 2088, 7),  # in the update
        on_gpu(GATHER, 2095, 2120, 20),  # 5 ms in the steps, exposed
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 3, "ts": 1.0, "pid": 1, "tid": 1},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 2000000, "dur": 9},
    ]


def test_every_figure_of_a_gpu(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "gpu.json", *gpu_events(), rank=3)
    message, written = measured(main, trace)
    assert written["device"] == "cuda"
    (found,) = written["ranks"]
    assert (found["rank"], found["num_steps"], found["compute_stream"]) == (3, 2, 7)
    assert found["seconds_per_step"] == pytest.approx(0.05)
    assert found["busy_share"] == pytest.approx(0.78)  # idle: 2040-45, 2070-80, 2088-95
    assert found["nccl_seconds"] == pytest.approx(0.035)
    assert found["exposed_nccl_seconds"] == pytest.approx(0.015)
    assert found["idle_seconds"] == pytest.approx(0.037)
    gaps = [(round(g["start"], 6), g["before"], g["after"]) for g in found["gaps"]]
    assert gaps == [(0.03, FLASH, GEMM), (0.088, ADD, "the end of the steps"), (0.07, ADD, ADD)]
    assert [gap["seconds"] for gap in found["gaps"]] == pytest.approx([0.015, 0.012, 0.01])
    assert found["num_gaps"] == 3
    assert found["class_seconds"] == pytest.approx(
        {MATRIX: 0.035, ATTENTION: 0.01, ELEMENTWISE: 0.01, OPTIMIZER: 0.008,
         COPIES: 0.004, NCCL: 0.035, OTHER: 0.0}
    )  # fmt: skip
    kernels = [(k["name"], k["class"], k["runs"]) for k in found["kernels"]]
    assert set(kernels[:2]) == {(GEMM, MATRIX, 2), (GATHER, NCCL, 2)}
    assert set(kernels[2:4]) == {(FLASH, ATTENTION, 1), (ADD, ELEMENTWISE, 1)}
    assert kernels[4:] == [(ADD, OPTIMIZER, 1), (COPY, COPIES, 1)]
    assert "rank 3: 50.000 ms a step (mean of 2); the GPU is busy for 78.0%" in message
    assert "idle 15.000 ms at 30.000 ms, after pytorch_flash::flash_fwd_kernel" in message


def test_the_update_of_the_last_step_counts(tmp_path: Path) -> None:
    """A kernel extends only the innermost range that launched it, so no step's mark has one."""
    mark, events = "gpu_user_annotation", []
    for number, begin in enumerate((2000, 2100)):
        events += [
            on_gpu(f"ProfilerStep#{number}", begin + 10, begin + 80, 7, mark),
            on_gpu("paro/forward-compute", begin, begin + 40, 7, mark),
            on_gpu("paro/update", begin + 90, begin + 100, 7, mark),
            on_gpu(GEMM, begin, begin + 80, 7),
            on_gpu("_adamw", begin + 90, begin + 100, 7),
        ]
    _, written = measured(main, write_trace(tmp_path / "gpu.json", *events))
    (found,) = written["ranks"]
    assert found["seconds_per_step"] == pytest.approx(0.1)
    assert found["class_seconds"][OPTIMIZER] == pytest.approx(0.02)
    assert {kernel["name"]: kernel["runs"] for kernel in found["kernels"]} == {GEMM: 2, "_adamw": 2}


def test_a_damaged_trace_is_one_line(tmp_path: Path) -> None:
    whole = on_gpu(GEMM, 1010, 1020, 7)
    no_time = on_gpu("ProfilerStep#0", 0, 1e-320, 7, "gpu_user_annotation")
    bad = {
        "stream": ([whole | {"args": {}}], "args.stream: is missing"),
        "idle": ([on_gpu(GEMM, 10, 20, 7)], "the GPU did nothing in its steps"),
        "short": ([whole, no_time], "its steps have no length"),
    }
    for name, (events, message) in bad.items():
        path = write_trace(tmp_path / name, *events)
        refused(partial(printed, main, path), str(path), message)
    path.write_text(json.dumps({"traceEvents": [whole]}))
    refused(partial(printed, main, path), "no step of a training")
    on_cpu = write_trace(tmp_path / "cpu.json", rank=0)
    on_device = write_trace(tmp_path / "gpu.json", *gpu_events(), rank=1)
    refused(partial(printed, main, on_cpu, on_device), "traces of CPU and of GPU ranks")
