"""Generation: the most probable tokens, whole characters, chats; decoding as the whole model."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from io import BytesIO, TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.tokenizer import NullTokenizer
from model.config import LlamaConfig
from model.llama import Llama
from tests.data.test_tokenizer import train_sentencepiece
from tests.helpers.refusals import printed, refused
from tests.model.test_llama import CONFIGS, build
from tests.model.values import SMALL, assert_near
from tests.tools.conftest import TEXT, save_untrained
from tests.tools.preprocessing.templates import END, PLAIN
from tests.tools.preprocessing.test_chat_template import folder_with
from tools.evaluation.scoring import scores_of
from tools.generate import main
from tools.generation.continuing import Sampling, continuations, text_of, until_ends
from tools.generation.decoding import Decoder

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


def mistake(message: str, *words: object) -> None:
    refused(lambda: main([*map(str, words)]), message)


def test_greedy_needs_no_seed_and_a_sample_is_that_of_its_seed(checkpoint: Path) -> None:
    greedy = printed(main, "--load", checkpoint, *GREEDY, 12)
    assert printed(main, "--load", checkpoint, *GREEDY, 12, "--seed", 5) == greedy
    sampled = ("--load", checkpoint, "--prompt", "3 1 2", "--max-new-tokens", 12)
    first = printed(main, *sampled)
    assert greedy != printed(main, *sampled) == first != printed(main, *sampled, "--seed", 5)


def test_a_type_is_that_of_the_model(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Llama] = []

    def watched(model: Llama, *others: Any, **more: Any) -> Iterator[list[int]]:
        held.append(model)
        return continuations(model, *others, **more)

    monkeypatch.setattr("tools.generation.continuing.continuations", watched)
    words = ("--load", checkpoint, *GREEDY, 4)
    for flag, dtype in (("--bf16", torch.bfloat16), ("--fp16", torch.float16)):
        assert printed(main, *words, flag, "--device", "cpu").startswith("3 1 2 ")
        assert {p.dtype for p in held.pop().parameters()} == {dtype}
    mistake("not allowed with", *words, "--bf16", "--fp16")


@pytest.mark.gpu
def test_a_gpu_continues_as_the_cpu_does(checkpoint: Path) -> None:
    words = ("--load", checkpoint, *GREEDY, 12)
    wanted = printed(main, *words, "--device", "cpu")
    assert printed(main, *words, "--device", "cuda") == printed(main, *words) == wanted


def test_logits_that_are_not_finite_are_refused() -> None:
    for dtype, message in ((torch.float32, "--ckpt-step"), (torch.float16, "--bf16")):
        model = Llama(replace(SMALL, num_layers=1)).to(dtype).requires_grad_(False)
        for name, parameter in model.named_parameters():
            parameter.fill_(0.0 if "blocks" in name else 1.0)
        model.head.weight.fill_(torch.finfo(dtype).max)
        for temperature in (0.0, 1.0):
            sampling = Sampling(temperature=temperature, seed=1)
            tokens = continuations(model, [[0], [1]], sampling, num_ids=4)
            refused(partial(next, tokens), f"--load ... logits ... {message}")
        score = partial(scores_of, model, [([1], [2])], max_length=4, size=1)
        refused(score, f"--load ... logits ... {message}")


@pytest.mark.slow("draws 400 tokens")
def test_a_tiny_temperature_is_greedy_and_a_huge_one_is_fair() -> None:
    model = Llama(replace(SMALL, num_layers=1, vocab_size=8)).requires_grad_(False)
    for parameter in model.parameters():
        parameter.zero_()
    model.embedding.weight.fill_(1.0)  # so the normed residual stream is 1 in every channel
    model.head.norm.fill_(1.0)
    model.head.weight[:, 0] = torch.tensor([1.0, 3.0, 2.0, 0.0, 9.0, 9.0, 9.0, 9.0])
    for temperature, count, least in ((0.0, 3, 0), (1e-30, 3, 0), (1e6, 400, 60)):
        tokens = continuations(model, [[0]], Sampling(temperature=temperature, seed=1), num_ids=4)
        drawn = [token for (token,) in islice(tokens, count)]
        # Of 400, 100 each on average, with a standard deviation of 9; none above 3.
        assert all(drawn.count(token) >= least for token in range(4)), drawn
        assert set(drawn) == ({0, 1, 2, 3} if least else {1})


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
    one_by_one = iter(added)
    assert next(text_of(tokenizer, prompt, one_by_one)) == "ö"
    assert bytes(one_by_one).decode() == "雪b", "a token was made before the first was printed"


def test_a_tokenizer_may_have_moved(text_checkpoint: tuple[Path, Path], tmp_path: Path) -> None:
    saved, tokenizer = text_checkpoint
    prompt = "  def  naïve(雪):\n\t"
    words = ("--load", saved, "--prompt", prompt, "--max-new-tokens", 5)
    before = printed(main, *words)
    assert before.startswith(prompt), "it comes back as it was"
    assert len(before) > len(prompt) + 1
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
    # Fewer than the model's 320 rows, of which 20 are padding.
    lines = [TEXT, "a few other words, of which the trainer makes enough pieces for its quota"]
    larger = train_sentencepiece(tmp_path / "larger.model", lines=lines, vocab_size=310)
    words = ("--load", text_checkpoint[0], "--prompt", "a", "--tokenizer-model", larger)
    mistake("310 ... 300", *words)


def test_mistakes_are_named(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adlfs", None)  # also where it is installed
    for words, message in (
        ("--prompt=", "--prompt is empty"),
        ("", "nothing to continue"),
        ("--prompt 1,2", "'1,2'"),
        *(
            (f"--prompt 1 --temperature {x}", f"--temperature ... {x}")
            for x in ("-1.0", "nan", "inf")
        ),
        ("--prompt 1 --max-new-tokens 0", "--max-new-tokens 0"),
        ("--prompt 1 --top-k -1", "--top-k -1"),
        *((f"--prompt 1 --top-p {share}", f"--top-p {share}") for share in ("0.0", "1.5")),
        ("--prompt-file nowhere.txt", "--prompt-file nowhere.txt cannot be read"),
        ("--prompt 1 --load az://b/x", "--load: az://b/x needs the package adlfs"),
        ("--prompt 1 --ckpt-step 9", "iter_0000009 does not exist"),
        ("--prompt 1 --load tests", "--load tests holds no checkpoint"),
        ("--prompt 1 --load an-owner/a-model", "no checkpoint ... hf download an-owner/a-model"),
    ):
        mistake(message, "--load", checkpoint, *words.split())


TEXTS = [[5, 3, 9, 1, 1, 7, 100], [4], [8, 8, 2, 60, 61, 62, 63, 64, 65, 66, 67], [9, 2]]


def whole(model: Llama, text: list[int]) -> Tensor:
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
    lengths: list[int] = []
    model.blocks[0].mlp = lambda x_BSD, _: lengths.append(x_BSD.shape[1]) or x_BSD
    decoder.step(torch.tensor(tokens))
    assert lengths == [1], "tokens before go through the model again"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
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
