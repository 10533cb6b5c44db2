"""Generation compared with transformers', from folders and their conversions, in batches."""

from __future__ import annotations

import json
import shutil
from itertools import islice
from pathlib import Path

import pytest
import torch

from model.llama import Llama
from tests.helpers.commands import printed
from tests.paro.checkpoint.convert.folders import own_model, save_folder
from tests.tools.untrained import convert, save_untrained
from tools.generate import (
    beginnings,
    encode,
    load_tokenizer,
    main,
    open_model,
)
from tools.generation.continuing import Sampling, continuations

PROMPTS = [[3, 1, 2], [7], [5, 9, 4, 4, 8, 2, 11]]
GREEDY = Sampling(temperature=0.0, seed=1)


def grown(
    model: Llama, prompts: list[list[int]], sampling: Sampling, count: int
) -> list[list[int]]:
    rows = islice(continuations(model, prompts, sampling, num_ids=model.config.vocab_size), count)
    return [list(text) for text in zip(*rows, strict=True)]


@pytest.mark.parametrize("seed", range(12))
def test_greedy_tokens_are_transformers(seed: int, tmp_path: Path) -> None:
    theirs = save_folder(tmp_path / "hf", seed)
    convert("hf", "paro", tmp_path / "hf", tmp_path / "paro")
    given = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
    found = [theirs.generate(torch.tensor([prompt]), **given)[0].tolist() for prompt in PROMPTS]
    expected = [ids[len(prompt) :] for prompt, ids in zip(PROMPTS, found, strict=True)]
    end = theirs.config.vocab_size - 1  # NullTokenizer's
    shown = [ids[: ids.index(end)] if end in ids else ids for ids in expected]
    lines = [" ".join(map(str, p + s)) for p, s in zip(PROMPTS, shown, strict=True)]
    flags = [word for prompt in PROMPTS for word in ("--prompt", " ".join(map(str, prompt)))]
    flags += ["--temperature", "0", "--max-new-tokens", "16"]
    for folder in (tmp_path / "hf", tmp_path / "paro"):
        assert grown(own_model(open_model(folder)), PROMPTS, GREEDY, 16) == expected, folder
        assert printed(main, "--load", folder, *flags).splitlines() == lines


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, seed=7),
        Sampling(temperature=0.7, seed=8, top_k=5),
        Sampling(temperature=1.3, seed=9, top_p=0.8),
    ],
)
def test_a_batch_is_what_its_texts_are_alone(sampling: Sampling, tmp_path: Path) -> None:
    save_folder(tmp_path / "hf", 2)
    model = own_model(open_model(tmp_path / "hf"))
    together = grown(model, PROMPTS, sampling, 24)
    alone = [grown(model, [prompt], sampling, 24)[0] for prompt in PROMPTS]
    assert together == alone
    assert len({tuple(text) for text in together}) == len(PROMPTS)


@pytest.mark.slow("imports transformers")
def test_only_the_probable_are_drawn() -> None:
    # Probabilities 0.5, 0.25, 0.15 and 0.1, in another order.
    logits = torch.tensor([0.15, 0.5, 0.1, 0.25]).log()
    for top_k, top_p, expected in (
        (0, 1.0, [0.15, 0.5, 0.1, 0.25]),
        (2, 1.0, [0, 2 / 3, 0, 1 / 3]),
        (0, 0.7, [0, 2 / 3, 0, 1 / 3]),
        (0, 0.76, [0.15 / 0.9, 0.5 / 0.9, 0, 0.25 / 0.9]),
        (0, 0.1, [0, 1, 0, 0]),
        (3, 0.55, [0, 1, 0, 0]),  # 0.55 of the remaining 0.9
    ):
        sampling = Sampling(temperature=1.0, seed=3, top_k=top_k, top_p=top_p)
        generator = torch.Generator().manual_seed(sampling.seed)
        drawn = [sampling.choose(logits, generator) for _ in range(4000)]
        found = [drawn.count(token) / len(drawn) for token in range(4)]
        # More than three times 0.008, the standard deviation of 0.5 among 4000.
        assert found == pytest.approx(expected, abs=0.03), (top_k, top_p)
        assert [share > 0 for share in found] == [share > 0 for share in expected]


