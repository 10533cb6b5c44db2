"""Chats: the template writes the conversation so far, and an answer ends at a stop token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import printed
from tests.helpers.refusals import refused
from tests.tools.preprocessing.templates import END, PLAIN
from tests.tools.preprocessing.test_chat_template import folder_with
from tests.tools.untrained import save_untrained
from tools.generate import main

pytestmark = pytest.mark.slow("imports transformers")


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


def test_every_answer_has_the_conversation_before_it(
    folders: tuple[Path, Path], asked: list[str]
) -> None:
    words = ("--chat", "--load", folders[0], "--prompt", "x?", "--prompt", "and ü?")
    assert printed(main, *words) == " ok 雪 \n" * 2
    assert asked == [TURNS[0], TURNS[0] + TURNS[1]]


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


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    numbers = save_untrained(tmp_path / "saved", "--tokenizer-type NullTokenizer --vocab-size 60")
    words = ["--chat", "--load", str(numbers)]
    refused(lambda: main(words), "--chat ... --load has no folder with a chat template")
    plain = folder_with(tmp_path, None)
    flags = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {plain}"
    saved = save_untrained(tmp_path / "other", flags)
    words = ["--chat", "--load", str(saved), "--prompt", "x?"]
    refused(lambda: main(words), f"--tokenizer-model {plain} has no chat template")
