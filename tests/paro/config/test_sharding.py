"""`--paro-strategy auto` takes the planner's choice; elastic starts adapt to their nodes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from paro.arguments.parser import parse_args
from paro.checkpoint.directory import begin_checkpoint, finish_checkpoint
from paro.config.record import recorded_arguments
from paro.config.run import RunConfig, configure, take_early
from paro.config.sharding import ShardingConfig
from paro.distributed.world import World
from paro.errors import UserError
from paro.machine.files import machine_to_json
from tests.helpers.refusals import refused
from tests.helpers.training import configured as configured_on
from tests.paro.planning.cases import machine
from tools.planning.request import make_parser
from tools.planning.request import plan_request_of_args as plan_case

# Blocks as wide as LLaMA-7B's, so that links and memory decide as they do for a user.
RUN = (
    "--llama-preset 7B --num-layers 8 --mock-data --seq-length 512 --micro-batch-size 4 "
    "--global-batch-size 1280 --train-iters 10 --lr 1e-4 --bf16 --grad-reduce-in-bf16 "
)
WORLD = World(size=32, ranks_per_node=8)


def configured(flags: str, world: World = WORLD) -> RunConfig:
    return configured_on(RUN + flags, world)


@pytest.mark.slow("searches all candidates of a model")
@pytest.mark.parametrize("way", ["", "--paro-rotate-in-place "])
def test_auto_chooses_among_what_rotates_where_that_is_asked_for(way: str) -> None:
    rotate = f"--paro-materialize rotate {way}"
    config = configured(f"{rotate}--paro-strategy auto --paro-machine dgx-a100-roce100")
    assert 1 < config.strategy.params == config.strategy.grads <= 8
    message = [line for line in config.notices if line.startswith("planner:")]
    chosen, *_ = message[1].removeprefix("planner: chose ").split(" (")[0].split(", micro-batches")
    assert chosen == f"{config.strategy.name} rotated{' in place' * bool(way)}"


@pytest.mark.slow("searches all candidates of a model")
def test_auto_keeps_to_the_memory_of_a_dry_run() -> None:
    flags = "--paro-strategy auto --paro-machine dgx-a100-roce100"
    dry = "--dry-run --world-size 32"
    large = configured(f"{flags} {dry}")
    small = configured(f"{flags} {dry} --device-memory-gb 8.7")
    assert large.strategy.name == configured(flags).strategy.name
    assert large.strategy.name != small.strategy.name
    words = f"{flags} {dry} --device-memory-gb 2"
    refused(lambda: configured(words), "nothing fits the 2 GB of a device")
    evaluates = "--eval-global-batch-size 10240 --eval-micro-batch-size 320"
    config = configured(f"{flags} {dry} --device-memory-gb 12 {evaluates}")
    assert "in an evaluation" in config.memory.name
    assert config.memory.total <= 12e9


@pytest.mark.parametrize(
    "flags",
    [
        "--eval-micro-batch-size 8 --eval-iters 0",
        "--eval-micro-batch-size 64 --eval-global-batch-size 2048",
        "--ema-decay 0.9 --eval-ema",
        "--ema-decay 0.9 --eval-ema --eval-iters 0",
        "--paro-nccl-copy-engine",
        "--rampup-batch-size 128 128 5120",
        "--step-batch-size-schedule 0:2560,1M:128",
        "--context-parallel-size 2 --recompute-granularity full",
    ],
)
def test_the_planner_describes_the_run_that_its_candidate_becomes(flags: str) -> None:
    base = RUN.replace("--global-batch-size 1280", "") if "schedule" in flags else RUN
    config = configured_on(f"{base} --paro-machine dgx-a100-roce100 {flags}", WORLD)
    estimator = config.estimator
    candidate = estimator.request.candidate(config.strategy)
    assert estimator.run_spec(candidate) == config.spec


@pytest.mark.slow("searches all candidates of a model")
def test_auto_counts_the_averaged_weights_of_an_evaluation() -> None:
    flags = f"{RUN.replace(' 8 ', ' 1 ', 1)} --micro-batch-size 1 --paro-machine dgx-a100-roce100 "
    flags += "--ema-decay 0.9 --eval-ema --eval-micro-batch-size 64 --eval-global-batch-size 2048 "
    flags += "--paro-inter-param-bits 4 --dry-run --world-size 32 --paro-strategy"
    first = configured_on(f"{flags} auto")
    without, needed = first.memories.of(replace(first.spec, eval_ema=False)), first.memory
    assert without.total < needed.total
    limit = (without.total + needed.total) / 2e9
    chosen = configured_on(f"{flags} auto --device-memory-gb {limit}")
    assert chosen.strategy != first.strategy
    assert chosen.memory.total <= limit * 1e9


@pytest.mark.slow("searches all candidates of a model")
@pytest.mark.parametrize("strategy", ["IIG", "auto"])
def test_bits_are_chosen_for_any_strategy(strategy: str) -> None:
    machine = "--paro-machine dgx-a100-roce100 --num-layers 2"
    config = configured(f"{machine} --paro-strategy {strategy} --paro-inter-bits auto")
    bits = config.precision.inter_param_bits, config.precision.inter_grad_bits
    assert bits == (4, 4)
    assert any("gradients and updates in 4 bits between groups" in n for n in config.notices)
    recorded = recorded_arguments(config)
    assert (recorded["paro_inter_param_bits"], recorded["paro_inter_grad_bits"]) == bits
    never = configured(f"{machine} --paro-strategy IIG")
    assert not never.precision.quantizes


SAVED = {
    "world_size": 32,
    "paro_group_size": 8,
    "paro_strategy": "NIG",
    "paro_inter_param_bits": 4,
    "paro_inter_grad_bits": 8,
}


@pytest.mark.parametrize(
    ("saved", "flags", "strategy", "bits"),
    [
        ({}, "--paro-strategy auto", "NIG", (16, 16)),
        ({}, "--paro-strategy auto --paro-inter-bits auto", "NIG", (4, 8)),
        ({}, "--paro-strategy IIG --paro-inter-bits auto", "IIG", (4, 8)),
        ({}, "--paro-strategy auto --dry-run --world-size 32", "NIG", (16, 16)),
        # Chosen anew: None.
        ({}, "--paro-strategy auto --paro-machine measure", None, (16, 16)),
        ({}, "--paro-strategy auto --finetune", None, (16, 16)),
        ({"world_size": 64}, "--paro-strategy auto", None, (16, 16)),
    ],
)
def test_a_run_that_continues_keeps_what_was_chosen(
    saved: dict[str, object],
    flags: str,
    strategy: str | None,
    bits: tuple[int, int],
    tmp_path: Path,
) -> None:
    finish_checkpoint(begin_checkpoint(tmp_path, 5), 5, {"arguments": SAVED | saved})
    config = configured(f"{flags} --load {tmp_path} --no-load-optim")
    assert (config.open is not None) is (strategy is None)
    assert strategy in (None, config.strategy.name)
    assert (config.precision.inter_param_bits, config.precision.inter_grad_bits) == bits
    anew = f"--paro-machine {'NAME' if '--dry-run' in flags else 'measure'} chooses anew"
    assert any(anew in line for line in config.notices) is (strategy is not None)


@pytest.mark.parametrize(
    "flags",
    [
        "--paro-strategy auto --optimizer muon --paro-elastic",
        "--paro-inter-bits auto --paro-strategy IIG",
        "--paro-strategy auto --context-parallel-size auto --cp-comm-type auto",
        "--paro-machine measure --paro-strategy IIG",
    ],
)
def test_until_the_machine_is_measured_nothing_is_refused(flags: str) -> None:
    config = configured(flags)
    assert config.open is not None
    assert config.sharding.machine is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--paro-strategy auto --dry-run --world-size 32", "starts no ranks ... --paro-machine"),
        (
            "--paro-strategy auto --paro-collective auto --paro-group-size 32",
            "--paro-strategy auto and --paro-collective auto ... one group, of 32 ranks",
        ),
        ("--paro-machine measure --paro-group-size 32", "--paro-machine measure ... one group"),
        (
            "--paro-strategy auto --paro-machine dgx-a100-roce100 --paro-materialize rotate "
            "--num-attention-heads 31 --hidden-size 3968",
            "rotate over 8 ranks cannot cut --num-attention-heads 31",
        ),
        (
            "--use-distributed-optimizer --paro-strategy auto --paro-machine dgx-h100",
            "--use-distributed-optimizer and --paro-strategy auto ... NNG",
        ),
        ("--paro-machine dgx-b200", "--paro-machine dgx-b200: no such file; machines that come"),
        ("--paro-elastic --paro-strategy 2,2,x", "degrees are three positive numbers"),
    ],
)
def test_mistakes_are_told_in_one_line(flags: str, message: str) -> None:
    refused(lambda: configured(flags), message)


H100 = "--paro-machine dgx-h100 --micro-batch-size 1 --global-batch-size"


@pytest.mark.parametrize(
    ("flags", "ranks", "per_node", "message"),
    [
        (f"{H100} 12 --paro-group-size 4", 12, 4, "of 8, which do not divide the 12 ranks"),
        (f"{H100} 48 --paro-group-size 12", 48, 8, "of 8 ... 12: take a divisor or a multiple"),
        (f"{H100} 48", 48, 4, "dgx-h100 has groups of 8 ranks ... 4 ... give --paro-group-size 8"),
        (
            "--paro-group-size 4 --paro-materialize rotate --paro-strategy GGG --paro-survive 3",
            *(4, 1, "--paro-survive 3 ... rotate: leave that out"),
        ),
    ],
)
def test_what_a_world_does_not_allow_is_told(
    flags: str, ranks: int, per_node: int, message: str
) -> None:
    refused(lambda: configured(flags, World(size=ranks, ranks_per_node=per_node)), message)


def test_nodes_of_a_dry_run_are_the_groups_of_the_machine_as_in_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "nodes-of-4.json"
    path.write_text(machine_to_json(machine(group_size=4, inter=25)), encoding="utf-8")
    own = f"--paro-machine {path} --world-size 16"

    def dry_run(flags: str) -> tuple[World, ShardingConfig]:
        args = parse_args(f"{RUN} {own} --dry-run {flags}".split())
        world = take_early(args).world
        return world, configure(args, world).sharding

    world, sharding = dry_run("")
    assert world == World(size=16, ranks_per_node=4)
    plan = make_parser().parse_args(f"{own} --llama-preset 7B --seq-length 512".split())
    planned = plan_case(plan)
    assert (planned.machine, planned.group_size) == (sharding.machine, sharding.world.group_size)
    assert sharding.world.group_size == 4
    assert dry_run("--ranks-per-node 4")[1] == sharding
    assert dry_run("--ranks-per-node 8 --paro-group-size 8")[1].world.group_size == 8
    refused(lambda: dry_run("--ranks-per-node 8"), "groups of 4 ranks ... this launch has 8: take")
    refused(lambda: dry_run("--world-size 18"), "no multiple of the 4 ranks of a node")


@pytest.mark.slow("searches all candidates of a model")
def test_auto_chooses_among_what_survives() -> None:
    flags = "--paro-strategy auto --paro-machine dgx-a100-roce100"
    for survive in (0, 3):
        config = configured(f"{flags} --paro-survive {survive}")
        assert config.sharding.limits.survival(config.strategy).nodes >= survive
    refused(lambda: configured(f"{flags} --paro-survive 4"), "--paro-survive 4 ... on 4 nodes")


@pytest.mark.parametrize(
    ("group_size", "strategy", "survive", "nearest"),
    [
        (4, "IIG", 1, "4,4,4"),
        (2, "IIG", 3, "2,2,2"),
        (2, "NNG", 1, "1,1,4"),
        (2, "IIG --paro-materialize rotate", 1, "2,2,4"),
    ],
)
def test_the_nearest_degrees_that_survive_are_named(
    group_size: int, strategy: str, survive: int, nearest: str
) -> None:
    world = World(rank=0, size=8, local_rank=0, ranks_per_node=group_size)
    batch = "--global-batch-size 64"
    flags = f"{batch} --paro-survive {survive} --paro-strategy "
    names = f"--paro-survive {survive} ... {strategy[:3]} ... --paro-strategy {nearest}"
    message = refused(lambda: configured(flags + strategy, world), names)
    assert re.search(r" [\d.]+ [MG]B more of model states a rank$", message)
    configured(flags + strategy.replace(strategy[:3], nearest), world)


@pytest.mark.parametrize(
    ("ranks", "strategy", "survive", "degrees", "lines"),
    [
        (8, "2,2,4", 1, (2, 2, 4), ()),
        (6, "2,2,4", 1, (2, 2, 2), ("on 6 ranks of 3 nodes ", "2,2,4 is 2,2,2")),
        (2, "2,2,4", 1, (2, 2, 2), ("of 1 node --paro-survive 1 is 0", "2,2,4 is 2,2,2")),
        (6, "NII", 2, (1, 2, 2), ()),
        # Letters that do not survive there any more.
        (8, "III --paro-group-size 4", 1, (4, 4, 4), ()),
        (4, "III --paro-group-size 4", 1, (2, 2, 2), ("--paro-strategy III is 2,2,2",)),
        # Groups that do not divide the ranks.
        (6, "IIG --paro-group-size 4", 0, (2, 2, 6), ("--paro-group-size 4 is 2",)),
        # One group, on which no machine is measured.
        (
            2,
            "auto --paro-collective auto --paro-machine measure",
            0,
            (2, 2, 2),
            ("--paro-machine measure is None, --paro-collective auto is native",),
        ),
    ],
)
def test_an_elastic_run_adapts_to_the_nodes(
    ranks: int, strategy: str, survive: int, degrees: tuple[int, ...], lines: tuple[str, ...]
) -> None:
    world = World(rank=0, size=ranks, local_rank=0, ranks_per_node=2)
    flags = f"--global-batch-size 96 --paro-survive {survive} --paro-strategy {strategy}"
    config = configured(f"{flags} --paro-elastic", world)
    assert config.strategy.degrees == degrees
    said = [line for line in config.notices if line.startswith("--paro-elastic: ")]
    assert len(said) == bool(lines)
    assert all(part in said[0] for part in lines)
    assert config.in_memory_interval == 1
    recorded = recorded_arguments(config)
    assert recorded["paro_survive"] == config.sharding.survive == min(survive, ranks // 2 - 1)
    assert recorded["paro_collective"] == config.sharding.collective != "auto"
    if lines and not strategy.startswith("NII"):
        with pytest.raises(UserError):
            configured(flags, world)


# Every start that --paro-elastic accepts continues on fewer and more nodes, from the copies
