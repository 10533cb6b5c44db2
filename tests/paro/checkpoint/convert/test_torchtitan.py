"""torchtitan's state dicts load what is written here, and what its ranks save is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import paro.checkpoint.convert.source
from model.config import LlamaConfig
from model.hugging_face import hugging_face_config
from paro.checkpoint.convert.torchtitan import open_torchtitan, write_torchtitan
from tests.helpers.ranks import run_ranks
from tests.helpers.refusals import refused
from tests.helpers.training import llama
from tests.paro.checkpoint.convert.folders import (
    assert_same,
    cut,
    logits_of,
    own_model,
    random_tensors,
    some_tokens,
    source_of,
)
from tests.paro.checkpoint.convert.test_round_trip import interleaved
from tests.paro.checkpoint.convert.titan_llama import (
    load_and_save,
    load_from,
    save,
    titan_llama,
    training_states,
)
from tests.tools.conftest import convert

# Sizes that two ranks cannot halve, and query groups.
GROUPED = llama(
    3, 36, 41, heads=(6, 2, 6), length=64, vocab=101, rotary_base=500000.0, norm_epsilon=1e-5
)
TIED = llama(
    1, 32, 48, heads=(4, 4, 8), length=64, vocab=37, tie_embeddings_and_output_weights=True
)
SCALED = llama(1, 32, 40, heads=(4, 2, 8), length=64, vocab=37, use_rope_scaling=True)
CASES = {"grouped": (GROUPED, False), "tied": (TIED, False), "older": (SCALED, True)}


def written(folder: Path, config: LlamaConfig, *, older: bool = False) -> Path:
    folder.mkdir()
    write_torchtitan(source_of(config), folder, older=older)
    return folder


@pytest.mark.ranks
@pytest.mark.slow("imports FSDP2")
def test_every_bit_goes_through_sharded_ranks_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks load each folder into shards, and save a training of them, by old and new names."""
    monkeypatch.setattr(paro.checkpoint.convert.source, "CHUNK_BYTES", 5 * 36 * 4)
    for name, (config, older) in CASES.items():
        written(tmp_path / name, config, older=older)
    run_ranks(load_and_save, 2, CASES, tmp_path)
    for name, (config, _) in CASES.items():
        back = open_torchtitan(tmp_path / f"{name}-saved", tmp_path / name / "hugging_face")
        assert_same(back, source_of(config))


@pytest.mark.parametrize("older", [False, True])
def test_every_parameter_is_where_torchtitan_has_it(older: bool, tmp_path: Path) -> None:
    """There queries and keys rotate in pairs of neighbouring channels."""
    model = titan_llama(GROUPED, older=older)
    load_from(written(tmp_path / "titan", GROUPED, older=older), model)
    own, head = random_tensors(GROUPED), GROUPED.kv_channels
    inputs = "attention." if older else "attention.qkv_linear."
    of_block = {
        f"{inputs}wq": interleaved(own["blocks.1.wq"], head),
        f"{inputs}wk": interleaved(own["blocks.1.wk"], head),
        f"{inputs}wv": own["blocks.1.wv"],
        "attention.wo": own["blocks.1.wo"],
        "feed_forward.w1": own["blocks.1.w_gate"],
        "feed_forward.w2": own["blocks.1.w_down"],
        "feed_forward.w3": own["blocks.1.w_up"],
        "attention_norm": own["blocks.1.attention_norm"],
        "ffn_norm": own["blocks.1.mlp_norm"],
    }
    for name, values in {
        "tok_embeddings": own["embedding.weight"],
        "norm": own["head.norm"],
        "output" if older else "lm_head": own["head.weight"],
        **{f"layers.1.{name}": values for name, values in of_block.items()},
    }.items():
        assert torch.equal(model.state_dict()[f"{name}.weight"], values), name


@pytest.mark.verify
@pytest.mark.parametrize("fused", [False, True])
def test_torchtitans_own_model_loads_it_and_its_training_is_read(
    fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 0.3.0 on a CPU, with torch's attention in place of FlexAttention."""
    install = "pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3 torchdata tyro"
    install += " docstring_parser typeguard einops"
    titan: Any = pytest.importorskip("torchtitan.models.llama3", reason=install)
    parts: Any = pytest.importorskip("torchtitan.models.common")
    attention: Any = pytest.importorskip("torchtitan.models.common.attention")
    base: Any = pytest.importorskip("torchtitan.components.checkpointer.base")
    optimizer: Any = pytest.importorskip("torchtitan.components.optimizer")
    plain = attention.ScaledDotProductAttention.Config()
    monkeypatch.setattr(titan, "get_attention_config", lambda _: plain)
    config = replace(GROUPED, use_rope_scaling=True)
    head, length, theta = config.kv_channels, config.max_position_embeddings, config.rotary_base
    rope = parts.ComplexRoPE.Config(dim=head, max_seq_len=length, theta=theta, scaling="llama")
    sizes = {"num_embeddings": config.vocab_size, "embedding_dim": config.hidden_size}
    model = titan.Llama3Model.Config(
        dim=config.hidden_size,
        vocab_size=config.vocab_size,
        tok_embeddings=parts.Embedding.Config(**sizes),
        norm=parts.RMSNorm.Config(normalized_shape=config.hidden_size),
        lm_head=parts.Linear.Config(in_features=config.hidden_size, out_features=config.vocab_size),
        layers=titan._build_llama3_layers(
            n_layers=config.num_layers,
            dim=config.hidden_size,
            n_heads=config.num_attention_heads,
            n_kv_heads=config.num_query_groups,
            hidden_dim=config.ffn_hidden_size,
            rope=rope,
            attn_backend="",
            fuse_qkv=fused,
        ),
    ).build()
    folder = written(tmp_path / "titan", config)
    wrapper = base.ModelWrapper(model)  # its state dict is that of the checkpoint
    load_from(folder, wrapper)
    tokens = some_tokens(config.vocab_size)
    theirs, ours = logits_of(model, tokens), logits_of(own_model(source_of(config)), tokens)
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-5 * float(theirs.abs().max()))
    adamw = optimizer.default_adamw()
    adamw.implementation = "for-loop"
    trained = {"optimizer": adamw.build(model_parts=[model])}
    save(tmp_path / "training", {**training_states({}), **trained, **wrapper.state_dict()})
    back = open_torchtitan(tmp_path / "training", folder / "hugging_face")
    assert_same(back, source_of(config))


