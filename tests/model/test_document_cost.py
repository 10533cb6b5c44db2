"""The cost of separate documents, relative to the same samples read as one text each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model.llama import Llama
from tests.model.test_llama import MHA, build

B, S, PAIRS = 2, 512, 7
CONFIG = replace(
    MHA, num_layers=2, hidden_size=256, ffn_hidden_size=704, kv_channels=64,
    max_position_embeddings=S, init_method_std=0.02,
)  # fmt: skip


def seconds(pass_: Callable[[], Tensor]) -> float:
    begin = time.process_time()
    pass_().backward()
    return time.process_time() - begin


@pytest.mark.verify
@pytest.mark.parametrize("length", [8, 64, 128, 512])
def test_cost(length: int, capsys: pytest.CaptureFixture[str]) -> None:
    model: Llama = build(CONFIG)
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(101, (2, B, S), generator=generator)
    weights = torch.full((B, S), 1.0 / (B * S))
    positions = (torch.arange(S) % length).expand(B, S)
    lengths = (length,) * (B * S // length)

    def plain() -> Tensor:
        return model(tokens, labels, weights)

    def apart() -> Tensor:
        return model(tokens, labels, weights, positions_BS=positions, document_lengths=lengths)

    seconds(plain), seconds(apart)
    ratios = [seconds(apart) / seconds(plain) for _ in range(PAIRS)]
    with capsys.disabled():
        print(f"\ndocuments of {length} of {S} tokens: {statistics.median(ratios):.2f} of a step")
    assert statistics.median(ratios) < (1.1 if length >= 64 else 3.0)
