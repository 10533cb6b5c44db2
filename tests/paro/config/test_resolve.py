"""Flags are resolved once and recorded as in use; ranks share samples as they say, or as chosen."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paro.arguments.parser import parse_args
from paro.checkpoint.config import saved_fields
from paro.checkpoint.directory import begin_checkpoint, finish_checkpoint
from paro.config import run
from paro.config.context_parallel import ContextParallelConfig, faster_comm_type
from paro.config.record import code_version, path_flags, recorded_arguments, settings_of
from paro.config.run import RunConfig
from paro.distributed.control import PlannedControl
from paro.distributed.rendezvous import first_difference
from paro.distributed.world import World
from paro.machine.files import machine_to_json
from paro.planning.estimator import Estimate, Estimator
from paro.planning.remedies import larger_contexts
from paro.spec.context_layout import COMM_TYPES, ContextLayout
from paro.training.assembly import build_training
from paro.training.in_memory import identifying_flags
from tests.helpers.refusals import says
from tests.helpers.training import configured as configured_on
from tests.paro.config.test_run import PRESET, SMALL, configure
from tests.paro.planning.cases import DEVICE, machine

WORLD = World(size=8, ranks_per_node=4)
MACHINE = machine(world_size=8, group_size=4, inter=20, device=DEVICE)
CHOSEN = "--paro-strategy auto --paro-inter-bits auto --bf16"


@pytest.mark.slow("searches all candidates of a model")
def test_ranks_that_met_before_it_was_measured_share_samples_as_is_then_chosen() -> None:
    long = "--seq-length 65536 --max-position-embeddings 65536 --distributed-backend gloo"
    own = replace(MACHINE, device=replace(DEVICE, memory_bytes=3 * 10**8))
    flags = f"{SMALL} {long} --paro-strategy auto --context-parallel-size auto"
    config = run.configure(parse_args(flags.split()), WORLD)
    control = PlannedControl(config.world, torch.device("meta"))
    chosen = config.on_measured(own)
    size = chosen.context.context_parallel_size
    assert size > 1 == config.context.context_parallel_size
    assert chosen.batches.data_parallel_size == 8 // size
    assert build_training(chosen, control).context_parallel_size == size


@pytest.mark.parametrize(
    "words", [CHOSEN, f"{SMALL} --use-checkpoint-args --llama-preset 7B --global-batch-size 32"]
)
def test_a_run_is_known_by_its_command_line(words: str, tmp_path: Path) -> None:
    args = f"{SMALL} {words} --non-persistent-ckpt-type local --save {tmp_path} --load {tmp_path}"
    first = run.configure(parse_args(args.split()), WORLD)
    used = first if first.open is None else first.on_measured(MACHINE)
    record = {"arguments": recorded_arguments(used), "model": saved_fields(used.model)}
    finish_checkpoint(begin_checkpoint(tmp_path, 5), 5, record | {"state": {}})
    again = run.configure(parse_args(args.split()), WORLD)
    assert again.arguments != first.arguments, "values of the checkpoint are filled in"
    assert identifying_flags(again.command_line) == identifying_flags(first.command_line)
    other = run.configure(parse_args(f"{args} --lr 0.5".split()), WORLD)
    assert identifying_flags(other.command_line) != identifying_flags(first.command_line)


# The recorded arguments are those in use, from any source; ranks compare them at the start

FOUR = World(size=4, ranks_per_node=2)
# Flags that express a recorded value in another way: only one of both may be given.
OTHER_WAYS = (
    *("llama_preset", "lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters"),
    *("lr_warmup_fraction", "recompute_activations", "world_size", "ranks_per_node"),
)
LAUNCHES = [
    SMALL,
    f"{PRESET} --llama-preset llama3.2-1B --bf16",
    f"{SMALL} --group-query-attention --num-query-groups 2 --recompute-activations",
    f"{SMALL} --paro-strategy zero1 --rampup-batch-size 8 8 48 --lr-warmup-fraction 0.1",
    f"{PRESET} --llama-preset 7B --paro-strategy auto --bf16 --paro-machine dgx-a100-roce100 "
    "--paro-group-size 2 --paro-inter-bits auto",
]


@pytest.mark.parametrize("words", LAUNCHES)
def test_what_is_recorded_and_given_again_is_the_same_run(words: str) -> None:
    config = configure(words, FOUR)
    recorded = recorded_arguments(config)
    constant = {"start_weight_decay": None, "end_weight_decay": None}  # from --weight-decay
    taken = {name: value for name, value in recorded.items() if name not in OTHER_WAYS}
    again = run.configure(Namespace(**(dict.fromkeys(OTHER_WAYS) | taken | constant)), FOUR)
    for concern in ("model", "batches", "strategy", "schedule", "train", "tokenizer"):
        assert getattr(again, concern) == getattr(config, concern), concern
    assert "auto" not in (recorded["paro_strategy"], recorded["paro_inter_bits"])
    assert again.precision == config.precision
    assert again.world.group_size == config.world.group_size
    left_out = dict.fromkeys(OTHER_WAYS)
    assert recorded_arguments(again) | left_out == recorded | left_out


def test_samples_and_a_checkpoints_sizes_are_recorded(tmp_path: Path) -> None:
    sizes = {"num_layers": 3, "hidden_size": 32, "vocab_size": 128, "kv_channels": 8}
    heads = {"num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 64}
    common = {"model": sizes | heads | {"tie_embeddings_and_output_weights": True}}
    finish_checkpoint(begin_checkpoint(tmp_path, 5), 5, common)
    words = SMALL.replace("--train-iters 10", "--train-samples 330")
    config = configure(f"{words} --load {tmp_path} --use-checkpoint-args --llama-preset 7B", FOUR)
    recorded = recorded_arguments(config)
    assert {name: recorded[name] for name in heads} == heads
    assert (recorded["num_layers"], recorded["padded_vocab_size"]) == (3, 128)
    assert recorded["llama_preset"] is None  # it had no effect
    assert (recorded["train_iters"], recorded["train_samples"]) == (10, 330)


# What ranks compare: every flag and value in use, but no path


def settings(flags: str = "", world: World = FOUR) -> dict[str, str]:
    return settings_of(configure(f"{SMALL} {flags}", world))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lr 1e-3", "--lr must be the same ... 0.1 on rank 0, 0.001 on rank 1"),
        ("--micro-batch-size 1", "--micro-batch-size must be the same"),
        ("--bf16", "--bf16 must be the same ... not given on rank 0, --bf16 on rank 1"),
        ("--save a", "--save must be the same ... not given on rank 0"),
        ("--no-rope-fusion", "--no-rope-fusion must be the same ... not given on rank 0"),
        ("--paro-strategy NNG", "--paro-strategy must be the same"),
    ],
)
def test_a_flag_that_differs_is_named(flags: str, message: str) -> None:
    says(first_difference({0: settings(), 1: settings(flags)}), message)


def test_paths_may_differ() -> None:
    ours, theirs = (settings(f"--save {folder} --metrics-file {folder}/m") for folder in "ab")
    assert ours == theirs
    known = {"data_path", "valid_data_path", "load", "save", "tensorboard_dir", "yaml_cfg"}
    assert known <= path_flags()
    assert not {"lr", "paro_strategy", "wandb_project", "vocab_size"} & path_flags()


def test_values_that_the_launcher_decides_are_compared() -> None:
    """Nodes of unequal sizes would group their ranks differently."""
    eight, four = (
        settings("--distributed-backend gloo", World(size=8, ranks_per_node=ranks))
        for ranks in (8, 4)
    )
    message = (
        "--paro-group-size in use must be the same on all ranks, and is 8 on rank 0, 4 on rank 1"
    )
    assert first_difference({0: eight, 1: four}) == message


def test_the_code_is_told_by_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_version()
    assert len(before) == 12
    monkeypatch.setattr("paro.config.record.data", __import__("tools"))
    assert code_version() != before


# How many ranks share a sample, and what they send

RUN = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 4096 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 100 --micro-batch-size 1 --global-batch-size 8 "
    "--train-iters 10 --lr 0.1 --bf16 "
)
SIZE, TYPE = "--context-parallel-size auto ", "--cp-comm-type auto "


def run_of(words: str) -> RunConfig:
    return configured_on(RUN + words, WORLD)


@pytest.fixture
def on(tmp_path: Path) -> str:
    """The flag of a machine of 2 groups of 4."""
    path = tmp_path / "own.json"
    own = machine(world_size=8, group_size=4, inter=20, device=replace(DEVICE, memory_bytes=10**9))
    path.write_text(machine_to_json(own), encoding="utf-8")
    return f"--paro-machine {path} "


def estimated(config: RunConfig) -> Estimate:
    estimator = config.estimator
    return estimator.estimate(estimator.request.candidate(config.strategy))


@pytest.mark.slow("searches all candidates of a model")
@pytest.mark.parametrize("strategy", ["NNG", "GGG"])
def test_what_is_chosen_is_no_slower_than_anything_given(on: str, strategy: str) -> None:
    flags = f"{on}--paro-strategy {strategy} "
    config = run_of(f"{flags}{SIZE}{TYPE}")
    chosen = estimated(config)
    assert chosen.fits
    others = [
        estimated(run_of(f"{flags}--context-parallel-size {size} --cp-comm-type {name} "
                             f"--micro-batch-size {micro}"))
        for size in (1, 2, 4, 8) for name in ("p2p", "a2a", "allgather") for micro in (1, 2, 4, 8)
        if micro <= size and (name, size) != ("a2a", 8)
    ]  # fmt: skip
    assert chosen.seconds <= min(one.seconds for one in others if one.fits) * 1.001
    recorded = recorded_arguments(config)
    assert recorded["context_parallel_size"] == config.context.context_parallel_size
    assert recorded["cp_comm_type"] == [config.context.cp_comm_type]
    assert recorded["micro_batch_size"] == config.batches.micro_batch_size
    message = f"{SIZE.strip()}: {config.context.describe()}, micro-batches of "
    assert any(message in line for line in config.notices)


def test_ranks_share_samples_where_memory_asks_for_it(on: str) -> None:
    long = "--seq-length 65536 --max-position-embeddings 65536 "
    alone = run_of(f"{on}{long}")
    assert not estimated(alone).fits
    shared = run_of(f"{on}{long}{SIZE}")
    assert estimated(shared).fits
    assert shared.context.context_parallel_size > 1
    assert shared.context.cp_comm_type == "p2p"
    assert any("no ranks share a sample: does not fit" in line for line in shared.notices)


def test_groups_that_train_alone_share_no_samples_where_memory_asks_for_it(on: str) -> None:
    flags = f"{on}{SIZE}--seq-length 262144 --max-position-embeddings 262144 --paro-strategy III"
    assert run_of(flags).context.context_parallel_size == 8
    alone = run_of(f"{flags} --paro-outer-steps 4")
    assert not estimated(alone).fits
    assert alone.context.context_parallel_size == alone.world.group_size == 4


def test_a_single_possibility_is_taken_without_a_machine() -> None:
    for words in ("--paro-strategy III --paro-materialize rotate", "--attention-backend unfused"):
        config = run_of(f"{SIZE}{words}")
        assert config.context == ContextParallelConfig()
        assert any("no ranks share a sample: nothing else" in line for line in config.notices)


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
    config = run_of(f"{TYPE}--context-parallel-size {size} {words}")
    assert config.context.describe() == way


@pytest.mark.slow("searches all candidates of a model")
def test_a_run_that_continues_keeps_what_it_had(tmp_path: Path, on: str) -> None:
    flags = f"{on}{SIZE}{TYPE}"
    anew = run_of(flags)
    saved = {
        "world_size": 8, "context_parallel_size": 8, "cp_comm_type": ["a2a+p2p"],
        "hierarchical_context_parallel_sizes": [2, 4], "micro_batch_size": 4,
    }  # fmt: skip

    def save(**more: object) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        facts = {"state": {}, "arguments": saved | more}
        finish_checkpoint(begin_checkpoint(folder, 5), 5, facts)
        return f"--load {folder} "

    kept = run_of(flags + save())
    assert kept.context.describe() == "8 ranks share a sample by a2a+p2p over 2 x 4"
    assert kept.batches.micro_batch_size == 4
    assert any("auto: as in --load" in line for line in kept.notices)
    asked = run_of(f"{on}{save()}--context-parallel-size 2 --cp-comm-type a2a")
    assert asked.context.describe() == "2 ranks share a sample by a2a"
    for other in (save(world_size=4), save(context_parallel_size=3), f"{save()}--finetune "):
        assert run_of(flags + other).context == anew.context


def test_another_type_is_named_where_it_is_clearly_faster(on: str) -> None:
    """Heads stay inside groups; all keys and values cross them at once in an all-gather."""
    words = f"{on}--seq-length 16384 --max-position-embeddings 16384 --context-parallel-size 8 "
    seconds = {}
    for name in COMM_TYPES:
        sizes = " --hierarchical-context-parallel-sizes 4 2" if name == "a2a+p2p" else ""
        if name != "a2a":  # 4 heads
            seconds[name + sizes] = estimated(run_of(f"{words}--cp-comm-type {name}{sizes}"))
    best = min(seconds, key=lambda name: seconds[name].seconds)
    config = run_of(f"{words}--cp-comm-type allgather")
    request = config.estimator.request
    gain = seconds["allgather"].seconds / seconds[best].seconds - 1
    assert gain > 0.05
    message = faster_comm_type(config.context, config.estimator, config.strategy)
    assert message == f"--cp-comm-type {best} would be {gain:.0%} faster, as the planner predicts"
    split = {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (4, 2)}
    for flags in ({}, split):  # flags that are as fast as any
        near = ContextParallelConfig(context_parallel_size=8, **flags)
        near_by = Estimator(replace(request, context=near.layout))
        assert faster_comm_type(near, near_by, config.strategy) is None


SIZES = "--hierarchical-context-parallel-sizes"


@pytest.mark.parametrize(
    ("words", "layout", "rings"),
    [
        ("--cp-comm-type p2p", ContextLayout(size=8), [4, 2]),
        ("--cp-comm-type p2p p2p --paro-context-ring flat", ContextLayout(size=8, inner=8), [8, 1]),
        (f"--cp-comm-type p2p {SIZES} 2 4", ContextLayout(size=8, inner=2), [2, 4]),
        (f"--cp-comm-type p2p {SIZES} 1 8", ContextLayout(size=8, inner=1), [8, 1]),
        (f"--cp-comm-type a2a+p2p {SIZES} 2 4", ContextLayout(size=8, heads=2), [2, 2]),
        (
            f"--cp-comm-type a2a+p2p {SIZES} 2 4 --paro-context-ring flat",
            ContextLayout(size=8, heads=2, inner=8),
            [4, 1],
        ),
        ("--cp-comm-type all_gather", ContextLayout(size=8, gathers=True), [8]),
        ("--cp-comm-type a2a --num-attention-heads 8", ContextLayout(size=8, heads=8), [1, 1]),
    ],
)
def test_kinds_are_layouts(words: str, layout: ContextLayout, rings: list[int]) -> None:
    found = run_of(f"--context-parallel-size 8 {words}").context.layout
    assert found == layout
    topology = found.topology(world_size=8, group_size=4)
    spans = found.kv_exchange(topology).spans.values()
    assert [len(topology.members(span, 0)) for span in spans] == rings
    given = f"--context-parallel-size 8 {found.type_flags} --num-attention-heads 8"
    assert run_of(given).context.layout == found


def test_a_larger_layout_is_that_of_its_flags() -> None:
    run = run_of("--context-parallel-size 2 --paro-context-ring flat").spec
    larger = dict(larger_contexts(run))
    assert [(layout.size, layout.heads) for layout in larger.values()] == [(4, 1), (4, 4), (8, 1)]
    assert all(run_of(flags).context.layout == layout for flags, layout in larger.items())
    assert larger["--context-parallel-size 8 --cp-comm-type p2p --paro-context-ring flat"].is_flat
