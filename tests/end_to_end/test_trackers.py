"""Dashboards as read by their own libraries, and the cost of a tracker that fails."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.end_to_end.test_training import RUN, Ended, launch, read_metrics, run_main
from tests.helpers.processes import children, wait_for
from tests.helpers.ranks import run_ranks
from tests.helpers.refusals import refused, says
from tests.helpers.scripts import Script
from tests.helpers.warm_process import HANGS_AFTER

# Tags of a run with evaluation, --log-params-norm, --log-num-zeros-in-grad and timers.
MEGATRON = {
    *("learning-rate", "batch-size", "lm loss", "loss-scale", "world-size", "grad-norm"),
    *("iteration-time", "throughput", "mem-max-allocated-bytes", "num-zeros", "params-norm"),
    *("lm loss validation", "lm loss validation ppl"),
    *("interval-time-time", "forward-backward-time", "optimizer-time"),
}
OURS = {
    *("throughput/tokens-per-second", "throughput/tokens-per-second-per-device"),
    *("throughput/tflops-per-device", "throughput/mfu-attention-in-full"),
    "throughput/mfu-causal-attention-halved",
    *("memory/peak-measured-bytes", "memory/model-states-bytes"),
    *(f"memory/measured-{kind}-bytes" for kind in ("parameters", "gradients", "optimizer")),
    *(f"memory/measured-whole-{kind}-bytes" for kind in ("parameters", "gradients")),
    *(
        f"memory/predicted-{kind}-bytes"
        for kind in ("model-states", "whole-parameters", "whole-gradients", "activations")
    ),
    *("memory/predicted-transient-bytes", "memory/predicted-total-bytes"),
    *("communication/intra-bytes", "communication/inter-bytes"),
    *(f"communication/exposed-{kind}-ms" for kind in ("gather", "reduce", "publish", "context")),
    *("communication/exposed-intra-ms", "communication/exposed-inter-ms"),
    *("data/wait-ms", "steps/skipped-iterations", "steps/nan-iterations"),
}


def read_tensorboard(folder: Path) -> dict[str, dict[int, float]]:
    """Values by step of every tag."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulators.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }


def service_of(process: int) -> int:
    """wandb's own process."""
    found = [process]
    for child in found:
        if Path(f"/proc/{child}/comm").read_text().strip().startswith("wandb-core"):
            return child
        found += children(child)
    raise AssertionError("wandb has no process of its own")


def test_a_run_that_goes_wrong_shows_it(tmp_path: Path) -> None:
    words = f"--mock-data --tensorboard-dir {tmp_path} --train-iters 9 --lr 1e30"
    check = "--check-for-nan-in-loss-and-grad"
    told = refused(lambda: launch(words, check), "has a loss or gradient", status=1)
    stopped = int(told.partition("iteration ")[2].split()[0])
    assert set(read_tensorboard(tmp_path)["iteration-time"]) == set(range(1, stopped + 1))


@pytest.mark.ranks
def test_killed_and_unwritable_trackers_cost_one_line_each(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    command = [*RUN, "--tensorboard-dir", tmp_path / "board", "--wandb-project", "p"]
    command += ["--wandb-save-dir", tmp_path, "--metrics-file", tmp_path / "metrics.jsonl"]
    command += ["--train-iters", 100000, "--tensorboard-queue-size", 1, "--exit-signal-handler"]
    script = Script(command, folder=tmp_path, env={"WANDB_MODE": "offline"})

    def printed(pattern: str) -> list[str]:
        return re.findall(pattern, script.output()[0], re.M)

    try:
        wait_for(lambda: printed(r" iteration +3/"))
        os.kill(service_of(script.pid), signal.SIGKILL)
        (tmp_path / "board").rename(tmp_path / "gone")
        (tmp_path / "board").write_text("no folder any more")
        wait_for(lambda: len(printed("is left out from here on")) == 2)
        last = len(printed(r" iteration +\d+/"))
        wait_for(lambda: len(printed(r" iteration +\d+/")) > last)
        os.kill(script.pid, signal.SIGTERM)
        stopped = time.monotonic()
        assert script.wait(HANGS_AFTER) == 0, script.output()[1]
        assert time.monotonic() - stopped < 30
    finally:
        script.end()
    lost = printed(r"^(.*) is left out from here on")
    assert sorted(lost) == ["TensorBoard", "Weights & Biases"]
    iterations = [line["iteration"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert iterations == list(range(1, len(iterations) + 1))
    assert len(iterations) >= last


def test_what_cannot_be_written_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    train, place = "--mock-data --train-iters 2", tmp_path / "file" / "below"
    for flag in ("--tensorboard-dir", "--wandb-save-dir"):
        words, told = f"{flag} {place}", f"{flag} {place} ... {tmp_path}/file is a file"
        refused(lambda words=words: launch(train, words), told)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    for flags, package in (
        ("--tensorboard-dir x", "tensorboard"),
        ("--wandb-project x", "wandb"),
        ("--terminal live", "rich"),
    ):
        told = f"{flags.removesuffix(' x')} ... pip install {package}"
        refused(lambda flags=flags: launch(train, flags), told)


@pytest.mark.ranks
def test_all_ranks_stop_where_the_one_that_writes_has_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    words = [*map(str, RUN), "--train-iters", "3", "--wandb-project", "p"]
    ended: list[Ended] = run_ranks(run_main, 2, words, init=False)
    for rank in ended:
        told = "--wandb-project p: there is no API key ... rank 1 ... wandb login"
        says(rank.mistake or "", told, "WANDB_MODE=offline")
        assert rank.printed == ""
