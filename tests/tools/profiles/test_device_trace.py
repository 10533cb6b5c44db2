"""Traces of GPUs: every figure of a small one, classes of kernels, the picture, damaged files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import measured
from tests.helpers.refusals import refused
from tests.tools.test_draw_profile import drawn_of, write_trace
from tools.draw_profile import main
from tools.profiles.device import DeviceProfile, Work, union
from tools.profiles.device_report import blocks
from tools.profiles.kernel_class import (
    ATTENTION,
    COPIES,
    ELEMENTWISE,
    MATRIX,
    NCCL,
    OPTIMIZER,
    OTHER,
    class_of,
    short_name,
)

GEMM = "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT"
FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4> >(Params)"
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
)
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
COPY = "Memcpy DtoD (Device -> Device)"
CASES = {
    GEMM: MATRIX,
    "void cutlass::device_kernel<enable_3x_kernel_for_sm9x<cutlass::gemm::G> >(P)": MATRIX,
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_execute": MATRIX,
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasLt::P)": MATRIX,
    "triton_tem_fused_mm_3": MATRIX,
    FLASH: ATTENTION,
    "void cutlass::device_kernel<flash::FlashAttnFwdSm90<X> >(P)": ATTENTION,
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x64": ATTENTION,
    ADD: ELEMENTWISE,
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": ELEMENTWISE,
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float>(float*)": ELEMENTWISE,
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<X>(X)": OPTIMIZER,
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<X>(X*)": COPIES,
    "void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda(X&)::L>": COPIES,
    GATHER: NCCL,
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)": NCCL,
    "void permute_kernel<float>(fbgemm_gpu::gemm*)": OTHER,
    "void fbgemm_gpu::permute_2D_lengths_kernel<int>(int)": OTHER,
}


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_is_classed_by_its_name(name: str) -> None:
    assert class_of(name) == CASES[name]


def test_names_are_shortened() -> None:
    assert short_name(ADD).startswith("vectorized_elementwise_kernel<4, CUDAFunctor_add<float>, ")
    assert short_name(ADD).endswith("3ul> >")
    assert short_name(GATHER) == "ncclDevKernel_AllGather_RING_LL"
    assert short_name(COPY) == COPY


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
    told, written = measured(main, trace)
    assert written["device"] == "cuda"
    (found,) = written["ranks"]
    assert (found["rank"], found["num_steps"], found["compute_stream"]) == (3, 2, 7)
    assert found["seconds_per_step"] == pytest.approx(0.05)
    assert found["busy_share"] == pytest.approx(0.78)  # idle: 2040-45, 2070-80, 2088-95
    assert found["nccl_seconds"] == pytest.approx(0.035)
    assert found["exposed_nccl_seconds"] == pytest.approx(0.015)
    assert found["idle_seconds"] == pytest.approx(0.037)
    gaps = [(round(g["start"], 6), g["before"], g["after"]) for g in found["gaps"]]
    assert gaps == [
        (0.03, FLASH, GEMM),
        (0.088, ADD, "the end of the steps"),
        (0.07, ADD, ADD),
    ]
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

    assert "rank 3: 50.000 ms a step (mean of 2); the GPU is busy for 78.0%" in told
    assert "stream 7 computes; it is idle for 18.500 ms a step (37.0%), in 3 gaps" in told
    assert "NCCL 17.500 ms a step, of these exposed: 7.500 ms" in told
    assert "idle 15.000 ms at 30.000 ms, after pytorch_flash::flash_fwd_kernel" in told
    assert "matrix products     34.3% of kernel time, 17.500 ms a step" in told


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


def test_without_steps_on_the_gpu_those_of_the_host_count(tmp_path: Path) -> None:
    _, written = measured(main, write_trace(tmp_path / "gpu.json", on_gpu(GEMM, 1050, 1100, 7)))
    (found,) = written["ranks"]
    assert found["seconds_per_step"] == pytest.approx(0.1)
    assert found["busy_share"] == pytest.approx(0.25)


def test_streams_are_drawn_below_each_other(tmp_path: Path) -> None:
    traces = [write_trace(tmp_path / f"{rank}.json", *gpu_events(), rank=rank) for rank in (1, 0)]
    picture = tmp_path / "streams.svg"
    main([*map(str, traces), "--plot", str(picture)])
    drawn = picture.read_text()
    lane = "20 (gather 0 intra)"
    rows = [f"rank {rank}: stream {use}" for rank in (0, 1) for use in ("7 (compute)", lane)]
    assert all(f"<!-- {row} -->" in drawn for row in [*rows, "rank 1: stream 24", MATRIX, NCCL])


def test_many_kernels_are_drawn_as_few_blocks() -> None:
    short = [Work("a", MATRIX, 7, 1e-6 * n, 1e-6 * n + 5e-7) for n in range(10000)]  # 10 ms
    after = [Work("b", COPIES, 7, 0.0125, 0.0135), Work("c", MATRIX, 7, 0.0131, 0.0133)]
    found = blocks([*short, *after], pixel=1.0)
    assert found == {
        (MATRIX, 2): [(0.0, 10.0)],  # half of the time
        (COPIES, 2): [(12.0, 1.0)],
        (COPIES, 3): [(13.0, 1.0)],
    }


def test_time_that_several_streams_use_counts_once() -> None:
    sent = [(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.6)]
    assert union(sent) == [(0.0, 3.0), (5.0, 6.0)]
    work = [Work("sent", NCCL, 1, *times) for times in sent]
    work += [Work("computed", MATRIX, 2, *times) for times in ((2.0, 5.5), (5.75, 9.0))]
    profile = DeviceProfile(0, 1, 9.0, 2, tuple(work), {})
    assert (profile.busy, profile.nccl, profile.exposed) == (9.0, 4.0, 2.25)


def test_a_damaged_trace_is_one_line(tmp_path: Path) -> None:
    whole = on_gpu(GEMM, 1010, 1020, 7)
    no_time = on_gpu("ProfilerStep#0", 0, 1e-320, 7, "gpu_user_annotation")
    bad = {
        "stream": ([whole | {"args": {}}], "args.stream: is missing"),
        "length": ([whole | {"dur": -1}], "dur: -1 is not allowed"),
        "name": ([whole | {"name": 5}], "name: 5 is of the wrong type"),
        "idle": ([on_gpu(GEMM, 10, 20, 7)], "the GPU did nothing in its steps"),
        "short": ([whole, no_time], "its steps have no length"),
    }
    for name, (events, message) in bad.items():
        path = write_trace(tmp_path / name, *events)
        refused(drawn_of(path), str(path), message)
    path.write_text(json.dumps({"traceEvents": [whole]}))
    refused(drawn_of(path), "no step of a training")
    on_cpu = write_trace(tmp_path / "cpu.json", rank=0)
    on_device = write_trace(tmp_path / "gpu.json", *gpu_events(), rank=1)
    refused(drawn_of(on_cpu, on_device), "traces of CPU and of GPU ranks")
