"""Rules between flags and for their folders: one line that names a setting that works."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import pytest

from paro.checkpoint.directory import TRACKER, begin_checkpoint, finish_checkpoint
from paro.config.resolve import with_checkpoint_args
from tests.helpers.refusals import refused
from tests.paro.config.test_run import PRESET, SMALL, configure


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A folder with the checkpoints of a run."""
    root = tmp_path / "used"
    for iteration in (2, 4):
        finish_checkpoint(begin_checkpoint(root, iteration), iteration, {})
    return root


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "2 checkpoints, iterations 2 to 4 ... no --load ... --start-over"),
        ("--load {used}/../other", "/other is another folder: give --load {used} to continue"),
        ("--load {used}/../other --finetune", "give --load {used} without --finetune"),
        ("--load {used} --finetune", "--finetune begins at iteration 0: leave --finetune out"),
        ("--load {used}/ --start-over", "--load names the same folder"),
    ],
)
def test_checkpoints_of_another_run_are_not_mixed_up(used: Path, words: str, told: str) -> None:
    before = sorted(used.rglob("*"))
    flags = f"{SMALL} --save {used} {words.format(used=used)}"
    refused(lambda: configure(flags), told.format(used=used))
    assert sorted(used.rglob("*")) == before


@pytest.mark.parametrize(
    "words",
    [
        "--load {used}/../used",  # the same folder by another name
        "--load {used} --ckpt-step 2",
        "--start-over",
        "--load {used}/../other --finetune --start-over",
        "--skip-train",  # writes nothing
        "--dry-run --world-size 4",  # reports it at the end
    ],
)
def test_a_used_folder_may_be_continued_or_left_alone(used: Path, words: str) -> None:
    configure(f"{SMALL} --save {used} {words.format(used=used)}")


def test_a_tracker_alone_is_a_checkpoint_and_an_unfinished_save_is_none(tmp_path: Path) -> None:
    begin_checkpoint(tmp_path / "unfinished", 3)
    configure(f"{SMALL} --save {tmp_path / 'unfinished'}")
    (tmp_path / TRACKER).write_text("7")
    refused(lambda: configure(f"{SMALL} --save {tmp_path}"), f"holds a {TRACKER}")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--lr-wsd-decay-iters 2", "--lr-wsd-decay-iters has no effect without"),
        (
            "--lr-wsd-decay-samples 9 --lr-wsd-decay-style cosine --lr-decay-style cosine",
            "--lr-wsd-decay-style, --lr-wsd-decay-samples have no effect without "
            "--lr-decay-style WSD: --lr-decay-style is cosine",
        ),
        ("--lr-wsd-decay-iters 2 --lr-decay-style WSD", None),
        (
            "--save-interval 5 --async-save",
            "nothing will be saved: --save-interval, --async-save have no effect without --save",
        ),
        ("--muon-momentum 0.8 --muon-nesterov", "--muon-nesterov have no effect without --optim"),
        ("--muon-momentum 0.8 --optimizer muon --muon-extra-scale-factor 0.2", None),
        ("", None),
    ],
)
def test_flags_of_what_is_not_chosen_are_said(words: str, told: str | None) -> None:
    notices = configure(f"{SMALL} {words}").notices
    if told is None:
        assert notices == ()
    else:
        (notice,) = notices
        assert told in notice


@pytest.mark.parametrize(
    ("words", "says_it"),
    [
        (SMALL.replace("--untie-embeddings-and-output-weights ", ""), True),
        (SMALL, False),
        (SMALL.replace("--untie-", "--tie-"), False),
        (f"{PRESET} --llama-preset 7B", False),  # a preset with a separate output layer
    ],
)
def test_the_start_says_that_megatron_would_tie_the_output_layer(words: str, says_it: bool) -> None:
    notices = configure(words).notices
    assert any("an output layer of its own" in notice for notice in notices) is says_it


def test_the_longest_sequence_is_the_checkpoints_whatever_the_flag_says() -> None:
    model = {"vocab_size": 128, "num_attention_heads": 4, "num_query_groups": 2}
    common = {"model": model, "max_position_embeddings": 32}
    gpt2 = {"vocab_file": None, "merge_file": None}
    args = Namespace(
        seq_length=32, max_position_embeddings=64, tokenizer_type="NullTokenizer", **gpt2
    )
    assert with_checkpoint_args(args, common).max_position_embeddings == 32
    args.seq_length = 64
    told = "--seq-length 64 is above --max-position-embeddings 32, which --use-checkpoint-args"
    refused(lambda: with_checkpoint_args(args, common), told)


def saved_by_muon(root: Path, momentum: object) -> str:
    """The flags that load a checkpoint with this momentum among its arguments."""
    saved = {"optimizer": "muon", "muon_momentum": momentum, "lora_rank": None}
    common = {"model": asdict(configure(SMALL).model), "arguments": saved}
    finish_checkpoint(begin_checkpoint(root, 5), 5, common)
    return f"{SMALL} --load {root}"


@pytest.mark.parametrize(
    ("words", "optimizer", "momentum"),
    [
        ("", "muon", 0.95),
        ("--muon-momentum 0.8", "muon", 0.8),
        ("--no-load-optim", "adam", 0.9),
        ("--finetune", "adam", 0.9),
        ("--lora-rank 2", "adam", 0.9),
    ],
)
def test_muon_is_the_checkpoints_where_its_states_are_continued(
    words: str, optimizer: str, momentum: float, tmp_path: Path
) -> None:
    load = saved_by_muon(tmp_path, 0.95)
    found = configure(f"{load} --use-checkpoint-args {words}")
    assert (found.precision.optimizer, found.muon.muon_momentum) == (optimizer, momentum)
    assert found.arguments["optimizer"] == optimizer
    assert not [line for line in found.notices if "--muon-momentum" in line]
    assert configure(load).precision.optimizer == "adam"


def test_muon_s_settings_in_a_damaged_checkpoint_are_refused(tmp_path: Path) -> None:
    words = f"{saved_by_muon(tmp_path, 'much')} --use-checkpoint-args"
    refused(lambda: configure(words), f"--load {tmp_path}: arguments: muon_momentum: 'much'")
