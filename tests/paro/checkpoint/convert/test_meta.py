"""Meta's folders: channels in order, shards joined as they were cut, refusals."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import paro.checkpoint.convert.source
from model.config import LlamaConfig
from model.llama import Llama
from model.rotary import rotate, rotations
from paro.checkpoint.convert.meta import half_rotation, meta_name, open_meta
from tests.helpers.refusals import refused
from tests.paro.checkpoint.convert.folders import own_model, random_tensors
from tests.paro.checkpoint.toy_run import Harmful

CONFIG = LlamaConfig(
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=16,
    max_position_embeddings=2048,
    vocab_size=100,
    norm_epsilon=1e-5,
)
PARAMS = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5}


def interleaved(weight: Tensor, head: int) -> Tensor:
    """From halves to pairs: row 2i of a head is our row i, row 2i + 1 our row i + H/2."""
    heads = weight.view(-1, head, weight.shape[1])
    out = torch.empty_like(heads)
    out[:, 0::2], out[:, 1::2] = heads[:, : head // 2], heads[:, head // 2 :]
    return out.reshape(weight.shape)


def save_meta(folder: Path, tensors: dict[str, Tensor], num_files: int, *, by_vocab: bool) -> None:
    """As saved by Meta's model-parallel ranks: rows, columns or a copy each."""
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(PARAMS | {"vocab_size": -1}))
    files: list[dict[str, Tensor]] = [{} for _ in range(num_files)]
    for name, tensor in tensors.items():
        part = name.rpartition(".")[2]
        whole = interleaved(tensor, CONFIG.kv_channels) if part in ("wq", "wk") else tensor
        columns = part in ("wo", "w_down") or (name == "embedding.weight" and not by_vocab)
        cut = [whole] * num_files if whole.ndim == 1 else whole.chunk(num_files, int(columns))
        for file, piece in zip(files, cut, strict=True):
            file[meta_name(name)] = piece.clone()
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
    source = open_meta(tmp_path / "meta")
    assert source.config == CONFIG
    for name, tensor in tensors.items():
        pieces = [source.tensors[name].rows(*rows) for rows in source.tensors[name].row_ranges()]
        assert len(pieces) > 1 or tensor.ndim == 1
        assert torch.equal(torch.cat(pieces), tensor), name


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

    own = (x_SD @ half_rotation(weight, head).t()).view(1, length, 2, head)
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
    params.write_text("{")
    refused(read, "params.json is not valid JSON")
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
    whole = second.read_bytes()
    second.write_bytes(whole[: len(whole) // 2])
    refused(read, f"{second} is missing, truncated or damaged")
    second.unlink()
    refused(read, f"{second} is missing: there are 1 of 2")
    second.write_bytes(whole)
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
