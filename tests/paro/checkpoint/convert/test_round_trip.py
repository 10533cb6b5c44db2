"""Folders of Hugging Face, there and back, and of Meta: logits and bits are those of the origin."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import paro.checkpoint.convert.source
from model.llama import Llama
from model.rotary import rotate, rotations
from model.units import name_in
from paro.checkpoint.convert.hugging_face import WEIGHTS, open_hugging_face
from paro.checkpoint.convert.meta import NAMES, open_meta, turned
from paro.checkpoint.convert.native import open_native
from paro.checkpoint.convert.source import lazy
from tests.helpers.refusals import refused
from tests.helpers.training import llama
from tests.paro.checkpoint.convert.folders import (
    FAMILIES,
    assert_same,
    hugging_face_model,
    logits_of,
    own_model,
    random_fields,
    random_tensors,
    some_tokens,
    source_of,
)
from tests.paro.checkpoint.toy_run import Harmful
from tests.tools.conftest import convert

HEAD = "lm_head.weight"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 0.5, "high_freq_factor": 3.0}
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "linear", "factor": 2.5},
    {**LLAMA3, "original_max_position_embeddings": 32},
    LLAMA3,  # which stretches max_position_embeddings
    {"rope_type": "dynamic", "factor": 1.0},
    {"rope_type": "yarn", "factor": 1, "mscale": 2.0, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
)


def random_folder(path: Path, seed: int) -> int:
    """Writes a folder that transformers reads; returns the size of its vocabulary."""
    choose, family, rope = random.Random(seed), FAMILIES[seed % 4], ROPES[seed % len(ROPES)]
    fields = random_fields(seed) | {
        "model_type": family,
        "max_position_embeddings": 48,
        "tie_word_embeddings": bool(choose.getrandbits(1)),
        "eos_token_id": [2, 3],
        "pad_token_id": 4,
        "torch_dtype": "float32",
    }
    theta = fields.pop("rope_parameters")["rope_theta"]
    if rope["rope_type"] != "default" and choose.getrandbits(1):
        fields |= {"rope_theta": theta, "rope_scaling": dict(rope)}
    else:
        fields["rope_parameters"] = {**rope, "rope_theta": theta}
    fields.pop("sliding_window", None)
    if family == "mistral":
        fields["sliding_window"] = None
    is_biased = family in ("llama", "qwen3") and bool(choose.getrandbits(1))
    if family in ("llama", "qwen3"):
        fields["attention_bias"] = is_biased
    tensors: dict[str, Tensor] = {**hugging_face_model(fields).state_dict()}
    if fields["tie_word_embeddings"]:
        del tensors[HEAD]
    types = (torch.float32,) if seed % 3 else (torch.float32, torch.bfloat16, torch.float16)
    for name in tensors:
        tensors[name] = tensors[name].to(choose.choice(types)).clone()
        if is_biased and name.endswith("o_proj.bias"):
            other = tensors[name.replace("o_proj", "q_proj")]
            tensors[name] = torch.zeros_like(tensors[name], dtype=other.dtype)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    save_file(tensors, path / WEIGHTS, {"format": "pt"})
    return int(fields["vocab_size"])


# All families, all kinds of rotation; all pairs of these under `make verify`.
SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.verify) for seed in range(8, 30))]


@pytest.mark.slow("imports transformers")
@pytest.mark.parametrize("seed", SEEDS)
def test_logits_are_those_of_transformers(seed: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "hf"
    vocab_size = random_folder(folder, seed)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = some_tokens(vocab_size, length=40)
    expected = logits_of(theirs, tokens)
    near = {"rtol": 0.0, "atol": 1e-5 * float(expected.abs().max())}

    paro = convert("hf", "paro", folder, tmp_path / "paro")
    back = convert("paro", "hf", paro, tmp_path / "back")

    ours = open_native(paro)
    assert ours.config == open_hugging_face(folder).config == open_hugging_face(back).config
    torch.testing.assert_close(logits_of(own_model(ours), tokens), expected, **near)
    assert (back / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    if seed % 3:
        assert (back / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    else:
        again = AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32)
        assert torch.equal(logits_of(again, tokens), expected)


CONFIG = llama(2, 64, 96, heads=(4, 2, 16), length=2048, vocab=100, norm_epsilon=1e-5)


def interleaved(weight: Tensor, head: int) -> Tensor:
    """From halves to pairs: row 2i of a head is our row i, row 2i + 1 our row i + H/2."""
    heads = weight.view(-1, head, weight.shape[1])
    out = torch.empty_like(heads)
    out[:, 0::2], out[:, 1::2] = heads[:, : head // 2], heads[:, head // 2 :]
    return out.reshape(weight.shape)


def save_meta(folder: Path, tensors: dict[str, Tensor], num_files: int, *, by_vocab: bool) -> None:
    """Write a folder as Meta's model-parallel ranks save it: rows, columns or a copy each."""
    folder.mkdir()
    sizes = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": -1}
    (folder / "params.json").write_text(json.dumps(sizes | {"norm_eps": 1e-5}))
    files: list[dict[str, Tensor]] = [{} for _ in range(num_files)]
    for name, tensor in tensors.items():
        part = name.rpartition(".")[2]
        whole = interleaved(tensor, CONFIG.kv_channels) if part in ("wq", "wk") else tensor
        columns = part in ("wo", "w_down") or (name == "embedding.weight" and not by_vocab)
        cut = [whole] * num_files if whole.ndim == 1 else whole.chunk(num_files, int(columns))
        for file, piece in zip(files, cut, strict=True):
            file[name_in(NAMES, name)] = piece.clone()
    for number, file in enumerate(files):
        file["rope.freqs"] = torch.ones(8)
        torch.save(file, folder / f"consolidated.{number:02d}.pth")


