"""Megatron's files: fused tensors as its attention and MLP read them, arguments, refusals."""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import paro.checkpoint.convert.source
from model.config import LlamaConfig
from paro.checkpoint.convert.megatron import open_megatron, write_megatron
from tests.helpers.refusals import refused
from tests.helpers.training import llama
from tests.paro.checkpoint.convert.folders import assert_same, cut, random_tensors, source_of

BF16 = torch.bfloat16
FILE = "mp_rank_00/model_optim_rng.pt"
CONFIG = llama(
    2, 32, 40, heads=(6, 2, 8), length=64, vocab=100,
    rotary_base=500000.0, use_rope_scaling=True, rope_scaling_factor=32.0,
)  # fmt: skip
MODERN = replace(CONFIG, add_qkv_bias=True, qk_layernorm=True)
CONFIGS = {
    "mha": replace(CONFIG, num_query_groups=6, use_rope_scaling=False, rope_scaling_factor=8.0),
    "tied": replace(CONFIG, tie_embeddings_and_output_weights=True),
    "biases and norms of heads": MODERN,
    "divided positions": replace(CONFIG, rotary_seq_len_interpolation_factor=4.0),
    "muP": replace(CONFIG, use_mup=True, mup_base_hidden_size=16, mup_output_mult=2.0),
}


def saved(folder: Path, config: LlamaConfig = CONFIG) -> Path:
    folder.mkdir()
    write_megatron(source_of(config, BF16), folder, rows=128, divisible_by=128)
    return folder / "release" / FILE


