"""The recorded arguments are those in use, from any source; ranks compare them at the start."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from model.config import LLAMA_PRESETS
from paro.config import run
from paro.config.record import code_version, model_line, path_flags, recorded_arguments, settings_of
from paro.distributed.rendezvous import first_difference
from paro.distributed.world import World
from tests.helpers.refusals import says
from tests.paro.config.test_run import PRESET, SMALL, configure

WORLD = World(size=4, ranks_per_node=2)
# Flags that express a recorded value in another way: only one of both may be given.
OTHER_WAYS = (
    *("llama_preset", "lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters"),
    *("lr_warmup_fraction", "recompute_activations", "world_size", "ranks_per_node"),
)
LAUNCHES = [
    SMALL,
    f"{PRESET} --llama-preset llama3.2-1B --bf16",
    f"{PRESET} --llama-preset 7B --num-layers 2 --recompute-granularity full",
    f"{SMALL} --group-query-attention --num-query-groups 2 --recompute-activations",
    f"{SMALL} --paro-strategy zero1 --rampup-batch-size 8 8 48 --lr-warmup-fraction 0.1",
    f"{SMALL} --lr-decay-style WSD --lr-wsd-decay-iters 3 --lr-warmup-iters 2",
    f"{PRESET} --llama-preset 7B --paro-strategy auto --bf16 --paro-machine dgx-a100-roce100 "
    "--paro-group-size 2 --paro-inter-bits auto",
]


def given_again(recorded: dict[str, Any], **more: object) -> run.RunConfig:
    taken = {name: value for name, value in recorded.items() if name not in OTHER_WAYS}
    args = Namespace(**(dict.fromkeys(OTHER_WAYS) | taken | more))
    return run.configure(args, WORLD)


@pytest.mark.parametrize("words", LAUNCHES)
def test_what_is_recorded_and_given_again_is_the_same_run(words: str) -> None:
    config = configure(words, WORLD)
    recorded = recorded_arguments(config)
    constant = {"start_weight_decay": None, "end_weight_decay": None}  # from --weight-decay
    again = given_again(recorded, **constant)
    for concern in ("model", "batches", "strategy", "schedule", "train", "tokenizer"):
        assert getattr(again, concern) == getattr(config, concern), concern
    assert "auto" not in (recorded["paro_strategy"], recorded["paro_inter_bits"])
    assert again.precision == config.precision
    assert again.world.group_size == config.world.group_size
    left_out = dict.fromkeys(OTHER_WAYS)
    assert recorded_arguments(again) | left_out == recorded | left_out


def test_nothing_that_was_decided_is_left_open() -> None:
    recorded = recorded_arguments(configure(f"{PRESET} --llama-preset llama3-8B", WORLD))
    assert recorded["num_layers"] == LLAMA_PRESETS["llama3-8B"].num_layers
    assert recorded["num_query_groups"] == 8
    assert recorded["group_query_attention"] is True
    assert recorded["tie_embeddings_and_output_weights"] is False
    assert (recorded["paro_strategy"], recorded["paro_group_size"]) == ("IIG", 2)
    assert (recorded["global_batch_size"], recorded["lr_decay_samples"]) == (4, 40)
    assert (recorded["world_size"], recorded["ranks_per_node"]) == (4, 2)
    assert (recorded["vocab_size"], recorded["padded_vocab_size"]) == (128256, 128256)
    assert recorded["tokenizer_type"] == "NullTokenizer"
    assert recorded["llama_preset"] == "llama3-8B"
    assert recorded["lr"] == 0.1


def test_samples_and_a_checkpoints_sizes_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_layers": 3, "hidden_size": 32, "vocab_size": 128, "kv_channels": 8}
    heads = {"num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 64}
    common = {"model": sizes | heads | {"tie_embeddings_and_output_weights": True}}
    monkeypatch.setattr("paro.config.resolve.saved_common", lambda _checkpoint: common)
    words = SMALL.replace("--train-iters 10", "--train-samples 330")
    config = configure(f"{words} --load x --use-checkpoint-args --llama-preset 7B", WORLD)
    recorded = recorded_arguments(config)
    assert {name: recorded[name] for name in heads} == heads
    assert (recorded["num_layers"], recorded["padded_vocab_size"]) == (3, 128)
    assert recorded["llama_preset"] is None  # it had no effect
    assert (recorded["train_iters"], recorded["train_samples"]) == (10, 330)


def test_the_model_in_a_line() -> None:
    config = configure(f"{PRESET} --llama-preset llama3.2-1B", WORLD)
    assert model_line(config.model, config.data.seq_length, config.vocab_size) == (
        "> model: 1,235,814,400 parameters, 16 layers, hidden size 2048, FFN 8192, 32 heads of 64 "
        "in 8 query groups, sequences of 512, vocabulary of 128,256 padded to 128,256, output "
        "layer tied"
    )


# What ranks compare: every flag and value in use, but no path


def settings(flags: str = "", world: World = WORLD) -> dict[str, str]:
    return settings_of(configure(f"{SMALL} {flags}", world))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--lr 1e-3", "--lr must be the same ... 0.1 on rank 0, 0.001 on rank 1"),
        ("--micro-batch-size 1", "--micro-batch-size must be the same"),
        ("--bf16", "--bf16 must be the same ... False on rank 0, True on rank 1"),
        ("--save a", "--save must be the same ... not given on rank 0"),
        ("--paro-strategy NNG", "--paro-strategy must be the same"),
    ],
)
def test_a_flag_that_differs_is_named(flags: str, told: str) -> None:
    says(first_difference({0: settings(), 1: settings(flags)}), told)


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
    told = "--paro-group-size in use must be the same on all ranks, and is 8 on rank 0, 4 on rank 1"
    assert first_difference({0: eight, 1: four}) == told


def test_the_code_is_told_by_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_version()
    assert len(before) == 12
    monkeypatch.setattr("paro.config.record.data", __import__("tools"))
    assert code_version() != before
