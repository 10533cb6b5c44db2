"""Decoding with cached keys and values equals the whole model, for texts of any lengths."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model.config import LlamaConfig
from model.llama import Llama
from tests.model.test_llama import CONFIGS, build
from tests.model.values import assert_near
from tools.generation.decoding import Decoder

TEXTS = [[5, 3, 9, 1, 1, 7, 100], [4], [8, 8, 2, 60, 61, 62, 63, 64, 65, 66, 67], [9, 2]]


def whole(model: Llama, text: list[int]) -> Tensor:
    """Next-token logits of every token from a forward over the whole text."""
    with torch.no_grad():
        logits_SV: Tensor = model(torch.tensor([text]))[0]
    return logits_SV


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_every_token_has_the_logits_of_the_whole_model(config: LlamaConfig) -> None:
    model = build(config).requires_grad_(False)
    decoder = Decoder(model)
    texts = [list(text) for text in TEXTS]
    found = [decoder.start(texts)]
    # Longer than the first doubling of the cache, and than the padding of the shortest text.
    for step in range(30):
        tokens = [(31 * step + 17 * row) % config.vocab_size for row in range(len(texts))]
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
        found.append(decoder.step(torch.tensor(tokens)))
    for row, text in enumerate(texts):
        given_SV = torch.stack([logits_BV[row] for logits_BV in found])
        assert_near(given_SV, whole(model, text)[-len(found) :])


def test_a_decoder_starts_again() -> None:
    model = build(CONFIGS["gqa of 2"]).requires_grad_(False)
    decoder = Decoder(model)
    decoder.start(TEXTS)
    decoder.step(torch.tensor([1, 2, 3, 4]))
    again = decoder.start([[5, 6]])
    assert_near(again[0], whole(model, [5, 6])[-1])


def test_a_token_goes_through_the_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(CONFIGS["mha"]).requires_grad_(False)
    lengths = []
    forward = type(model.blocks[0]).mlp

    def counted(self: object, x_BSD: Tensor, drops: None) -> Tensor:
        lengths.append(x_BSD.shape[1])
        return forward(self, x_BSD, drops)

    monkeypatch.setattr(type(model.blocks[0]), "mlp", counted)
    decoder = Decoder(model)
    decoder.start([[1, 2, 3]])
    decoder.step(torch.tensor([4]))
    assert lengths == [3] * 3 + [1] * 3
