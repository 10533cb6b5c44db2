"""The output of a run, as called by the training loop."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paro.distributed.exposed_time import Exposed
from paro.report.config import ReportConfig
from paro.report.log import Log
from paro.report.memory import MemoryForecast
from paro.report.record import IterationRecord, Peak, PlannedStep, RunFacts, Validation
from paro.report.report import Report, open_report
from tests.helpers.commands import output_of

FACTS = RunFacts(
    world_size=2,
    seq_length=16,
    train_iters=20,
    flops_per_token=6e6,
    flops_per_token_causal=5e6,
    peak=Peak(flops_per_second=1e12, source="typed in"),
    model_state_bytes=2**20,
)


def make(
    config: ReportConfig, *, rank: int = 0, world_size: int = 1, start: int = 0, **more: Any
) -> Report:
    log, cpu = Log(rank=rank, world_size=world_size), torch.device("cpu")
    begin = {"device": cpu, "start_iteration": start, "arguments": {}}
    return open_report(config, FACTS, log, **begin, **more)


def record(iteration: int) -> IterationRecord:
    return IterationRecord(
        iteration=iteration,
        consumed_samples=8 * iteration,
        global_batch_size=8,
        lm_loss=float(iteration),
        grad_norm=1.0,
        learning_rate=0.1,
        loss_scale=1.0,
        iteration_time_ms=100.0,
        skipped=False,
        intra_bytes=10,
        inter_bytes=20,
    )


def run(report: Report, iterations: range) -> str:
    """What it prints."""

    def iterate() -> None:
        for iteration in iterations:
            report.iteration(record(iteration))
        report.close()

    return output_of(iterate)


def logged(path: Path) -> dict[int, float]:
    """The loss of each logged iteration."""
    lines = map(json.loads, path.read_text().splitlines())
    return {line["iteration"]: line["lm_loss"] for line in lines}


def test_multiples_of_the_interval_and_the_first_are_logged_and_none_twice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    config = ReportConfig(log_interval=5, metrics_file=str(path))
    assert run(make(config), range(1, 13)).count("| lm loss: ") == 3
    assert logged(path) == {1: 1.0, 5: 3.5, 10: 8.0}
    run(make(config, start=7), range(8, 16))
    assert [*logged(path)] == [1, 5, 8, 10, 15]


def test_the_first_rank_writes_and_the_last_prints(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    config = ReportConfig(log_interval=1, metrics_file=str(path), tensorboard_dir=str(tmp_path))
    told = run(make(config.without_records()), range(1, 2))
    assert " iteration        1/      20 |" in told
    assert not list(tmp_path.iterdir()), "a run without records writes"
    config = ReportConfig(log_interval=1, metrics_file=str(path))
    assert run(make(config, rank=0, world_size=2), range(1, 2)) == ""
    assert [*logged(path)] == [1]
    assert " iteration        1/      20 |" in run(make(config, rank=1, world_size=2), range(1, 2))
    assert [*logged(path)] == [1]


def test_a_speed_beyond_the_peak_is_doubted_once() -> None:
    for flops_per_second, warnings in ((1e6, 1), (1e18, 0)):
        report = make(ReportConfig(log_interval=1))
        report.facts = replace(
            FACTS, peak=Peak(flops_per_second=flops_per_second, source="typed in")
        )
        assert run(report, range(1, 4)).count("WARNING: MFU of ") == warnings


def test_an_evaluation_has_megatrons_tags_and_bits_where_they_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[Mapping[str, float]] = []
    report = make(ReportConfig())
    monkeypatch.setattr(report.dashboards, "write", lambda values, *_: written.append(values))
    report.validation(Validation(2, 16, 1.0, "all", 0.5))
    report.validation(Validation(2, 16, 1.0, "all", data_set="test"))
    report.validation(Validation(2, 16, None, "all", data_set="validation-empty"))
    ppl = pytest.approx(2.718281828)
    assert written == [
        {"lm loss validation": 1.0, "lm loss validation ppl": ppl, "bits per byte validation": 0.5},
        {"lm loss test": 1.0, "lm loss test ppl": ppl},
    ]


PLANNED = PlannedStep(
    machine="ours",
    global_batch_size=8,
    seconds={"step": 0.1, "computing": 0.06, "gather": 0.01, "reduce": 0.02, "publish": 0.01},
)


def compared(path: Path, planned: PlannedStep, last: int) -> str:
    """What a run prints of a plan, whose steps take 100 ms and wait 40 of them."""
    report = make(ReportConfig(log_interval=100, metrics_file=str(path)))
    report.facts = replace(FACTS, planned=planned)
    report.forecast = MemoryForecast(
        predicted_bytes=0, reserved_bytes=0, states_bytes=0, bytes_before=2**60
    )
    waits = Exposed(gather=0.01, reduce=0.02, publish=0.01)

    def iterate() -> None:
        for iteration in range(1, last + 1):
            # The first steps of a process take longer, and a ramp-up has smaller ones.
            milliseconds = 900.0 if iteration < 10 else 100.0
            slower = replace(record(iteration), iteration_time_ms=milliseconds)
            size = 4 if iteration == 12 else 8
            report.iteration(replace(slower, exposed=waits, global_batch_size=size))
        report.close()

    lines = output_of(iterate).splitlines()
    return "\n".join(line for line in lines if "iteration" not in line)


def test_measured_steps_are_set_beside_the_planners(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert compared(path, PLANNED, 19) == ""
    as_planned = compared(path, PLANNED, 25)
    assert "a step 0.1 (0.1): computing 0.06 (0.06), gathers 0.01 (0.01), gradient" in as_planned
    assert "than planned" not in as_planned
    assert as_planned.count("> memory is not as planned; --log-memory-interval 1 measures") == 1
    start = json.loads(Path(f"{path}.run.json").read_text())["starts"][-1]
    assert start["measured"]["seconds"] == pytest.approx(dict(PLANNED.seconds))
    slow = {**PLANNED.seconds, "step": 0.05, "reduce": 0.001, "computing": 0.029}
    lines = compared(path, replace(PLANNED, seconds=slow), 25).splitlines()
    assert [line.split()[1] for line in lines] == ["measured", "computing:", "gradient", "memory"]
    assert lines[2].startswith("> gradient reductions: 0.019 s more than planned; tools/bench_coll")
    shares = {**PLANNED.seconds, "context": 0.03}  # attention waits for other ranks
    lines = compared(path, replace(PLANNED, seconds=shares), 25).splitlines()
    assert "updated parameters 0.01 (0.01), attention's tokens 0 (0.03); memory" in lines[0]
    assert lines[1].startswith("> attention's tokens: 0.03 s less than planned; tools/bench_coll")
    assert compared(path, replace(PLANNED, global_batch_size=16), 25) == "", "no step is as planned"
