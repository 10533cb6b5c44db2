"""Rules between flags and for their folders: one line that names a setting that works."""

from __future__ import annotations

from pathlib import Path

import pytest

from paro.checkpoint.directory import TRACKER, begin_checkpoint, finish_checkpoint
from paro.distributed.world import World
from tests.paro.config.test_run import SMALL, configure, refusal

ROTATE = f"{SMALL} --paro-materialize rotate"
EIGHT = World(size=8, ranks_per_node=4)


@pytest.mark.parametrize(
    ("words", "world"),
    [
        (f"{ROTATE} --paro-strategy IIG", EIGHT),
        (f"{ROTATE} --paro-strategy 2,2,8 --paro-rotate-in-place", EIGHT),
        (f"{ROTATE} --paro-strategy GGG --paro-group-size 4", World(size=4, ranks_per_node=2)),
    ],
)
def test_params_and_grads_on_one_ring_of_a_group_may_rotate(words: str, world: World) -> None:
    assert configure(words, world).sharding.materialize == "rotate"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--paro-strategy NIG", ["NIG shards them over 1 and 4", "use III or IIG"]),
        ("--paro-strategy IGG", ["IGG shards them over 4 and 8", "--paro-group-size"]),
        ("--paro-strategy GGG", ["over 8 and 8, in groups of 4"]),
        ("--paro-strategy IIG --paro-group-size 1", ["in groups of 1"]),
        (
            "--num-attention-heads 6 --hidden-size 96",
            ["over 4 ranks", "--num-attention-heads 6", "would work: 2 (--paro-group-size)"],
        ),
        (
            "--group-query-attention --num-query-groups 2",
            ["--num-query-groups 2", "would work: 2"],
        ),
        ("--num-attention-heads 3 --hidden-size 96", ["would work: none"]),
        ("--ffn-hidden-size 3", ["--ffn-hidden-size 3 is too small"]),
    ],
)
def test_what_cannot_rotate_is_refused_with_what_could(words: str, parts: list[str]) -> None:
    message = refusal(f"{ROTATE} {words}", EIGHT)
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--ffn-hidden-size 40", "change --ffn-hidden-size, which is 40, or leave fp8 out"),
        ("--hidden-size 40 --kv-channels 16", "change --hidden-size, which is 40,"),
        ("--kv-channels 2", "change --num-attention-heads x --kv-channels, which is 8,"),
        (
            "--group-query-attention --num-query-groups 1 --kv-channels 8",
            "change --num-query-groups x --kv-channels, which is 8,",
        ),
        ("--seq-length 9", "change --micro-batch-size x --seq-length, which is 18,"),
        ("--paro-strategy III --paro-materialize rotate", "rotate has no fp8"),
    ],
)
def test_what_fp8_does_not_take(words: str, told: str) -> None:
    assert told in refusal(f"{SMALL} --fp8-format hybrid {words}")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--paro-strategy III --paro-materialize rotate", "leave --torch-compile out, or gather"),
        ("--lora-rank 2", "--torch-compile compiles no adapters: leave it or --lora-rank out"),
    ],
)
def test_what_is_not_compiled(words: str, told: str) -> None:
    assert told in refusal(f"{SMALL} --torch-compile inductor {words}")


def test_in_place_needs_rotation() -> None:
    assert "needs --paro-materialize rotate" in refusal(f"{SMALL} --paro-rotate-in-place")


@pytest.mark.parametrize("flag", ["--save", "--tensorboard-dir"])
def test_a_folder_that_takes_no_files_is_named(flag: str) -> None:
    place = "/proc/llama/checkpoints"
    told = f"{flag} {place} cannot be written: /proc: files cannot be created there"
    assert refusal(f"{SMALL} {flag} {place}") == told


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A folder with the checkpoints of a run."""
    root = tmp_path / "used"
    for iteration in (2, 4):
        finish_checkpoint(begin_checkpoint(root, iteration), iteration, {})
    return root


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("", ["2 checkpoints, iterations 2 to 4, and there is no --load", "--start-over"]),
        ("--load {used}/../other", ["/other is another folder: give --load {used} to continue"]),
        ("--load {used}/../other --finetune", ["give --load {used} without --finetune"]),
        ("--load {used} --finetune", ["--finetune begins at iteration 0: leave --finetune out"]),
        ("--load {used}/ --start-over", ["--load names the same folder"]),
    ],
)
def test_checkpoints_of_another_run_are_not_mixed_up(
    used: Path, words: str, parts: list[str]
) -> None:
    before = sorted(used.rglob("*"))
    message = refusal(f"{SMALL} --save {used} {words.format(used=used)}")
    for part in parts:
        assert part.format(used=used) in message, message
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
    assert f"holds a {TRACKER}" in refusal(f"{SMALL} --save {tmp_path}")


@pytest.mark.parametrize("name", ["ring", "h-ring"])
def test_rings_of_single_messages_are_refused_under_nccl(name: str) -> None:
    flags = f"{SMALL} --paro-collective {name}"
    assert f"--paro-collective {name} sends" in refusal(f"{flags} --distributed-backend nccl")
    configure(f"{flags} --distributed-backend gloo")
    configure(f"{SMALL} --paro-collective ho-ring --distributed-backend nccl")


def test_starting_over_needs_a_folder() -> None:
    assert refusal(f"{SMALL} --start-over") == "--start-over needs --save"


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
        ("", None),
    ],
)
def test_flags_of_a_decay_that_is_not_chosen_are_said(words: str, told: str | None) -> None:
    notices = configure(f"{SMALL} {words}").notices
    if told is None:
        assert notices == ()
    else:
        (notice,) = notices
        assert told in notice
