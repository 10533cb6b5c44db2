"""Medians, paired ratios, agreement and tables, from hand-made runs."""

from __future__ import annotations

import math
from typing import Any

import pytest

from paro.report.record import PlannedStep
from tools.bench.peers.figures import (
    DisagreementError,
    TimedRun,
    check_agreement,
    compare,
    prediction_table,
    ratio_table,
    summarize,
    summary_table,
)


def timed_run(name: str, seconds: float = 1.0, **changed: Any) -> TimedRun:
    figures: dict[str, Any] = {
        "cpu_seconds": 4.0 * seconds,
        "state_bytes": 1_000_000,
        "peak_bytes": 3_000_000,
        "nic_bytes": 500_000,
        "losses": [5.0, 4.0],
        "grad_norms": [1.0, 2.0],
    }
    return TimedRun(contender=name, seconds=seconds, **{**figures, **changed})


def test_a_ratio_is_the_median_of_pairs_and_not_the_ratio_of_medians() -> None:
    rounds = {
        "slow": [timed_run("slow", 4.0), timed_run("slow", 10.0), timed_run("slow", 6.0)],
        "fast": [timed_run("fast", 2.0), timed_run("fast", 9.0), timed_run("fast", 2.0)],
    }
    slow, fast = compare(rounds, "slow")
    assert (slow["speed"], slow["slowest"], slow["fastest"]) == (1.0, 1.0, 1.0)
    assert fast["speed"] == 2.0  # median of 2, 10/9 and 3; the ratio of medians is 6 / 2
    assert (fast["slowest"], fast["fastest"]) == (10.0 / 9.0, 3.0)


def test_bytes_are_ratios_too_and_unknown_where_one_side_is() -> None:
    rounds = {
        "a": [timed_run("a", state_bytes=800, peak_bytes=None)],
        "b": [timed_run("b", state_bytes=200, nic_bytes=250_000)],
    }
    _, b = compare(rounds, "a")
    assert (b["state_bytes"], b["peak_bytes"], b["nic_bytes"]) == (0.25, None, 0.5)


def test_a_summary_has_medians_and_the_most_that_was_held() -> None:
    runs = [
        timed_run("a", 2.0, state_bytes=10),
        timed_run("a", 8.0, state_bytes=30, peak_bytes=None),
        timed_run("a", 4.0, state_bytes=20, peak_bytes=5_000_000),
    ]
    (row,) = summarize({"a": runs}, tokens_per_step=100, rank_flops=8e9)
    assert (row["seconds"], row["tokens_per_second"], row["cpu_seconds"]) == (4.0, 25.0, 16.0)
    assert (row["state_bytes"], row["peak_bytes"], row["nic_bytes"]) == (30, 4_000_000, 500_000)
    assert (row["flops_per_second"], row["context_seconds"]) == (2e9, None)


def test_who_differs_is_named() -> None:
    first = timed_run("ddp")
    check_agreement(first, timed_run("near", losses=[5.0, 4.0004]), tolerance=1e-4)
    with pytest.raises(DisagreementError, match=r"far differs from ddp: losses 4\.1 .* in step 2"):
        check_agreement(first, timed_run("far", losses=[5.0, 4.1]), tolerance=1e-2)
    with pytest.raises(DisagreementError, match="losses nan"):
        check_agreement(first, timed_run("lost", losses=[5.0, math.nan]), tolerance=1e-2)
    scaled = timed_run("scaled", grad_norms=[4.0, 8.0])  # which Adam does not feel
    with pytest.raises(DisagreementError, match=r"scaled differs from ddp: grad_norms 4 and 1"):
        check_agreement(first, scaled, tolerance=1e-2)


def test_tables() -> None:
    waited = {"gather": 0.25, "reduce": 0.4, "context": 0.1}
    rounds = {
        "ddp": [timed_run("ddp", 2.0)],
        "paro:IIG": [timed_run("paro:IIG", peak_bytes=None, waited_seconds=waited)],
    }
    summaries = summarize(rounds, tokens_per_step=128, rank_flops=3e9)
    table = summary_table(summaries).splitlines()
    assert [line[:-16] for line in table] == [
        "contender  s/step  tokens/s  states MB  peak MB  NIC MB/step  CPU s/step  waited s/step",
        "ddp         2.000      64.0       1.00     3.00         0.50        8.00              -",
        "paro:IIG    1.000     128.0       1.00        -         0.50        4.00           0.75",
    ]
    assert [line[-16:].strip() for line in table] == ["GFLOP/s a rank", "1.50", "3.00"]
    step = PlannedStep(machine="m", global_batch_size=1, seconds={"step": 1.25, "context": 0.25})
    assert prediction_table(summaries, {"paro:IIG": step}) == (
        "beside its prediction  s/step  predicted   error  tokens awaited  predicted\n"
        "paro:IIG                1.000      1.250  +25.0%           10.0%      20.0%"
    )
    unplanned = prediction_table(summaries, {}).splitlines()[1]
    assert unplanned.split() == ["paro:IIG", "1.000", "-", "-", "10.0%", "-"]
    assert ratio_table(compare(rounds, "ddp")) == (
        "against ddp  tokens/s     (rounds)  states   peak    NIC\n"
        "ddp              1.00  (1.00-1.00)   1.000  1.000  1.000\n"
        "paro:IIG         2.00  (2.00-2.00)   1.000      -  1.000"
    )
