"""Rules between flags, and the folders that they name: one line that says what would work."""

from __future__ import annotations

import pytest

from paro.runtime import World
from tests.paro.test_config import SMALL, configure, refusal

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


def test_in_place_needs_rotation() -> None:
    assert "needs --paro-materialize rotate" in refusal(f"{SMALL} --paro-rotate-in-place")


@pytest.mark.parametrize("flag", ["--save", "--tensorboard-dir"])
def test_a_folder_that_takes_no_files_is_named(flag: str) -> None:
    place = "/proc/llama/checkpoints"
    told = f"{flag} {place} cannot be written: /proc: files cannot be created there"
    assert refusal(f"{SMALL} {flag} {place}") == told
