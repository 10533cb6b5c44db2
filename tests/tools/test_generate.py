"""Generation: the most probable tokens, no padding ids, whole characters, clear mistakes."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from data.tokenizer import NullTokenizer
from model.llama import Llama
from paro.checkpoint.convert.native import open_native
from tests.helpers.checkpoints import load_parameters
from tests.helpers.commands import printed
from tests.helpers.refusals import refused
from tests.model.values import SMALL
from tests.tools.conftest import TEXT
from tests.tools.untrained import save_untrained
from tools.evaluation.scoring import scores_of
from tools.generate import main
from tools.generation.continuing import Sampling, continuations, text_of, until_ends
from tools.train_tokenizer import main as train_tokenizer

VOCAB = 60  # NullTokenizer's; the model has 64 rows
NUMBERS = f"--make-vocab-size-divisible-by 64 --tokenizer-type NullTokenizer --vocab-size {VOCAB}"
GREEDY = ("--prompt", "3 1 2", "--temperature", 0, "--max-new-tokens")


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


def mistake(told: str, *words: object) -> None:
    refused(lambda: main([*map(str, words)]), told)


def test_greedy_takes_the_most_probable_token_every_time(checkpoint: Path) -> None:
    source = open_native(checkpoint)
    model = Llama(replace(source.config, vocab_size=64))
    model.load_state_dict(load_parameters(checkpoint))
    ids = [3, 1, 2]
    for _ in range(12):
        ids.append(int(model(torch.tensor([ids]))[0, -1, :VOCAB].argmax()))
    assert VOCAB - 1 not in ids, "the text ends early: choose another prompt"
    assert len(set(ids)) > 4, "hardly a choice was made"
    for more in ((), ("--seed", 5)):
        found = printed(main, "--load", checkpoint, *GREEDY, 12, *more)
        assert found == " ".join(map(str, ids)) + "\n"


@pytest.mark.parametrize(("flag", "dtype"), [("--bf16", torch.bfloat16), ("--fp16", torch.float16)])
def test_a_type_is_that_of_the_model(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, flag: str, dtype: torch.dtype
) -> None:
    held: list[Llama] = []

    def watched(model: Llama, *others: Any, **more: Any) -> Iterator[list[int]]:
        held.append(model)
        return continuations(model, *others, **more)

    monkeypatch.setattr("tools.generation.continuing.continuations", watched)
    words = ("--load", checkpoint, *GREEDY, 4)
    assert printed(main, *words, flag, "--device", "cpu").startswith("3 1 2 ")
    assert {p.dtype for p in held[0].parameters()} == {dtype}
    mistake("not allowed with", *words, "--bf16", "--fp16")


@pytest.mark.gpu
def test_a_gpu_continues_as_the_cpu_does(checkpoint: Path) -> None:
    words = ("--load", checkpoint, *GREEDY, 12)
    wanted = printed(main, *words, "--device", "cpu")
    assert printed(main, *words, "--device", "cuda") == printed(main, *words) == wanted


def test_sampling_is_repeated_by_its_seed_alone(checkpoint: Path) -> None:
    words = ("--load", checkpoint, "--prompt", "3 1 2", "--max-new-tokens", 12)
    first = printed(main, *words)
    assert printed(main, *words) == first
    assert printed(main, *words, "--seed", 5) != first


@pytest.mark.parametrize(
    ("dtype", "told"), [(torch.float32, "--ckpt-step"), (torch.float16, "--bf16")]
)
def test_logits_that_are_not_finite_are_refused(dtype: torch.dtype, told: str) -> None:
    model = Llama(replace(SMALL, num_layers=1)).to(dtype).requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.fill_(0.0 if "blocks" in name else 1.0)
    model.head.weight.fill_(torch.finfo(dtype).max)
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature=temperature, seed=1)
        tokens = continuations(model, [[0], [1]], sampling, num_ids=4)
        refused(partial(next, tokens), f"--load ... logits ... {told}")
    score = partial(scores_of, model, [([1], [2])], max_length=4, size=1)
    refused(score, f"--load ... logits ... {told}")


def test_a_tiny_temperature_is_greedy_and_a_huge_one_is_fair() -> None:
    model = Llama(replace(SMALL, num_layers=1, vocab_size=8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embedding.weight.fill_(1.0)  # so the normed residual stream is 1 in every channel
        model.head.norm.fill_(1.0)
        model.head.weight[:, 0] = torch.tensor([1.0, 3.0, 2.0, 0.0, 9.0, 9.0, 9.0, 9.0])

    def draw(temperature: float, count: int) -> list[int]:
        sampling = Sampling(temperature=temperature, seed=1)
        tokens = continuations(model, [[0]], sampling, num_ids=4)
        return [token for (token,) in islice(tokens, count)]

    assert draw(0.0, 3) == [1, 1, 1]
    assert draw(1e-30, 3) == [1, 1, 1]
    drawn = draw(1e6, 400)
    counts = [drawn.count(token) for token in range(4)]
    # 100 each on average, with a standard deviation of 9; none from the rows above 3.
    assert sum(counts) == 400
    assert all(60 < count < 140 for count in counts), counts


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


def test_the_prompt_comes_back_as_it_was(text_checkpoint: tuple[Path, Path]) -> None:
    prompt = "  def  naïve(雪):\n\t"
    out = printed(main, "--load", text_checkpoint[0], "--prompt", prompt, "--max-new-tokens", 5)
    assert out.startswith(prompt)
    assert len(out) > len(prompt) + 1


def test_a_tokenizer_may_have_moved(text_checkpoint: tuple[Path, Path], tmp_path: Path) -> None:
    saved, tokenizer = text_checkpoint
    words = ("--load", saved, "--prompt", "def ", "--max-new-tokens", 5)
    before = printed(main, *words)
    moved = shutil.move(tokenizer, tmp_path / "elsewhere.model")
    try:
        mistake(f"{tokenizer} ... --tokenizer-model", *words)
        assert printed(main, *words, "--tokenizer-model", moved) == before
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
    mistake("310 ... 300", *words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--prompt=", "--prompt is empty"),
        ("", "nothing to continue"),
        ("--prompt 1,2", "'1,2'"),
        ("--prompt 1 --temperature -1", "--temperature -1.0"),
        ("--prompt 1 --temperature nan", "--temperature nan"),
        ("--prompt 1 --temperature inf", "--temperature inf"),
        ("--prompt 1 --max-new-tokens 0", "--max-new-tokens 0"),
        ("--prompt 1 --top-k -1", "--top-k -1"),
        ("--prompt 1 --top-p 0", "--top-p 0.0"),
        ("--prompt 1 --top-p 1.5", "--top-p 1.5"),
        ("--prompt-file nowhere.txt", "--prompt-file nowhere.txt cannot be read"),
    ],
)
def test_mistakes_are_named(checkpoint: Path, words: str, told: str) -> None:
    mistake(told, "--load", checkpoint, *words.split())


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        mistake(f"--load {folder} holds no checkpoint", "--load", folder, "--prompt", "1")
    mistake("hf download an-owner/a-model", "--load", "an-owner/a-model", "--prompt", "1")


def test_damage_is_named_and_another_iteration_can_be_asked_for(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    shutil.copytree(checkpoint, folder)
    (newest,) = folder.glob("iter_*")
    shutil.copytree(newest, folder / "iter_0000007")
    words = ("--load", folder, "--prompt", "3 1 2", "--max-new-tokens", 2)
    whole = printed(main, *words)
    (file,) = newest.glob("*.distcp")
    file.write_bytes(bytes(file.stat().st_size))
    mistake(f"{file} is damaged (wrong checksum", *words)
    assert printed(main, *words, "--ckpt-step", 7) == whole
    mistake("iter_0000009 does not exist", *words, "--ckpt-step", 9)
