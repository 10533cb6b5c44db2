"""What a run expects of its steps is what its dry run says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paro.config.run import RunConfig
from paro.training.dry_run import plan_run
from paro.training.planned_time import planned_step
from tests.helpers.flags import configured

FLAGS = (
    "--llama-preset 7B --mock-data --seq-length 2048 --micro-batch-size 1 --global-batch-size 64 "
    "--lr 1e-4 --train-iters 10 --bf16 --dry-run --world-size 16"
)


def config_of(more: str) -> RunConfig:
    return configured(f"{FLAGS} {more}")


@pytest.mark.parametrize("flags", ["GGG", "IIG", "NNI", "IIG --context-parallel-size 16"])
def test_a_step_takes_what_the_dry_run_says(flags: str) -> None:
    config = config_of(f"--paro-machine dgx-h100 --paro-strategy {flags}")
    planned, launch = planned_step(config, "cuda"), plan_run(config).launch
    assert (planned.machine, planned.global_batch_size) == ("dgx-h100", 64)
    assert planned.seconds["step"] == launch.seconds
    parts = sum(seconds for name, seconds in planned.seconds.items() if name != "step")
    assert parts == pytest.approx(launch.seconds, rel=1e-6)
    assert (planned.seconds.get("context", 0.0) > 0.0) is ("context" in flags)


def test_nothing_is_expected_without_a_machine_or_a_step() -> None:
    assert planned_step(config_of("--paro-strategy IIG"), "cuda") is None
    config = config_of("--paro-machine dgx-h100 --paro-strategy IIG")
    without = replace(config, train=replace(config.train, skip_train=True))
    assert planned_step(without, "cuda") is None
