"""From measurements to throughput, and the source of a device's peak FLOP/s."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from paro.distributed.control import Control
from paro.distributed.exposed_time import Exposed
from paro.distributed.world import World
from paro.report.flops import _timed_peak, find_peak, listed_peak
from paro.report.record import GroupsRecord, Peak, scalars_of, summarize
from tests.helpers.ranks import run_ranks
from tests.paro.report import test_report
from tests.paro.report.test_report import record

# Two ranks and sequences of 10; the first iteration has a batch of 8 and takes 100 ms.
FACTS = replace(
    test_report.FACTS,
    seq_length=10,
    flops_per_token=1000.0,
    flops_per_token_causal=900.0,
    peak=Peak(flops_per_second=1e6, source="typed in"),
    model_state_bytes=77,
)
EXPOSED = Exposed(gather=0.05, inter=0.01)
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
    assert metrics == {
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
        "exposed_reduce_ms": 0.0,
        "exposed_publish_ms": 0.0,
        "exposed_context_ms": 0.0,
        "exposed_intra_ms": None,
        "exposed_inter_ms": 10.0,
        "skipped_iterations": 0,
        "nan_iterations": 0,
        "z_loss": None,
        "decoupled_learning_rate": None,
        "group_lm_losses": None,
        "outer_grad_norm": None,
        "outer_grad_cosine": None,
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
    nan = math.nan
    apart = GroupsRecord(
        lm_losses=(3.0, nan), outer_grad_norm=0.5, outer_grad_cosine=0.8, num_left_out=1
    )
    interval = [
        replace(FIRST, groups=apart),
        replace(FIRST, groups=GroupsRecord(lm_losses=(4.0, nan))),
    ]
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


@pytest.mark.parametrize(
    ("name", "compute", "tflops"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA H800 PCIe", "fp16", 756.5),
        ("NVIDIA A100-SXM4-40GB", "fp32", 19.5),
        ("NVIDIA L40S", "bf16", 362.0),
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("NVIDIA A10G", "bf16", None),  # nothing is guessed
        ("NVIDIA GeForce RTX 4090", "bf16", None),
    ],
)
def test_a_known_device_has_its_data_sheets_peak(
    name: str, compute: str, tflops: float | None
) -> None:
    peak = listed_peak(name, compute)
    assert (peak is None) == (tflops is None)
    assert peak is None or (peak.flops_per_second, name in peak.source) == (tflops * 1e12, True)


CPU = torch.device("cpu")


def find_on_a_rank() -> tuple[Peak, bool]:
    """The peak that a rank uses, and whether it timed it itself."""
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
    assert given == Peak(flops_per_second=2.5e12, source="given by --peak-tflops")
    (peak,) = set(peaks)
    # True of any machine, and false for a wrong unit or count.
    assert 1e8 < peak.flops_per_second < 1e14
    assert "timed at start: fp32 matmul" in peak.source
