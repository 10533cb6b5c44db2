"""The flag --trainable: which parameters train."""

from __future__ import annotations

from dataclasses import replace

import pytest

from model.config import LoraConfig
from model.trainable import Trainable
from model.units import parameter_shapes
from tests.helpers.refusals import refused
from tests.paro.planning.cases import SMALL

CONFIG = replace(SMALL, num_layers=5)
NAMES = frozenset(parameter_shapes(CONFIG))


def names(text: str) -> frozenset[str]:
    return Trainable.of_flag(text).names(CONFIG)


def test_all_trains_every_parameter() -> None:
    assert names("all") == NAMES


@pytest.mark.parametrize(
    ("share", "layers"),
    [("0.0625", [4]), ("0.2", [4]), ("0.5", [3, 4]), ("0.6", [2, 3, 4]), ("1", [0, 1, 2, 3, 4])],
)
def test_the_last_blocks_train_and_the_head_does_not(share: str, layers: list[int]) -> None:
    wanted = {n for n in NAMES if any(n.startswith(f"blocks.{layer}.") for layer in layers)}
    assert names(f"last-blocks:{share}") == wanted


def test_patterns_match_whole_names() -> None:
    assert names("names:head.*") == {"head.norm", "head.weight"}
    assert names("names:blocks.[13].wq,head.norm") == {"blocks.1.wq", "blocks.3.wq", "head.norm"}
    assert names("names:*") == NAMES


@pytest.mark.parametrize(
    "text", ["full", "last-blocks", "last-blocks:x", "names", "names:", "names:a,,b", "all:1", ""]
)
def test_other_words_are_refused(text: str) -> None:
    refused(lambda: Trainable.of_flag(text), "is none of all, last-blocks:SHARE, names:PATTERN")


@pytest.mark.parametrize("share", ["0", "-1", "1.01", "nan", "inf"])
def test_a_share_is_above_0_and_at_most_1(share: str) -> None:
    refused(lambda: Trainable.of_flag(f"last-blocks:{share}"), "above 0 and at most 1")


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    refused(lambda: names("names:head.norm,wq"), "matches 'wq'; ... blocks.*.wq,")
    tied = replace(CONFIG, tie_embeddings_and_output_weights=True)
    tied_head = Trainable.of_flag("names:head.weight")
    refused(lambda: tied_head.names(tied), "no parameter matches 'head.weight'")


def test_a_models_adapters_train() -> None:
    adapted = replace(CONFIG, lora=LoraConfig(rank=2, targets=("wo",)))
    wanted = {f"blocks.{layer}.wo_lora_{part}" for layer in range(5) for part in "ab"}
    assert Trainable().names(adapted) == wanted
    assert Trainable().is_part(adapted)
    assert not Trainable().is_part(CONFIG)
    refused(lambda: Trainable.of_flag("adapters:0.1"), "'adapters:0.1' is none of")


@pytest.mark.parametrize("text", ["all", "last-blocks:0.0625", "names:*.wq,head.norm"])
def test_it_prints_as_it_is_given(text: str) -> None:
    assert str(Trainable.of_flag(text)) == text