def test_a_tied_output_layer_is_stored_and_tied_again_where_it_is_equal(tmp_path: Path) -> None:
    folder = tmp_path / "titan"
    folder.mkdir()
    (note,) = write_torchtitan(source_of(TIED), folder, older=True)
    assert "tied" in note
    source = open_torchtitan(folder)
    assert_same(source, source_of(TIED))
    model = titan_llama(TIED, older=True)
    load_from(folder, model)
    state = model.state_dict()
    state["output.weight"] = state["output.weight"].flip(0)
    save(tmp_path / "other", state)
    source = open_torchtitan(tmp_path / "other", folder / "hugging_face")
    assert not source.config.tie_embeddings_and_output_weights
    assert "output.weight: the output layer is not tied" in source.notes[0]
    head = source.tensors["head.weight"].whole(torch.float32)
    assert torch.equal(head, state["output.weight"])


def test_the_tool_converts_there_and_back(tmp_path: Path) -> None:
    there = written(tmp_path / "titan", SCALED)
    paro = convert("torchtitan", "paro", there, tmp_path / "paro")
    back = convert("paro", "torchtitan-0.2", paro, tmp_path / "back")
    assert_same(open_torchtitan(back), source_of(SCALED))
    load_from(back, titan_llama(SCALED, older=True))


State = dict[str, Any]
WQ, WK = (f"layers.0.attention.qkv_linear.{part}.weight" for part in ("wq", "wk"))


def _with(name: str, tensor: Tensor) -> Callable[[State], object]:
    return lambda state: state.update({name: tensor})


@pytest.mark.slow("saves and loads")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop(WK), f"has no {WK}"),
        (lambda state: state.pop("norm.weight"), "has no norm.weight"),
        (_with("layers.0.attention.wo.bias", torch.zeros(32)), "wo.bias ... has not"),
        (_with("layers.1.ffn_norm.weight", torch.zeros(32)), "layers.1.ffn_norm.weight"),
        (_with("output.weight", torch.zeros(37, 32)), "output.weight ... has not"),
        (_with("model.norm.weight", torch.zeros(32)), "both are norm.weight"),
        (_with(WQ, torch.zeros(31, 32)), f"{WQ} ... 31x32 ... 32x32"),
        (_with("norm.weight", torch.tensor(1.0)), "norm.weight is a scalar"),
        (_with("norm.weight", torch.zeros(32, dtype=torch.int8)), "norm.weight is int8"),
    ],
)
def test_a_tensor_that_is_wrong_is_named(
    change: Callable[[State], object], message: str, tmp_path: Path
) -> None:
    model = titan_llama(SCALED, older=False)
    state: State = {**model.state_dict(), "freqs_cis": torch.zeros(3, dtype=torch.complex64)}
    state |= training_states(model.state_dict())
    assets = tmp_path / "assets"
    assets.mkdir()
    (assets / "config.json").write_text(json.dumps(hugging_face_config(SCALED)))
    save(tmp_path / "whole", state)
    assert open_torchtitan(tmp_path / "whole", assets).config == SCALED
    change(state)
    save(tmp_path / "titan", state)
    refused(partial(open_torchtitan, tmp_path / "titan", assets), f"{tmp_path / 'titan'}", message)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (".metadata", Path.unlink, "has no .metadata ... step-1000"),
        ("__0_0.distcp", cut, "__0_0.distcp is truncated"),
        ("hugging_face/config.json", Path.unlink, "config.json is missing ... --hf-assets-path"),
        ("hugging_face/config.json", lambda p: p.write_text("{"), "config.json is not valid JSON"),
    ],
)
def test_a_file_that_is_missing_or_damaged_is_named(
    name: str, damage: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    folder = written(tmp_path / "titan", SCALED)
    damage(folder / name)
    refused(partial(open_torchtitan, folder), message)


def test_models_that_llama3_cannot_be_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "there", SCALED)
    path = folder / "hugging_face/config.json"
    (tmp_path / "titan").mkdir()
    for name, value in (
        ("add_qkv_bias", True),
        ("qk_layernorm", True),
        ("rotary_seq_len_interpolation_factor", 4.0),
    ):
        config, flag = replace(GROUPED, **{name: value}), f"--{name.replace('_', '-')}"
        write = partial(write_torchtitan, source_of(config), tmp_path / "titan", older=False)
        refused(write, "--to torchtitan", flag)
        path.write_text(json.dumps(hugging_face_config(config)))
        refused(partial(open_torchtitan, folder), f"{path}", flag)


def test_flags_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for source, target, words, message in (
        ("torchtitan", "paro", "--with-optimizer", "--with-optimizer"),
        ("torchtitan", "torchtitan", "--padded-vocab-size 99", "--padded-vocab-size 99"),
        ("hf", "torchtitan", "--hf-assets-path x", "--hf-assets-path x ... --from torchtitan"),
    ):
        refused(
            partial(convert, source, target, tmp_path, tmp_path / "out", *words.split()), message
        )
        assert not (tmp_path / "out").exists()