def beginning(folder: Path, prompt: str) -> list[int]:
    """The ids with which the model of a folder is prompted."""
    source = open_model(folder)
    tokenizer = load_tokenizer(source, None)
    (ids,) = beginnings(source, tokenizer, encode(tokenizer, [prompt]))
    return ids


NEW = {"content": "<|im_end|>", "special": True, "normalized": False}


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, "SentencePieceTokenizer"),
        ({"add_bos_token": False}, "SentencePieceTokenizer"),
        ({"add_bos_token": True, "bos_token": None}, "SentencePieceTokenizer"),
        ({"add_bos_token": True, "add_eos_token": True, "pad_token": "<unk>"}, "Llama2Tokenizer"),
        ({"add_bos_token": True, "added_tokens_decoder": {"300": NEW}}, "HuggingFaceTokenizer"),
        ({"eos_token": "<|im_end|>", "add_eos_token": True}, "HuggingFaceTokenizer"),
        ({"add_bos_token": False, "eos_token": "<s>"}, "HuggingFaceTokenizer"),
    ],
)
def test_a_folder_of_pieces_is_read_as_transformers_reads_it(
    fields: dict[str, object], kind: str, pieces: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    save_folder(tmp_path / "hf", 4, vocab_size=320)
    shutil.copy(pieces, tmp_path / "hf" / "tokenizer.model")
    said = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False, **fields}
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(said))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    prompt = "  def naïve(雪):"
    ids = theirs(prompt).input_ids
    ids = ids[: len(ids) - bool(fields.get("add_eos_token"))]
    convert("hf", "paro", tmp_path / "hf", tmp_path / "paro")
    convert("paro", "hf", tmp_path / "paro", tmp_path / "back")
    for folder in (tmp_path / name for name in ("hf", "paro", "back")):
        source = open_model(folder)
        assert source.tokenizer["tokenizer_type"] == kind, folder
        assert beginning(folder, prompt) == ids, folder
        tokenizer = load_tokenizer(source, None)
        assert tokenizer.vocabulary == theirs.get_vocab()
        assert tokenizer.eod == theirs.eos_token_id
    assert AutoTokenizer.from_pretrained(tmp_path / "back").get_vocab() == theirs.get_vocab()


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "Llama2Tokenizer"])
def test_an_export_prompts_as_the_model_was_trained(
    kind: str, pieces: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    save_untrained(tmp_path / "saved", f"--tokenizer-type {kind} --tokenizer-model {pieces}")
    convert("paro", "hf", tmp_path / "saved", tmp_path / "hf")
    convert("hf", "paro", tmp_path / "hf", tmp_path / "paro")
    convert("paro", "hf", tmp_path / "paro", tmp_path / "back")
    prompt = "  def naïve(雪):"
    ids, again = (
        AutoTokenizer.from_pretrained(tmp_path / name)(prompt).input_ids for name in ("hf", "back")
    )
    assert (ids[0] == 1) == (kind == "Llama2Tokenizer")
    assert again == ids
    for folder in (tmp_path / name for name in ("saved", "hf", "paro", "back")):
        assert beginning(folder, prompt) == ids, folder
        assert load_tokenizer(open_model(folder), None).decode(ids) == prompt


@pytest.mark.parametrize(("said", "ends"), [(None, set()), (2, {2}), ([7, 9], {7, 9})])
def test_the_generation_config_says_what_ends_a_text(
    said: object, ends: set[int], tmp_path: Path
) -> None:
    save_folder(tmp_path / "hf", 0)
    path = tmp_path / "hf" / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": said}))
    convert("hf", "paro", tmp_path / "hf", tmp_path / "paro")
    for folder in ("hf", "paro"):
        assert open_model(tmp_path / folder).ends == ends
    path.unlink()
    assert open_model(tmp_path / "hf").ends == frozenset()


def test_prompts_come_from_a_file_too(tmp_path: Path) -> None:
    save_folder(tmp_path / "hf", 0)
    file = tmp_path / "prompts.txt"
    file.write_text("1 2\n3 4 5\n")
    words = ["--load", tmp_path / "hf", "--prompt", "6", "--max-new-tokens", 2]
    lines = printed(main, *words, "--prompt-file", file).splitlines()
    assert [line.split()[0] for line in lines] == ["6", "1", "3"]
