"""Runs that train adapters: flags, checkpoints and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.config import is_adapter
from model.llama import Llama
from paro.checkpoint.base import adapters_of
from paro.training.step import Training
from tests.helpers.refusals import refused
from tests.helpers.training import whole_parameters
from tests.paro.training.test_base import LORA, refuses, started, trained
from tests.tools.untrained import convert


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("base")
    trained(f"--save {root}")
    return root


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    trained(f"{LORA} --load {base} --save {root}")
    return root


def test_adapters_begin_on_a_model_without_them(base: Path) -> None:
    _, plain, _ = started(f"--load {base} --finetune")
    _, training, resumed = started(f"{LORA} --load {base}")
    assert resumed.state is None
    ours = {s.layout.chunks[0].chunk.name: s for s in training.optimizer.flat_shards(frozen=True)}
    _, fresh, _ = started(LORA)
    assert training.optimizer.num_steps == 0
    for there, here in zip(
        fresh.optimizer.flat_shards(), training.optimizer.flat_shards(), strict=True
    ):
        if is_adapter(here.layout.chunks[0].chunk.name):
            assert torch.equal(there.values, here.values)
    for shard in plain.optimizer.flat_shards():
        name = shard.layout.chunks[0].chunk.name
        if shard.state == "param":
            assert torch.equal(ours[name].values, shard.values)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "adapters of rank 3 on wq, wv: give the --lora-* flags of its run, or merge"),
        ("--lora-rank 4 --lora-alpha 6", "--lora-rank 3 ... has 4: give that"),
        ("--lora-rank 3", "--lora-alpha 6 ... has 8: give that"),
        (f"{LORA} --lora-target-modules k_proj", "--lora-target-modules wq,wv ... has wk"),
    ],
)
def test_other_adapters_are_refused(adapters: Path, words: str, told: str) -> None:
    refuses(f"{words} --load {adapters}", told)


def logits_of(training: Training, tokens_BS: Tensor) -> Tensor:
    """What a run's model computes, from its shards on one process."""
    with training.traffic.paused():
        model = Llama(training.model.model.config)  # type: ignore[arg-type]
        values = whole_parameters(training)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(values[name])
            out: Tensor = model(tokens_BS)
    return out


def test_tools_merge_what_was_trained(adapters: Path, base: Path, tmp_path: Path) -> None:
    tokens_BS = torch.arange(24).view(2, 12)
    wanted, plain = (
        logits_of(started(words)[1], tokens_BS)
        for words in (f"{LORA} --load {adapters}", f"--load {base} --finetune")
    )
    assert (plain - wanted).abs().max() > 1e-4
    more = ("--make-vocab-size-divisible-by", "1", "--merge")
    whole = convert("paro", "paro", adapters, tmp_path / "whole", *more)
    again = started(f"--load {whole}")[1]
    torch.testing.assert_close(logits_of(again, tokens_BS), wanted)


@pytest.mark.parametrize(
    ("lora", "told"),
    [
        ({"rank": "many"}, "common.json: lora: rank"),
        ([3], "common.json: lora"),
        ({"rank": 0}, "--lora-rank 0 must be at least 1"),
        ({"rank": 2, "targets": ["x"]}, "adapters of x"),
        ({"rank": 2, "more": 1}, "common.json: lora"),
    ],
)
def test_damaged_words_about_adapters_are_refused(lora: object, told: str) -> None:
    refused(lambda: adapters_of({"lora": lora}, Path("folder")), told)
