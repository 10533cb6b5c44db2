"""Decoding with cached keys and values equals the whole model; chats end at a stop token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import LlamaConfig
from model.llama import Llama
from tests.helpers.commands import printed
from tests.helpers.refusals import refused
from tests.model.test_llama import CONFIGS, build
from tests.model.values import assert_near
from tests.tools.preprocessing.templates import END, PLAIN
from tests.tools.preprocessing.test_chat_template import folder_with
from tests.tools.untrained import save_untrained
from tools.generate import main
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


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint, and the folder of its tokenizer."""
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = folder_with(folder, PLAIN)
    words = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tokenizer}"
    return save_untrained(folder / "saved", words), tokenizer


@pytest.fixture
def asked(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a model is asked that answers " ok 雪 ", and goes on behind the stop token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folders[1])
    texts: list[str] = []

    def scripted(_model: object, prompts: Sequence[list[int]], *_: Any, **__: Any) -> Iterator[Any]:
        texts.append(tokenizer.decode(prompts[0]))
        return ([token] for token in tokenizer.encode(f" ok 雪 {END}no"))

    monkeypatch.setattr("tools.generation.continuing.continuations", scripted)
    return texts


TURNS = [
    "<|im_start|>user\nx?<|im_end|>\n<|im_start|>assistant\n",
    "ok 雪<|im_end|>\n<|im_start|>user\nand ü?<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.mark.slow("imports transformers")
def test_every_answer_has_the_conversation_before_it(
    folders: tuple[Path, Path], asked: list[str]
) -> None:
    words = ("--chat", "--load", folders[0], "--prompt", "x?", "--prompt", "and ü?")
    assert printed(main, *words) == " ok 雪 \n" * 2
    assert asked == [TURNS[0], TURNS[0] + TURNS[1]]


@pytest.mark.slow("imports transformers")
def test_lines_of_standard_input_are_prompts(
    folders: tuple[Path, Path], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--chat", "--load", folders[0], "--max-new-tokens", 2)
    for lines, count in (("x?\n\n \nand ü?", 2), ("x?\n", 1), ("", 0)):
        asked.clear()
        stream = TextIOWrapper(BytesIO(lines.encode()), encoding="utf-8")
        monkeypatch.setattr("sys.stdin", stream)
        assert printed(main, *words).count("\n") == count
        assert [text.count("assistant") for text in asked] == [1, 2][:count]
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"x?\n\xff\n"), encoding="utf-8"))
    refused(lambda: printed(main, *words), "standard input is not UTF-8")


@pytest.mark.slow("imports transformers")
def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    numbers = save_untrained(tmp_path / "saved", "--tokenizer-type NullTokenizer --vocab-size 60")
    words = ["--chat", "--load", str(numbers)]
    refused(lambda: main(words), "--chat ... --load has no folder with a chat template")
    plain = folder_with(tmp_path, None)
    flags = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {plain}"
    saved = save_untrained(tmp_path / "other", flags)
    words = ["--chat", "--load", str(saved), "--prompt", "x?"]
    refused(lambda: main(words), f"--tokenizer-model {plain} has no chat template")
