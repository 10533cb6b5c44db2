"""What follows the ranks that read different samples, where neighbouring ranks share them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paro.arguments.parser import parse_args
from paro.config.elastic import nodes_line
from paro.config.mistakes import better_values
from paro.config.run import RunConfig
from paro.distributed.control import PlannedControl
from paro.distributed.world import World
from paro.launch.dry_run import run_dry
from paro.report.record import RunFacts, summarize
from paro.training.assembly import build_training, run_facts
from tests.helpers.flags import configured
from tests.helpers.refusals import refused
from tests.helpers.training import TINY
from tests.paro.report.test_report import record

EIGHT = World(size=8, rank=5, ranks_per_node=4)
FLAGS = TINY.replace("--micro-batch-size 1", "--micro-batch-size 2") + " --train-iters 10"


def run_of(words: str = "", world: World = EIGHT) -> RunConfig:
    share = "--context-parallel-size 2 --cp-comm-type a2a"
    return configured(f"{FLAGS} {share} {words}", world)


def test_ranks_that_share_samples_are_one_data_parallel_rank() -> None:
    config = run_of()
    assert config.batches.data_parallel_size == 4
    control = PlannedControl(replace(config.world, rank=5), torch.device("meta"))
    training = build_training(config, control)
    assert training.num_sharing == 2
    topology = replace(EIGHT, group=2).topology(2)
    assert topology.members(topology.axes_between(1, 2), EIGHT.rank) == (4, 5)
    assert topology.members(topology.axes_between(2, 8), EIGHT.rank) == (1, 3, 5, 7)


def test_batches_count_data_parallel_ranks() -> None:
    assert run_of().batches.global_batch_size == 2 * 4
    batches = run_of("--global-batch-size 24").batches
    assert batches.num_micro_batches_at(0) == batches.num_eval_micro_batches == 3
    assert batches.samples_after(10) == 240
    refused(lambda: run_of("--global-batch-size 12"), "times 4 data-parallel ranks")
    dry = "--context-parallel-size 2 --global-batch-size 20 --dry-run --world-size 8"
    args = parse_args(f"{FLAGS} --micro-batch-size 3 {dry}".split())
    assert better_values(args) == {"micro_batch_size": 1}
    (line,) = nodes_line(run_of("--global-batch-size 40").batches, replace(EIGHT, size=12), 2)
    assert "restart on 1 and 2 of 3 nodes" in line


def test_speed_counts_samples_once_and_devices_all(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--global-batch-size 24 --peak-tflops 1 --dry-run --world-size 8"
    config = run_of(flags, replace(EIGHT, rank=0))
    training = build_training(config, PlannedControl(config.world, torch.device("meta")))
    facts: RunFacts = run_facts(config, training)
    size = config.batches.batch_size_at(0)
    step = replace(record(1), global_batch_size=size, iteration_time_ms=500.0)
    metrics = summarize([step], facts, peak_memory_bytes=0)
    assert metrics.tokens_per_second == 24 * 12 / 0.5
    assert metrics.mfu == pytest.approx(24 * 12 / 0.5 * facts.flops_per_token / 8 / 1e12)
    run_dry(config)
    assert ": 4 data-parallel ranks x 3 micro-batches x 2 samples\n" in capsys.readouterr().out
