"""From measurements to throughput."""

import math
from dataclasses import asdict, replace

import pytest

from paro.distributed.exposed_time import Exposed
from paro.report.record import IterationRecord, Peak, RunFacts, summarize
from paro.report.tags import scalars_of

FACTS = RunFacts(
    world_size=2,
    seq_length=10,
    train_iters=9,
    flops_per_token=1000.0,
    flops_per_token_causal=900.0,
    peak=Peak(flops_per_second=1e6, source="typed in"),
    model_state_bytes=77,
)
FIRST = IterationRecord(
    iteration=1,
    consumed_samples=8,
    global_batch_size=8,
    lm_loss=4.0,
    grad_norm=2.0,
    learning_rate=0.1,
    loss_scale=1.0,
    iteration_time_ms=100.0,
    skipped=False,
    intra_bytes=5,
    inter_bytes=6,
    data_wait_ms=2.0,
    exposed=Exposed(gather=0.05, inter=0.01),
)
SECOND = IterationRecord(
    iteration=2,
    consumed_samples=24,
    global_batch_size=16,
    lm_loss=3.0,
    grad_norm=1.0,
    learning_rate=0.2,
    loss_scale=1.0,
    iteration_time_ms=300.0,
    skipped=False,
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
        "exposed_intra_ms": None,
        "exposed_inter_ms": 10.0,
        "skipped_iterations": 0,
        "nan_iterations": 0,
    }


def test_a_single_loss_keeps_every_bit() -> None:
    loss = 0.1 + 0.2
    metrics = summarize([replace(FIRST, lm_loss=loss)], FACTS, peak_memory_bytes=0)
    assert metrics.lm_loss == loss


def test_no_iteration_counted_no_loss() -> None:
    metrics = summarize([replace(FIRST, skipped=True)], FACTS, peak_memory_bytes=0)
    assert math.isnan(metrics.lm_loss)


def test_a_dashboard_shows_reserved_memory_where_there_is_any() -> None:
    for reserved in (None, 66):
        metrics = summarize([FIRST], FACTS, peak_memory_bytes=55, peak_reserved_bytes=reserved)
        found = scalars_of(FIRST, metrics, FACTS, totals={})
        assert found.get("memory/peak-reserved-bytes") == reserved
        assert found["memory/peak-measured-bytes"] == 55
