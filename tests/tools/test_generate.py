"""Generation: the most probable tokens, no padding ids, whole characters, clear mistakes."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from data.tokenizer import NullTokenizer
from model.config import LlamaConfig
from model.llama import Llama
from paro.checkpoint.convert.native import open_native
from tests.helpers.parameters import load_parameters
from tests.helpers.refusals import refused
from tests.tools.conftest import TEXT
from tests.tools.untrained import save_untrained
from tools.generate import Sampling, continuations, main, text_of, until_ends
from tools.train_tokenizer import main as train_tokenizer

VOCAB = 60  # NullTokenizer's; the model has 64 rows
NUMBERS = f"--make-vocab-size-divisible-by 64 --tokenizer-type NullTokenizer --vocab-size {VOCAB}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_untrained(tmp_path_factory.mktemp("numbers"), NUMBERS)


@pytest.fixture(scope="module")
def text_checkpoint(pieces: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint whose tokenizer is a file, and that file."""
    folder = tmp_path_factory.mktemp("text")
    tokenizer = Path(shutil.copy(pieces, folder))
    words = f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {tokenizer}"
    return save_untrained(folder / "saved", words), tokenizer


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    main([*map(str, words)])
    return capsys.readouterr().out


def mistake(told: str, *words: object) -> None:
    refused(lambda: main([*map(str, words)]), told)