@pytest.mark.parametrize("by_vocab", [False, True])
@pytest.mark.parametrize("num_files", [1, 2])
def test_every_bit_comes_to_its_place(
    num_files: int, by_vocab: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = random_tensors(CONFIG, torch.bfloat16)
    save_meta(tmp_path / "meta", tensors, num_files, by_vocab=by_vocab)
    monkeypatch.setattr(paro.checkpoint.convert.source, "CHUNK_BYTES", 7 * 64 * 2)
    assert_same(open_meta(tmp_path / "meta"), source_of(CONFIG, torch.bfloat16))


def test_queries_and_keys_turn_as_metas_do(tmp_path: Path) -> None:
    """Against the published rotation of neighbouring channels as complex numbers."""
    head, length = 16, 9
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(2 * head, 64, generator=generator)
    x_SD = torch.randn(length, 64, generator=generator)
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, head, 2).float() / head)
    turns = torch.polar(
        torch.ones(length, head // 2), torch.outer(torch.arange(length), frequencies)
    )
    q, k = (x_SD @ weight.t()).view(length, 2, head).unbind(1)
    theirs = [
        torch.view_as_real(torch.view_as_complex(v.reshape(length, -1, 2).contiguous()) * turns)
        for v in (q, k)
    ]
    expected = theirs[0].flatten(1) @ theirs[1].flatten(1).t()

    ours = turned({"wq": lazy(weight)}, head)["wq"].whole(torch.float32)
    own = (x_SD @ ours.t()).view(1, length, 2, head)
    cos, sin = rotations(CONFIG, length, torch.float32, torch.device("cpu"))
    q, k = rotate(own, cos, sin)[0].unbind(1)
    torch.testing.assert_close(q @ k.t(), expected, rtol=1e-4, atol=1e-4)


def test_no_output_layer_means_a_tied_one(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    del tensors["head.weight"]
    save_meta(tmp_path / "meta", tensors, 1, by_vocab=True)
    source = open_meta(tmp_path / "meta")
    assert source.config.tie_embeddings_and_output_weights
    assert isinstance(own_model(source), Llama)


def test_mistakes_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "meta"
    first, params = folder / "consolidated.00.pth", folder / "params.json"
    read = partial(open_meta, folder)
    folder.mkdir()
    refused(read, "has no params.json")
    sizes = {"dim": 32, "n_layers": 1, "n_heads": 2}
    params.write_text(json.dumps(sizes))
    refused(read, "params.json: norm_eps: is missing")
    params.write_text(json.dumps(sizes | {"norm_eps": 1e-5}))
    torch.save({"tok_embeddings.weight": 7}, first)
    refused(read, "it has no tok_embeddings.weight")
    torch.save({"tok_embeddings.weight": torch.zeros(4, 32)}, first)
    refused(read, "has no layers.0.attention.wq.weight")
    shutil.rmtree(folder)
    save_meta(folder, random_tensors(CONFIG), 2, by_vocab=False)
    second = folder / "consolidated.01.pth"
    moved = second.rename(folder / "elsewhere")
    refused(read, f"{second} is missing: there are 1 of 2")
    moved.rename(second)
    first.write_bytes(first.read_bytes()[:-2000])
    refused(read, f"{first} is missing, truncated or damaged")
    first.unlink()
    refused(read, f"{first} is missing")


@pytest.mark.parametrize("function", [shutil.copyfile, os.rename])
def test_nothing_in_a_file_runs(function: Callable[..., Any], tmp_path: Path) -> None:
    folder, planted = tmp_path / "meta", tmp_path / "planted"
    save_meta(folder, random_tensors(CONFIG), 1, by_vocab=True)
    path, bait = folder / "consolidated.00.pth", tmp_path / "bait"
    bait.touch()
    content = torch.load(path) | {"harm": Harmful(function, str(bait), str(planted))}
    torch.save(content, path)
    if function is os.rename:  # torch accepts nothing from such modules under any name
        refused(lambda: open_meta(folder), "names code")
    else:
        assert open_meta(folder).config == CONFIG
    assert not planted.exists()
    torch.load(path, weights_only=False)
    assert planted.exists(), "the test plants nothing"
