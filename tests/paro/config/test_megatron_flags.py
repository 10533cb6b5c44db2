"""Megatron flags for batches, vocabulary rows, tokenizer, recomputation and logging level."""

from __future__ import annotations

import logging

import pytest

from model.config import LLAMA_PRESETS, RecomputeConfig
from paro.arguments.parser import parse_args
from paro.config.plan import RankDevice, case_of
from paro.config.run import RunConfig
from paro.distributed.world import World
from paro.errors import UserError
from paro.report.log import set_logging_level
from paro.training.assembly import count_samples

WORLD = World(size=4, ranks_per_node=2)
SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data "
    "--micro-batch-size 2 --lr 0.1"
)
NULL = "--tokenizer-type NullTokenizer --vocab-size 100"
ITERS = f"{SMALL} {NULL} --train-iters 10"


def configure(words: str) -> RunConfig:
    return RunConfig.from_args(parse_args(words.split()), WORLD)


def refusal(words: str) -> str:
    with pytest.raises(UserError, match="--") as error:
        configure(words)
    assert "\n" not in str(error.value)
    return str(error.value)


# Batches


def test_lengths_in_iterations_follow_the_schedule() -> None:
    # 8 samples for the first 20, then 16: 8 8 8 | 16 16 ...
    config = configure(f"{ITERS} --step-batch-size-schedule 0:8,640:16 --lr-warmup-iters 4")
    assert config.schedule.lr_decay_samples == 3 * 8 + 7 * 16
    assert config.schedule.lr_warmup_samples == 3 * 8 + 16
    assert count_samples(config).train == 3 * 8 + 7 * 16
    samples = f"{SMALL} {NULL} --train-samples 100 --step-batch-size-schedule 0:8,640:16"
    assert configure(samples).train.train_iters == 3 + 4


def test_the_planner_plans_for_the_last_size() -> None:
    words = "--step-batch-size-schedule 0:8,640:16 --paro-machine dgx-a100-roce100 "
    words += "--paro-group-size 2"
    config = configure(f"{ITERS} {words}")
    case = case_of(
        config.model,
        config.batches,
        config.sharding,
        config.precision,
        config.trainable,
        seq_length=32,
        device=RankDevice("cuda"),
    )
    assert case.global_batch_size == 16


def test_evaluations_draw_as_many_samples_as_they_take() -> None:
    plan = f"{ITERS} --global-batch-size 16 --eval-interval 5 --eval-iters 3"
    counts = count_samples(configure(plan))
    assert (counts.train, counts.valid, counts.test) == (160, 3 * 3 * 16, 3 * 16)
    counts = count_samples(configure(f"{plan} --eval-global-batch-size 24"))
    assert (counts.train, counts.valid, counts.test) == (160, 3 * 3 * 24, 3 * 24)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            "--step-batch-size-schedule 0:8 --global-batch-size 8",
            ["--global-batch-size contradict"],
        ),
        ("--step-batch-size-schedule 0:8 --rampup-batch-size 8 8 64", ["--rampup-batch-size"]),
        (
            "--step-batch-size-schedule 0:12",
            ["the size 12 is no multiple", "4 data-parallel ranks"],
        ),
        ("--step-batch-size-schedule 0:8 --seq-length 0", ["--seq-length 0 must be at least 1"]),
        ("--step-batch-size-schedule 0", ["is not TOKENS:SIZE"]),
        ("--eval-global-batch-size 12", ["--eval-global-batch-size 12 is not divisible"]),
        ("--eval-micro-batch-size 0", ["--eval-micro-batch-size 0 must be at least 1"]),
        ("--padded-vocab-size 99", ["--padded-vocab-size 99 is less than the 100 entries"]),
        ("--tokenizer-type GPT2BPETokenizer", ["GPT2BPETokenizer needs --vocab-file"]),
        ("--tokenizer-type BertWordPieceCase", ["BertWordPieceCase is not supported"]),
        ("--tokenizer-type WordTokenizer", ["WordTokenizer is unknown: choose one of"]),
        ("--logging-level -1", ["--logging-level -1"]),
        ("--recompute-modules core_attn", ["--recompute-modules needs --recompute-granularity"]),
        (
            "--recompute-granularity full --recompute-modules core_attn",
            ["--recompute-modules needs --recompute-granularity selective"],
        ),
        ("--recompute-activations --recompute-modules mlp", ["mlp is not supported", "full"]),
        ("--recompute-activations --recompute-modules core_attn moe", ["moe: a LLaMA has no such"]),
    ],
)
def test_a_mistake_names_its_flag(words: str, parts: list[str]) -> None:
    message = refusal(f"{ITERS} {words}")
    for part in parts:
        assert part in message


# Vocabulary rows and tokenizers


def test_rows_are_what_is_asked_for() -> None:
    for words, rows in (
        ("", 128),
        ("--padded-vocab-size 100", 100),
        ("--padded-vocab-size 131 --make-vocab-size-divisible-by 64", 131),
    ):
        config = configure(f"{ITERS} {words}")
        assert (config.model.vocab_size, config.vocab_size) == (rows, 100)


@pytest.mark.parametrize("name", LLAMA_PRESETS)
def test_a_preset_without_a_tokenizer_has_its_published_vocabulary(name: str) -> None:
    words = "--mock-data --micro-batch-size 1 --seq-length 512 --train-iters 10 --lr 0.1"
    config = configure(f"{words} --llama-preset {name}")
    rows = LLAMA_PRESETS[name].vocab_size
    assert (config.vocab_size, config.eod, config.model.vocab_size) == (rows, rows - 1, rows)


def test_the_files_of_gpt2_name_its_type_even_beside_mock_data() -> None:
    words = f"{SMALL} --train-iters 10 --vocab-file no/vocab.json --merge-file no/merges.txt"
    with pytest.raises(UserError, match=r"--vocab-file no/vocab\.json is missing"):
        configure(words)


# Recomputation


@pytest.mark.parametrize(
    ("words", "recompute"),
    [
        ("", RecomputeConfig(granularity="selective")),
        ("--recompute-modules core_attn", RecomputeConfig(granularity="selective")),
        ("--recompute-modules layernorm core_attn", RecomputeConfig(granularity="selective")),
        ("--recompute-modules layernorm", None),  # norms are always recomputed
    ],
)
def test_modules_to_recompute(words: str, recompute: RecomputeConfig | None) -> None:
    assert (
        configure(f"{ITERS} --recompute-granularity selective {words}").model.recompute == recompute
    )
    assert configure(f"{ITERS} --recompute-activations {words}").model.recompute == recompute


# Logging of libraries


@pytest.mark.parametrize(("level", "shown"), [(20, True), (40, False), (None, False)])
def test_libraries_say_what_the_level_lets_through(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    level: int | None,
    shown: bool,
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])  # as in a new process
    before = root.level
    root.setLevel(logging.WARNING)
    try:
        set_logging_level(level)
        logging.getLogger("some_package").info("hello")
    finally:
        root.setLevel(before)
    assert ("hello" in capsys.readouterr().err) == shown