def test_greedy_takes_the_most_probable_token_every_time(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = open_native(checkpoint)
    model = Llama(replace(source.config, vocab_size=64))
    model.load_state_dict(load_parameters(checkpoint))
    ids = [3, 1, 2]
    for _ in range(12):
        ids.append(int(model(torch.tensor([ids]))[0, -1, :VOCAB].argmax()))
    assert VOCAB - 1 not in ids, "the text ends early: choose another prompt"
    assert len(set(ids)) > 4, "hardly a choice was made"
    words = ("--load", checkpoint, "--prompt", "3 1 2", "--temperature", 0, "--max-new-tokens", 12)
    assert printed(capsys, *words) == " ".join(map(str, ids)) + "\n"
    assert printed(capsys, *words, "--seed", 5) == " ".join(map(str, ids)) + "\n"


@pytest.mark.parametrize(("flag", "dtype"), [("--bf16", torch.bfloat16), ("--fp16", torch.float16)])
def test_a_type_is_that_of_the_model(
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flag: str,
    dtype: torch.dtype,
) -> None:
    held: list[Llama] = []

    def watched(model: Llama, *others: Any, **more: Any) -> Iterator[list[int]]:
        held.append(model)
        return continuations(model, *others, **more)

    monkeypatch.setattr("tools.generate.continuations", watched)
    words = ("--load", checkpoint, "--prompt", "3 1 2", "--temperature", 0, "--max-new-tokens", 4)
    assert printed(capsys, *words, flag, "--device", "cpu").startswith("3 1 2 ")
    assert {p.dtype for p in held[0].parameters()} == {dtype}
    with pytest.raises(SystemExit, match="2"):
        main([*map(str, words), "--bf16", "--fp16"])
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_gpu_continues_as_the_cpu_does(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--load", checkpoint, "--prompt", "3 1 2", "--temperature", 0, "--max-new-tokens", 12)
    wanted = printed(capsys, *words, "--device", "cpu")
    assert printed(capsys, *words, "--device", "cuda") == wanted
    assert printed(capsys, *words) == wanted


def test_sampling_is_repeated_by_its_seed_alone(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--load", checkpoint, "--prompt", "3 1 2", "--max-new-tokens", 12)
    first = printed(capsys, *words)
    assert printed(capsys, *words) == first
    assert printed(capsys, *words, "--seed", 5) != first


def test_a_tiny_temperature_is_greedy_and_a_huge_one_is_fair(checkpoint: Path) -> None:
    config = LlamaConfig(
        num_layers=1,
        hidden_size=8,
        ffn_hidden_size=8,
        num_attention_heads=1,
        num_query_groups=1,
        kv_channels=8,
        max_position_embeddings=8,
        vocab_size=8,
    )
    model = constant_model(config, logits=[1.0, 3.0, 2.0, 0.0, 9.0, 9.0, 9.0, 9.0])

    def draw(temperature: float, count: int) -> list[int]:
        sampling = Sampling(temperature=temperature, seed=1)
        return [
            token for (token,) in islice(continuations(model, [[0]], sampling, num_ids=4), count)
        ]

    assert draw(0.0, 3) == [1, 1, 1]
    assert draw(1e-30, 3) == [1, 1, 1]
    drawn = draw(1e6, 400)
    counts = [drawn.count(token) for token in range(4)]
    # 100 each on average, with a standard deviation of 9; none from the rows above 3.
    assert sum(counts) == 400
    assert all(60 < count < 140 for count in counts), counts


def constant_model(config: LlamaConfig, *, logits: list[float]) -> Llama:
    """A model that returns `logits` for any input."""
    model = Llama(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embedding.weight.fill_(1.0)  # so the normed residual stream is 1 in every channel
        model.head.norm.fill_(1.0)
        model.head.weight[:, 0] = torch.tensor(logits)
    return model


def test_the_end_of_the_document_and_the_limit_stop() -> None:
    ends = frozenset({9, 8})

    def first(tokens: list[int], at_most: int = 10) -> list[dict[int, int]]:
        return list(until_ends(iter([[x] for x in tokens]), 1, ends=ends, at_most=at_most))

    assert first([5, 6, 9, 7]) == [{0: 5}, {0: 6}]
    assert first([5, 8, 9, 7]) == [{0: 5}]
    both = iter([[5, 9], [8, 7]])
    assert list(until_ends(both, 2, ends=ends, at_most=10)) == [{0: 5}]
    endless = ([number] for number in range(10, 100))
    assert len(list(until_ends(endless, 1, ends=ends, at_most=3))) == 3
    assert next(endless) == [13], "a token was made that nobody gets"


class ByteTokenizer(NullTokenizer):
    """UTF-8 with one token per byte, as in byte fallback."""

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def test_characters_are_printed_whole() -> None:
    tokenizer = ByteTokenizer(256)
    prompt, added = list(b"a"), "ö雪b".encode()
    assert list(text_of(tokenizer, prompt, iter(added))) == ["ö", "雪", "b", ""]
    # An incomplete character is printed at the end, as a replacement.
    assert list(text_of(tokenizer, prompt, iter(added[:3]))) == ["ö", "\ufffd"]


def test_text_comes_as_it_is_made() -> None:
    def tokens() -> Iterator[int]:
        yield 4
        raise AssertionError("the second token was made before the first was printed")

    assert next(text_of(NullTokenizer(9), [1, 2], tokens())) == " 4"


def test_the_prompt_comes_back_as_it_was(
    text_checkpoint: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    saved, _ = text_checkpoint
    prompt = "  def  naïve(雪):\n\t"
    out = printed(capsys, "--load", saved, "--prompt", prompt, "--max-new-tokens", 5)
    assert out.startswith(prompt)
    assert len(out) > len(prompt) + 1


def test_a_tokenizer_may_have_moved(
    text_checkpoint: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, tokenizer = text_checkpoint
    words = ("--load", saved, "--prompt", "def ", "--max-new-tokens", 5)
    before = printed(capsys, *words)
    moved = shutil.move(tokenizer, tmp_path / "elsewhere.model")
    try:
        mistake(f"{tokenizer} ... --tokenizer-model", *words)
        assert printed(capsys, *words, "--tokenizer-model", moved) == before
        mistake("nowhere", *words, "--tokenizer-model", tmp_path / "nowhere")
    finally:
        shutil.move(moved, tokenizer)


def test_another_models_tokenizer_is_refused(
    text_checkpoint: tuple[Path, Path], tmp_path: Path
) -> None:
    saved, _ = text_checkpoint
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    prefix = str(tmp_path / "larger")
    # Fewer than the model's 320 rows, of which 20 are padding.
    larger = ["--input", str(text), "--output-prefix", prefix, "--vocab-size", "310"]
    train_tokenizer(larger)
    words = ("--load", saved, "--prompt", "a", "--tokenizer-model", f"{prefix}.model")
    refused(lambda: main([*map(str, words)]), "310", "300")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--prompt", ""), "--prompt is empty"),
        (("--prompt", "1 2 x"), "'x'"),
        (("--prompt", "1", "--temperature", "-1"), "--temperature -1.0"),
        (("--prompt", "1", "--temperature", "nan"), "--temperature nan"),
        (("--prompt", "1", "--max-new-tokens", "0"), "--max-new-tokens 0"),
    ],
)
def test_mistakes_are_named(checkpoint: Path, words: tuple[str, ...], told: str) -> None:
    mistake(told, "--load", checkpoint, *words)


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        mistake(f"--load {folder} holds no checkpoint", "--load", folder, "--prompt", "1")
    mistake("hf download an-owner/a-model", "--load", "an-owner/a-model", "--prompt", "1")


def test_damage_is_named_and_another_iteration_can_be_asked_for(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "saved"
    shutil.copytree(checkpoint, folder)
    (newest,) = folder.glob("iter_*")
    shutil.copytree(newest, folder / "iter_0000007")
    words = ("--load", folder, "--prompt", "3 1 2", "--max-new-tokens", 2)
    whole = printed(capsys, *words)
    (file,) = newest.glob("*.distcp")
    file.write_bytes(bytes(file.stat().st_size))
    mistake(f"{file} is damaged (wrong checksum", *words)
    assert printed(capsys, *words, "--ckpt-step", 7) == whole
    mistake("iter_0000009 does not exist", *words, "--ckpt-step", 9)


def test_temperature_is_checked_where_it_is_held() -> None:
    refused(lambda: Sampling(temperature=math.inf, seed=1), "--temperature inf")
