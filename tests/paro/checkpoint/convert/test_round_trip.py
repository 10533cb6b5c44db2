"""Hugging Face folders of all kinds: logits are those of transformers, there and back."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paro.checkpoint.convert.hugging_face import INDEX, WEIGHTS, open_hugging_face
from paro.checkpoint.convert.native import open_native
from tests.paro.checkpoint.convert.folders import (
    FAMILIES,
    hugging_face_model,
    logits_of,
    own_model,
    random_fields,
    some_tokens,
)
from tests.tools.untrained import convert

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
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


class Folder:
    """A random folder that transformers reads, and what an export of it has to hold."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.choose = random.Random(seed)
        self.fields = self._fields(seed)
        is_biased = self.fields.get("attention_bias", False)
        model = hugging_face_model(self.fields)
        self.tensors: dict[str, Tensor] = {**model.state_dict()}
        if self.fields["tie_word_embeddings"]:
            del self.tensors[HEAD]
        for name in self.tensors:
            self.tensors[name] = self.tensors[name].to(self._dtype(seed)).clone()
            if is_biased and name.endswith("o_proj.bias"):
                other = self.tensors[name.replace("o_proj", "q_proj")]
                self.tensors[name] = torch.zeros_like(self.tensors[name], dtype=other.dtype)
        self.stored = dict(self.tensors)
        if self.fields["tie_word_embeddings"]:
            self._store_head()
        path.mkdir()
        self.is_plain = self.stored.keys() == self.tensors.keys()
        (path / "config.json").write_text(json.dumps(self.fields, indent=2) + "\n")
        self._write()

    def _fields(self, seed: int) -> dict[str, Any]:
        choose, family, rope = self.choose, FAMILIES[seed % 4], ROPES[seed % len(ROPES)]
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
        if family in ("llama", "qwen3"):
            fields["attention_bias"] = bool(choose.getrandbits(1))
        return fields

    def _dtype(self, seed: int) -> torch.dtype:
        """One type for all tensors in most folders, a type for each in others."""
        if seed % 3:
            return torch.float32
        return self.choose.choice((torch.float32, torch.bfloat16, torch.float16))

    def _store_head(self) -> None:
        """A tied output layer: not stored, the same again, another, or alone."""
        how = self.choose.choice(("left out", "the same", "another", "alone"))
        if how != "left out":
            self.stored[HEAD] = self.tensors[EMBEDDING].clone()
        if how == "another":
            self.tensors[HEAD] = self.stored[HEAD] = self.stored[HEAD].flip(0).contiguous()
        if how == "alone":
            del self.stored[EMBEDDING]

    def _write(self) -> None:
        names = [*self.stored]
        self.choose.shuffle(names)
        layout = self.choose.choice(("one file", "shards", "without model."))
        if layout == "shards":
            cut = len(names) // 2
            parts = {"b.safetensors": names[:cut], "a.safetensors": names[cut:]}
            for file, part in parts.items():
                self._save(file, {name: self.stored[name] for name in part})
            places = {name: file for file, part in parts.items() for name in part}
            index = json.dumps({"metadata": {}, "weight_map": places})
            (self.path / INDEX).write_text(index)
        elif layout == "without model.":
            self._save(WEIGHTS, {n.removeprefix("model."): self.stored[n] for n in names})
        else:
            self._save(WEIGHTS, {name: self.stored[name] for name in names})
        self.is_plain = self.is_plain and layout == "one file"

    def _save(self, file: str, tensors: dict[str, Tensor]) -> None:
        save_file(tensors, self.path / file, {"format": "pt"})


# All families, all kinds of rotation; all pairs of these under `make verify`.
SEEDS = [*range(12), *(pytest.param(seed, marks=pytest.mark.verify) for seed in range(12, 30))]


@pytest.mark.slow("imports transformers")
@pytest.mark.parametrize("seed", SEEDS)
def test_logits_are_those_of_transformers(seed: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = Folder(tmp_path / "hf", seed)
    theirs = AutoModelForCausalLM.from_pretrained(folder.path, dtype=torch.float32).eval()
    tokens = some_tokens(folder.fields["vocab_size"], length=40)
    expected = logits_of(theirs, tokens)
    near = {"rtol": 0.0, "atol": 1e-5 * float(expected.abs().max())}

    paro = convert("hf", "paro", folder.path, tmp_path / "paro")
    back = convert("paro", "hf", paro, tmp_path / "back")

    ours = open_native(paro)
    assert ours.config == open_hugging_face(folder.path).config == open_hugging_face(back).config
    torch.testing.assert_close(logits_of(own_model(ours), tokens), expected, **near)
    again = AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32)
    assert torch.equal(logits_of(again, tokens), expected)
    exported = load_file(back / WEIGHTS)
    assert exported.keys() == folder.tensors.keys()
    for name, tensor in folder.tensors.items():
        assert exported[name].dtype == tensor.dtype, name
        assert torch.equal(exported[name], tensor), name
    if folder.is_plain:
        assert (back / WEIGHTS).read_bytes() == (folder.path / WEIGHTS).read_bytes()
        is_said = folder.fields["tie_word_embeddings"] == (HEAD not in folder.tensors)
        if seed % 3 and is_said:
            named = [path / "config.json" for path in (folder.path, back)]
            assert named[0].read_bytes() == named[1].read_bytes()
