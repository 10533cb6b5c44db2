"""How many ranks share a sample, and what they send: as flags say, or where they say auto."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paro.checkpoint.directory import begin_checkpoint, finish_checkpoint
from paro.config.context_parallel import TYPES, ContextParallelConfig, faster_comm_type
from paro.config.record import recorded_arguments
from paro.config.run import RunConfig
from paro.distributed.world import World
from paro.machine.files import machine_to_json
from paro.planning.estimator import Estimate, Estimator
from paro.spec.context_layout import ContextLayout
from tests.helpers.flags import configured as configured_on
from tests.paro.planning.cases import DEVICE, machine

WORLD = World(size=8, ranks_per_node=4)
RUN = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 4096 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 100 --micro-batch-size 1 --global-batch-size 8 "
    "--train-iters 10 --lr 0.1 --bf16 "
)
SIZE, TYPE = "--context-parallel-size auto ", "--cp-comm-type auto "


def configured(words: str) -> RunConfig:
    return configured_on(RUN + words, WORLD)


@pytest.fixture
def on(tmp_path: Path) -> str:
    """The flag of a machine of 2 groups of 4."""
    path = tmp_path / "own.json"
    own = machine(world_size=8, group_size=4, inter=20, device=replace(DEVICE, memory_bytes=10**9))
    path.write_text(machine_to_json(own), encoding="utf-8")
    return f"--paro-machine {path} "


def estimated(config: RunConfig) -> Estimate:
    request = config.plan_request
    return Estimator(request).estimate(request.candidate(config.strategy))


@pytest.mark.parametrize("strategy", ["NNG", "GGG"])
def test_what_is_chosen_is_no_slower_than_anything_given(on: str, strategy: str) -> None:
    flags = f"{on}--paro-strategy {strategy} "
    config = configured(f"{flags}{SIZE}{TYPE}")
    chosen = estimated(config)
    assert chosen.fits
    others = [
        estimated(configured(f"{flags}--context-parallel-size {size} --cp-comm-type {name} "
                             f"--micro-batch-size {micro}"))
        for size in (1, 2, 4, 8) for name in ("p2p", "a2a", "allgather") for micro in (1, 2, 4, 8)
        if micro <= size and (name, size) != ("a2a", 8)
    ]  # fmt: skip
    assert chosen.seconds <= min(one.seconds for one in others if one.fits) * 1.001
    recorded = recorded_arguments(config)
    assert recorded["context_parallel_size"] == config.context.context_parallel_size
    assert recorded["cp_comm_type"] == [config.context.cp_comm_type]
    assert recorded["micro_batch_size"] == config.batches.micro_batch_size
    told = f"{SIZE.strip()}: {config.context.describe()}, micro-batches of "
    assert any(told in line for line in config.notices)


def test_ranks_share_samples_where_memory_asks_for_it(on: str) -> None:
    long = "--seq-length 65536 --max-position-embeddings 65536 "
    alone = configured(f"{on}{long}")
    assert not estimated(alone).fits
    shared = configured(f"{on}{long}{SIZE}")
    assert estimated(shared).fits
    assert shared.context.context_parallel_size > 1
    assert shared.context.cp_comm_type == "p2p"
    assert any("no ranks share a sample: does not fit" in line for line in shared.notices)


@pytest.mark.parametrize(
    ("words", "size", "way"),
    [
        ("", 8, "8 ranks share a sample by a2a+p2p over 4 x 2"),
        ("--num-attention-heads 2", 4, "4 ranks share a sample by a2a+p2p over 2 x 2"),
        ("--num-attention-heads 1", 8, "8 ranks share a sample by p2p"),
        ("--num-attention-heads 8 --attention-backend fused", 8, "8 ranks share a sample by a2a"),
    ],
)
def test_without_a_machine_heads_stay_inside_groups(words: str, size: int, way: str) -> None:
    config = configured(f"{TYPE}--context-parallel-size {size} {words}")
    assert config.context.describe() == way


def test_a_run_that_continues_keeps_what_it_had(tmp_path: Path, on: str) -> None:
    flags = f"{on}{SIZE}{TYPE}"
    anew = configured(flags)
    saved = {
        "world_size": 8, "context_parallel_size": 8, "cp_comm_type": ["a2a+p2p"],
        "hierarchical_context_parallel_sizes": [2, 4], "micro_batch_size": 4,
    }  # fmt: skip

    def save(**more: object) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        facts = {"state": {}, "arguments": saved | more}
        finish_checkpoint(begin_checkpoint(folder, 5), 5, facts)
        return f"--load {folder} "

    kept = configured(flags + save())
    assert kept.context.describe() == "8 ranks share a sample by a2a+p2p over 2 x 4"
    assert kept.batches.micro_batch_size == 4
    assert any("auto: as in --load" in line for line in kept.notices)
    asked = configured(f"{on}{save()}--context-parallel-size 2 --cp-comm-type a2a")
    assert asked.context.describe() == "2 ranks share a sample by a2a"
    for other in (save(world_size=4), save(context_parallel_size=3), f"{save()}--finetune "):
        assert configured(flags + other).context == anew.context


def test_another_type_is_named_where_it_is_clearly_faster(on: str) -> None:
    """Heads stay inside groups; all keys and values cross them at once in an all-gather."""
    words = f"{on}--seq-length 16384 --max-position-embeddings 16384 --context-parallel-size 8 "
    seconds = {}
    for name in TYPES:
        sizes = " --hierarchical-context-parallel-sizes 4 2" if name == "a2a+p2p" else ""
        if name != "a2a":  # 4 heads
            seconds[name + sizes] = estimated(configured(f"{words}--cp-comm-type {name}{sizes}"))
    best = min(seconds, key=lambda name: seconds[name].seconds)
    config = configured(f"{words}--cp-comm-type allgather")
    request = config.plan_request
    assert request is not None
    gain = seconds["allgather"].seconds / seconds[best].seconds - 1
    assert gain > 0.05
    told = faster_comm_type(config.context, request, config.strategy)
    assert told == f"--cp-comm-type {best} would be {gain:.0%} faster, as the planner predicts"
    split = {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (4, 2)}
    for flags in ({}, split):  # flags that are as fast as any
        near = ContextParallelConfig(context_parallel_size=8, **flags)
        near_by = replace(request, context=near.layout)
        assert faster_comm_type(near, near_by, config.strategy) is None


SIZES = "--hierarchical-context-parallel-sizes"


@pytest.mark.parametrize(
    ("words", "layout", "rings"),
    [
        ("--cp-comm-type p2p", ContextLayout(size=8), [4, 2]),
        ("--cp-comm-type p2p p2p --paro-context-ring flat", ContextLayout(size=8, inner=8), [8, 1]),
        (f"--cp-comm-type p2p {SIZES} 2 4", ContextLayout(size=8, inner=2), [2, 4]),
        (f"--cp-comm-type a2a+p2p {SIZES} 2 4", ContextLayout(size=8, heads=2), [2, 2]),
        ("--cp-comm-type all_gather", ContextLayout(size=8, gathers=True), [4, 2]),
        ("--cp-comm-type a2a --num-attention-heads 8", ContextLayout(size=8, heads=8), [1, 1]),
    ],
)
def test_kinds_are_layouts(words: str, layout: ContextLayout, rings: list[int]) -> None:
    found = configured(f"--context-parallel-size 8 {words}").context.layout
    assert found == layout
    topology = found.topology(world_size=8, group_size=4)
    assert [len(topology.members(span, 0)) for span in found.rings(topology)] == rings