def contents(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(path, weights_only=False)
    return loaded


@pytest.mark.slow("saves and loads")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("dist", [False, True], ids=["torch", "torch_dist"])
def test_every_bit_comes_back(
    config: LlamaConfig, dist: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paro.checkpoint.convert.source, "CHUNK_BYTES", 7 * 32 * 2)
    source, counted = source_of(config, BF16), []
    watched = source.with_each(lambda tensor: tensor.counted(counted.append))
    write_megatron(watched, tmp_path, rows=128, divisible_by=128, dist=dist)
    assert sum(counted) == source.num_bytes
    back = open_megatron(tmp_path)
    assert [*back.tensors] == [*source.tensors]
    assert_same(back, source)


def test_the_file_is_what_megatron_reads(tmp_path: Path) -> None:
    """The projections as megatron-core splits its fused ones, for any torch.load."""
    content = contents(saved(tmp_path / "megatron", MODERN))
    model, args = content["model"], content["args"]
    tensors = random_tensors(MODERN, torch.bfloat16)
    assert args.add_qkv_bias
    assert args.qk_layernorm
    assert (args.vocab_size, args.padded_vocab_size, args.num_query_groups) == (100, 128, 2)
    assert content["checkpoint_version"] == 3.0
    embedding = model["embedding.word_embeddings.weight"]
    assert torch.equal(embedding[:100], tensors["embedding.weight"])
    assert not embedding[100:].any()
    x_SD = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    prefix = "decoder.layers.1."
    attention = prefix + "self_attention."
    bias = model[attention + "linear_qkv.bias"]
    mixed = F.linear(x_SD, model[attention + "linear_qkv.weight"], bias)
    # [sq, ng, (np / ng + 2) * hn], split after the queries and after the key of a group.
    q, k, v = mixed.view(5, 2, -1).split([3 * 8, 8, 8], dim=2)
    for name, part in (("wq", q), ("wk", k), ("wv", v)):
        own_bias = tensors[f"blocks.1.{name.replace('w', 'b')}"]
        expected = F.linear(x_SD, tensors[f"blocks.1.{name}"], own_bias)
        torch.testing.assert_close(part.reshape(5, -1), expected, msg=name)
    gate, up = F.linear(x_SD, model[prefix + "mlp.linear_fc1.weight"]).chunk(2, dim=-1)
    torch.testing.assert_close(gate, F.linear(x_SD, tensors["blocks.1.w_gate"]))
    torch.testing.assert_close(up, F.linear(x_SD, tensors["blocks.1.w_up"]))
    for theirs, ours in (
        ("linear_qkv.layer_norm_weight", "attention_norm"),
        ("q_layernorm.weight", "q_norm"),
        ("k_layernorm.weight", "k_norm"),
    ):
        assert torch.equal(model[attention + theirs], tensors[f"blocks.1.{ours}"])


def test_other_rotations_are_refused(tmp_path: Path) -> None:
    for name, value, message in (
        ("rope_scaling_original_max_position_embeddings", 4096, "4096 ... takes 8192"),
        ("rotary_seq_len_interpolation_factor", 2.5, "2.5 ... takes a whole number"),
        ("rotary_base", 1e4 + 0.5, "--rotary-base 10000.5 ... takes a whole number"),
    ):
        source = source_of(replace(CONFIG, **{name: value}), BF16)
        write = partial(write_megatron, source, tmp_path, rows=128, divisible_by=128)
        refused(write, message)
        assert not any(tmp_path.iterdir())


def test_parts_of_different_types_lose_no_bits(tmp_path: Path) -> None:
    exact, source = source_of(CONFIG).tensors, source_of(CONFIG, BF16)
    wide = {name: exact[name] for name in ("blocks.0.wq", "blocks.1.w_gate")}
    mixed = replace(source, tensors={**source.tensors, **wide})
    write_megatron(mixed, tmp_path, rows=128, divisible_by=128)
    back = open_megatron(tmp_path).tensors
    for name, tensor in mixed.tensors.items():
        assert torch.equal(back[name].whole(torch.float32), tensor.whole(torch.float32)), name


def resave(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = contents(path)
    change(content)
    torch.save(content, path)


def test_other_contents_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enums of Megatron's modules, numpy's random state, norms under the names without fusion."""
    backends = enum.Enum("AttnBackend", "flash fused", module="megatron_elsewhere")
    module = types.ModuleType("megatron_elsewhere")
    module.AttnBackend = backends  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron_elsewhere", module)
    path = saved(tmp_path / "megatron")

    def change(content: dict[str, Any]) -> None:
        content["args"].attention_backend = backends["fused"]
        content["rng_state"] = [{"np_rng_state": np.random.RandomState(1).get_state()}]
        content["optimizer"] = {"step": torch.ones(3)}
        model: dict[str, Tensor] = content["model"]
        for layer in range(2):
            prefix = f"decoder.layers.{layer}."
            attention = prefix + "self_attention.linear_qkv.layer_norm_weight"
            model[prefix + "input_layernorm.weight"] = model.pop(attention)
            mlp = prefix + "mlp.linear_fc1.layer_norm_weight"
            model[prefix + "pre_mlp_layernorm.weight"] = model.pop(mlp)
            model[prefix + "self_attention.core_attention._extra_state"] = None  # type: ignore

    resave(path, change)
    monkeypatch.delitem(sys.modules, "megatron_elsewhere")
    tensors = random_tensors(CONFIG, torch.bfloat16)
    found = open_megatron(tmp_path / "megatron").tensors
    for name in ("blocks.0.attention_norm", "blocks.1.mlp_norm"):
        assert torch.equal(found[name].rows(0, 32), tensors[name]), name


def test_settings_that_do_nothing_there_are_left_out(tmp_path: Path) -> None:
    """Reads a numbered iteration, where other tests read a release."""
    path, factor = saved(tmp_path / "megatron"), "rotary_seq_len_interpolation_factor"
    assert getattr(contents(path)["args"], factor) is None
    unused = {"use_rope_scaling": False, "rope_scaling_factor": 4.0, "yarn_beta_fast": 16.0}
    unused |= {"use_mup": False, "mup_embedding_mult": 2.0, factor: 1}
    resave(path, lambda content: vars(content["args"]).update(unused))
    path.parents[1].rename(tmp_path / "megatron" / "iter_0000300")
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("300")
    config = open_megatron(tmp_path / "megatron").config
    assert config == replace(CONFIG, use_rope_scaling=False, rope_scaling_factor=8.0)


def test_the_end_of_a_document_is_kept_where_the_arguments_do_not_count_it(tmp_path: Path) -> None:
    path = saved(tmp_path / "megatron")

    def change(content: dict[str, Any]) -> None:
        content["args"].tokenizer_type = "NullTokenizer"
        content["args"].vocab_size = 99

    resave(path, change)
    back = open_megatron(tmp_path / "megatron")
    assert back.config.vocab_size == 100
    assert back.tensors["embedding.weight"].shape == (100, 32)
    # Since core 0.18 the argument counts it, and this other argument exists.
    resave(path, lambda content: setattr(content["args"], "null_tokenizer_eod_id", None))
    assert open_megatron(tmp_path / "megatron").config.vocab_size == 99


def test_mistakes_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "megatron"
    path, read = saved(folder), partial(open_megatron, folder)
    resave(path, lambda content: content["model"].pop("decoder.layers.1.mlp.linear_fc2.weight"))
    refused(read, "has no decoder.layers.1.mlp.linear_fc2.weight")
    resave(path, lambda content: setattr(content["args"], "num_query_groups", 3))
    refused(read, "self_attention.linear_qkv.weight is 80x32")
    resave(path, lambda content: content.pop("args"))
    refused(read, "it has no args")
    cut(path)
    refused(read, f"{path} is missing, truncated or damaged")
    path.unlink()
    refused(read, f"{path} is missing: only --ckpt-format torch")
    (folder / "latest_checkpointed_iteration.txt").unlink()
    refused(read, "holds no checkpoint of Megatron's")


OTHER = "not of this architecture:"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tensor_model_parallel_size", 10**9, "must be from 1 to 1024"),
        ("hidden_size", torch.ones(2), "is of the wrong type, it must be a whole number"),
        ("num_query_groups", 0, "must be at least 1"),
        ("norm_epsilon", float("nan"), "must be a finite number"),
        ("untie_embeddings_and_output_weights", None, "is of the wrong type"),
        ("vocab_size", -1, "-1 is not allowed, it must be 0 or more"),
        ("normalization", torch.ones(2), "normalization is a Tensor there"),
        ("normalization", "LayerNorm", f"{OTHER} normalization is"),
        ("add_bias_linear", True, f"{OTHER} add_bias_linear is"),
        ("expert_model_parallel_size", 2, f"{OTHER} expert_model_parallel_size is"),
        ("window_size", (1023, 0), f"{OTHER} window_size is"),
        ("no_rope_freq", [1, 1, 1, 0], f"{OTHER} no_rope_freq is a list"),
        ("softmax_type", "off-by-one", f"{OTHER} softmax_type is"),
        ("glu_linear_offset", 1.0, f"{OTHER} glu_linear_offset is"),
    ],
)
def test_a_wrong_argument_is_named(name: str, value: Any, message: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "megatron")
    resave(path, lambda content: setattr(content["args"], name, value))
    line = refused(lambda: open_megatron(tmp_path / "megatron"), str(path), message)
    assert name.replace("_", "-") in line.replace("_", "-")


@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.ones(()), torch.ones(3, dtype=torch.int64), torch.ones(2, 2).to_sparse(), "x"),
        torch.ones(2, 2).to(torch.float8_e4m3fn),
    ],
    ids=["scalar", "integers", "sparse", "text", "fp8"],
)
@pytest.mark.parametrize(
    "name", ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight"]
)
def test_what_can_be_no_weight_is_refused(name: str, tensor: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "megatron")
    resave(path, lambda content: content["model"].update({name: tensor}))
    refused(lambda: open_megatron(tmp_path / "megatron"), f"has no {name}")


def test_a_tensor_that_no_argument_calls_for_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "megatron")
    for name in (
        "decoder.layers.2.mlp.linear_fc2.weight",  # of one more layer
        "decoder.layers.0.self_attention.linear_qkv.bias",
        "decoder.layers.1.self_attention.core_attention.softmax_offset",
        "output_layer.bias",
    ):
        more = {name: torch.ones(8, 8)}
        resave(path, lambda content, more=more: content["model"].update(more))
        refused(lambda: open_megatron(tmp_path / "megatron"), f"{path}: ... has {name}")
        resave(path, lambda content, name=name: content["model"].pop(name))


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 20, "-1", "../../etc", "\x1b[2J"])
def test_a_wrong_tracker_is_named(text: str, tmp_path: Path) -> None:
    saved(tmp_path / "megatron")
    tracker = tmp_path / "megatron" / "latest_checkpointed_iteration.txt"
    tracker.write_text(text)
    assert refused(lambda: open_megatron(tmp_path / "megatron"), str(tracker)).isprintable()


def cut_for_two(folder: Path) -> list[Path]:
    """The files two tensor-parallel ranks would have saved, cut as megatron-core cuts layers."""
    first = folder / "release" / FILE
    whole = contents(first)
    whole["args"].tensor_model_parallel_size = 2
    paths = []
    for rank in range(2):
        model = {}
        for name, tensor in whole["model"].items():
            if "norm" in name:
                model[name] = tensor
            elif "linear_proj" in name or "linear_fc2" in name:
                model[name] = tensor.chunk(2, dim=1)[rank].clone()
            elif "linear_fc1" in name:  # gate and up of a rank
                both = [half.chunk(2)[rank] for half in tensor.chunk(2)]
                model[name] = torch.cat(both)
            else:
                model[name] = tensor.chunk(2)[rank].clone()
        path = first.parents[1] / f"mp_rank_{rank:02d}" / first.name
        path.parent.mkdir(exist_ok=True)
        torch.save(whole | {"model": model}, path)
        paths.append(path)
    return paths


def test_tensor_parallel_ranks_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "megatron", MODERN)
    _, second = cut_for_two(tmp_path / "megatron")
    monkeypatch.setattr(paro.checkpoint.convert.source, "CHUNK_BYTES", 7 * 32 * 2)
    assert_same(open_megatron(tmp_path / "megatron"), source_of(MODERN, BF16))
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    resave(second, lambda content: content["model"].update({name: torch.ones(3, 3)}))
    refused(lambda: open_megatron(tmp_path / "megatron"), f"{name} is 3x3 ... 32x24")
    second.unlink()
    missing = "mp_rank_01 ... cannot be read: No such file"
    refused(lambda: open_megatron(tmp_path / "megatron"), missing)


def test_virtual_stages_are_numbered_through(tmp_path: Path) -> None:
    """Two stages with two chunks of one layer each: the first stage has layers 0 and 2."""
    config = replace(CONFIG, num_layers=4)
    path = saved(tmp_path / "megatron", config)
    whole = contents(path)
    whole["args"].pipeline_model_parallel_size = 2
    model = whole.pop("model")
    for stage in range(2):
        chunks = {}
        for chunk in range(2):
            layer = f"layers.{2 * chunk + stage}."
            own = {n.replace(layer, "layers.0."): model[n] for n in model if layer in n}
            ends = [n for n in model if "layers." not in n and stage == chunk]
            chunks[f"model{chunk}"] = own | {n: model[n] for n in ends}
        part = path.parents[1] / f"mp_rank_00_{stage:03d}" / path.name
        part.parent.mkdir()
        torch.save(whole | chunks, part)
    path.unlink()
    path.parent.rmdir()
    assert_same(open_megatron(tmp_path / "megatron"), source_of(config, BF16))
    resave(part, lambda content: content.pop("model1"))
    refused(lambda: open_megatron(tmp_path / "megatron"), "has 2 chunks of layers")
    part.unlink()
    refused(lambda: open_megatron(tmp_path / "megatron"), "mp_rank_00_001")
