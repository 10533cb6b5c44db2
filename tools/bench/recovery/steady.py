"""What local copies cost while nothing fails: every second iteration has one, in one training."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import median

from tools.bench.recovery.cases import ITERATIONS, Case
from tools.bench.shared.turns import ROOT, rows_in
from tools.cluster.counters import reset_traffic, traffic
from tools.cluster.launch import run
from tools.cluster.lifecycle import cluster
from tools.cluster.state import Cluster

_WARM_UP = 4  # iterations


def measure(case: Case, folder: Path) -> dict[str, float]:
    """The time of a step with a copy by that of one without, and the same for the NICs' bytes.

    The time is the median of pairs of neighbors in a training that copies every second iteration;
    the bytes are those of a training with copies and one without.
    """
    with cluster(case.spec) as made:
        times, with_copies = _train(made, case, folder, "--non-persistent-save-interval 2")
        _, without = _train(made, case, folder, None)
    # The copy of iteration 2 is written while 3 computes.
    pairs = zip(times[_WARM_UP::2], times[_WARM_UP + 1 :: 2], strict=False)
    return {
        "step_ratio": median(copying / plain for copying, plain in pairs),
        "nic_bytes_ratio": with_copies / without,
    }


def _train(made: Cluster, case: Case, folder: Path, copies: str | None) -> tuple[list[float], int]:
    """The milliseconds of every iteration, and the bytes that all NICs sent."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    metrics = folder / "metrics.jsonl"
    own = "" if copies is None else f"{case.own_flags} {copies}"
    flags = [*case.flags(folder, own), "--metrics-file", str(metrics)]
    reset_traffic(made)
    if run(made, [str(ROOT / "pretrain_llama.py"), *flags]) != 0:
        raise RuntimeError(f"{case.name}: the training failed")
    times = [row["iteration_time_ms"] for row in rows_in(metrics) if "iteration_time_ms" in row]
    assert len(times) == ITERATIONS, f"{len(times)} iterations"
    return times, traffic(made).sent
