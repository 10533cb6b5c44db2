"""Wrong values are told beside refused flags, and what is left of the flags is ready to paste."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from paro.arguments.parser import parse_args
from paro.config.mistakes import wrong_values
from paro.errors import UserError
from tests.helpers.training import configured

SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --lr 1e-3 --mock-data "
    "--vocab-size 99 --untie-embeddings-and-output-weights --dry-run"
)


def mistake(words: str) -> UserError:
    """The refusal of a command line."""
    with pytest.raises(UserError) as caught:
        parse_args(shlex.split(words), wrong_values=wrong_values)
    return caught.value


def answer(words: str) -> tuple[list[str], list[str]]:
    """The mistakes in a command line, and the words that are offered in its place."""
    error = mistake(words)
    _, _, left = error.example.partition("paste them after pretrain_llama.py:")
    return list(error.args), shlex.split(left.replace("\\\n", " "))


def test_wrong_values_are_told_with_refused_and_unknown_flags() -> None:
    batch = "--micro-batch-size 2 --global-batch-size 12 --rampup-batch-size 6 6 100"
    mistakes, left = answer(
        f"{SMALL} --world-size 8 --n-layer 3 --train-iters 9 --tensor-model-parallel-size 8 "
        f"{batch} --eval-iters -1 --clip-grad -3 --tokenizer-type NullTokenizer "
        "--null-tokenizer-eod-id 99 --zzz 1"
    )
    for start in (
        "--n-layer 3 is unknown",
        "--zzz 1 is unknown",
        "--tensor-model-parallel-size 8 is not supported",
        "--global-batch-size 12 is no multiple",
        "--eval-iters -1 must be",
        "--clip-grad -3.0",
        "--null-tokenizer-eod-id 99",
    ):
        assert [line for line in mistakes if line.startswith(start)], (start, mistakes)
    assert len(mistakes) == 7
    assert "--zzz" not in left
    assert shlex.join(left[-2:]) == "--paro-strategy GGG"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--optimizer muon --trainable names:*norm*", "--optimizer muon updates matrices"),
        ("--adam-implementation apex --exp-avg-dtype bf16", "--adam-implementation apex keeps"),
        ("--paro-strategy NIG --paro-nccl-copy-engine", "--paro-nccl-copy-engine is for"),
    ],
)
def test_flags_that_contradict_each_other_are_told_beside_wrong_values(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "paro.spec.optim_config.check_apex", lambda: None
    )  # as if it were installed
    batch = "--micro-batch-size 2 --global-batch-size 12 --train-iters 9"
    with pytest.raises(UserError) as caught:
        configured(f"{SMALL} --world-size 8 --ranks-per-node 4 {batch} {words}")
    of_batch, other = caught.value.args
    assert of_batch.startswith("--global-batch-size 12")
    assert other.startswith(message)


@pytest.mark.parametrize("missing", ["seq-length", "lr", "vocab-size", "hidden-size", "mock-data"])
def test_a_missing_flag_hides_no_wrong_value(missing: str) -> None:
    words = f"{SMALL} --world-size 8 --micro-batch-size 2 --global-batch-size 12 --train-iters 9"
    kept = [group for group in words.split("--")[1:] if not group.startswith(missing)]
    mistakes, _ = answer(f"{' '.join(f'--{group}' for group in kept)} --eval-iters -1 --qk-clip")
    message = " | ".join(mistakes)
    assert "--qk-clip is not supported" in message
    assert "--eval-iters -1 must be at least 0" in message
    assert "--global-batch-size 12 is no multiple" in message


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("--qk-clip --tp-comm-bootstrap-backend nccl", ""),
        ("--tensor-model-parallel-size 2 --sequence-parallel", "--paro-strategy GGG"),
        ("--tensor-model-parallel-size 2 --paro-strategy IIG", "--paro-strategy IIG"),
        ("--qk-clip --context-parallel-size 3 --clip-grad 2", "--clip-grad 2"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim", "--paro-strategy NNG"),
        ("--qk-clip --warmup-steps 3", "--lr-warmup-iters 3"),
        ("--log-intervall 7", "--log-interval 7"),
        ("--moe-router-topk 2 --moe-grouped-gemm --rl-default-top-p=0.9", ""),
        ("--qk-clip --no-pad-vocab-size", "--make-vocab-size-divisible-by 1"),
        ("--qk-clip --rope-factor 4", "--use-rope-scaling --rope-scaling-factor 4"),
        ("--qk-clip --recompute-method block --lora-alpha 3 --num-query-groups 2", ""),
        ("--qk-clip --lr-decay-style steps --attention-backend sdpa --log-interval x", ""),
        ("--qk-clip --paro-strategy XYZ --save-interval 0 --clip-grad 2", "--clip-grad 2"),
        ("--qk-clip --non-persistent-save-interval 3 --fp8-format e4m3", "--fp8-format e4m3"),
        (
            "--qk-clip --tokenizer-type Llama2Tokenizer --tokenizer-model nowhere.model",
            "--tokenizer-type NullTokenizer",
        ),
    ],
)
def test_what_is_left_of_flags_is_sound(given: str, left: str) -> None:
    common = f"{SMALL} --world-size 4 --micro-batch-size 1 --global-batch-size 8 --train-iters 9"
    _, words = answer(f"{common} {given}")
    assert shlex.join(words).removeprefix(common).strip() == left
    configured(words)


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("--llama-preset 7B --data-path text --seq-length 16 --qk-clip", ""),
        (
            "--llama-preset 7B --mock-data --seq-length 4096 --qk-clip",
            "--max-position-embeddings 4096",
        ),
        (
            "--num-layers 1 --hidden-size 64 --num-attention-heads 1 --data-path text "
            "--seq-length 16 --qk-clip",
            "--tokenizer-type NullTokenizer --vocab-size 32000",
        ),
    ],
)
def test_what_a_dry_run_lacks_is_added(given: str, left: str) -> None:
    common = f"{given} --lr 1 --train-iters 9 --micro-batch-size 1 --dry-run --world-size 4"
    _, words = answer(common)
    assert shlex.join(words) == f"{common.replace(' --qk-clip', '')} {left}".strip()
    configured(words)


FLAGS = {
    "ONE": "--micro-batch-size 1",
    "BATCH": "--global-batch-size",
    "RAMP": "--rampup-batch-size",
    "STEPS": "--step-batch-size-schedule",
}


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("--micro-batch-size 4 --global-batch-size 16", "--micro-batch-size 2 {BATCH} 16"),
        ("{ONE} {BATCH} 12", "{ONE} {BATCH} 16"),
        ("{ONE} {BATCH} 64 {RAMP} 4 4 1000", "{ONE} {BATCH} 64 {RAMP} 8 8 1000"),
        ("{ONE} {BATCH} 64 {RAMP} 32 12 1000", "{ONE} {BATCH} 64 {RAMP} 32 16 1000"),
        ("{ONE} {BATCH} 8 {RAMP} 100 12 1000", "{ONE} {BATCH} 8 {RAMP} 8 8 1000"),
        ("{ONE} {STEPS} '0:4 1K:20' {BATCH} 20", "{ONE} {STEPS} '0:8 1K:24'"),
    ],
)
def test_batch_sizes_that_are_left_fit_the_ranks(given: str, left: str) -> None:
    common = f"{SMALL} --world-size 8 --train-iters 9"
    _, words = answer(f"{common} {given.format(**FLAGS)} --qk-clip")
    assert shlex.join(words).removeprefix(common).strip() == left.format(**FLAGS)
    configured(words)


def test_absurd_batches_are_no_search() -> None:
    sizes = f"--micro-batch-size 1 --global-batch-size {2**62} --rampup-batch-size 1 1 {2**62}"
    mistakes, words = answer(f"{SMALL} --world-size 8 --train-iters 9 --qk-clip {sizes}")
    assert len(mistakes) > 1
    assert str(2**62) not in words
    configured(words)


def test_flags_of_a_file_are_left_as_flags(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("qk-clip: true\nlog-interval: 7\n")
    common = f"{SMALL} --world-size 4 --micro-batch-size 1 --train-iters 9"
    _, words = answer(f"{common} --yaml-cfg {path}")
    assert shlex.join(words) == f"--log-interval 7 {common}"
    configured(words)


@pytest.mark.parametrize(
    "wrong",
    ["--num-layers x", "--lr-decay-style steps", "--swiglu --log-interval", "--lr 1 2", "--lr inf"],
)
def test_a_wrong_value_is_told_in_one_line_alone(wrong: str) -> None:
    common = f"{SMALL} --world-size 4 --micro-batch-size 1 --train-iters 9"
    with pytest.raises(UserError) as caught:
        parse_args(f"{common} {wrong}".split(), wrong_values=wrong_values)
    assert len(str(caught.value).splitlines()) == 1


def test_nothing_is_offered_where_flags_are_only_missing() -> None:
    mistakes, words = answer("--num-layers 2 --hidden-size 64")
    assert mistakes
    assert words == []
