"""A LLaMA-3's parameters by torchtitan's names, and their checkpoints by ranks that share them."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from model.config import LlamaConfig
from paro.spec.states import MOMENTS


class _Parts(nn.Module):
    """A module of named parts, which computes nothing."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def _block(config: LlamaConfig, *, older: bool) -> nn.Module:
    hidden, ffn, head = config.hidden_size, config.ffn_hidden_size, config.kv_channels
    queries, keys = head * config.num_attention_heads, head * config.num_query_groups
    linear, norm = partial(nn.Linear, bias=False), partial(nn.RMSNorm, hidden)
    inputs = {"wq": linear(hidden, queries), "wk": linear(hidden, keys), "wv": linear(hidden, keys)}
    inside = inputs if older else {"qkv_linear": _Parts(**inputs)}
    return _Parts(
        attention=_Parts(**inside, wo=linear(queries, hidden)),
        feed_forward=_Parts(w1=linear(hidden, ffn), w2=linear(ffn, hidden), w3=linear(hidden, ffn)),
        attention_norm=norm(),
        ffn_norm=norm(),
    )


def titan_llama(config: LlamaConfig, *, older: bool) -> Any:
    """Makes the parameters of a LLaMA-3; `older`: with torchtitan 0.2's names."""
    hidden, rows = config.hidden_size, config.vocab_size
    blocks = {str(n): _block(config, older=older) for n in range(config.num_layers)}
    return _Parts(
        tok_embeddings=nn.Embedding(rows, hidden),
        layers=_Parts(**blocks),
        norm=nn.RMSNorm(hidden),
        **{"output" if older else "lm_head": nn.Linear(hidden, rows, bias=False)},
    )


def load_from(folder: Path, model: Any) -> None:
    """Fills a model's parameters, sharded or not, as torchtitan does from a model-only folder."""
    state = model.state_dict()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    model.load_state_dict(state)


def save(folder: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, checkpoint_id=folder, no_dist=not dist.is_initialized())


def training_states(model: dict[str, Tensor]) -> dict[str, Any]:
    """Return a training checkpoint's entries beside the model, by name, with arbitrary values."""
    moments = {f"state.{name}.{kind}": t.clone() for name, t in model.items() for kind in MOMENTS}
    steps = {f"state.{name}.step": torch.tensor(3.0) for name in model}
    rates = {f"param_groups.{name}.lr": 0.1 for name in model}
    return {
        "optimizer": {**moments, **steps, **rates},
        "lr_scheduler": {"last_epoch": 3},
        "dataloader": {"dp_rank_0": b"state", "world_size": 2},
        "train_state": {"step": 3, "ntokens_seen": torch.tensor(99)},
    }


# Rows and columns that tensor parallelism cuts.
_CUT = {
    **dict.fromkeys(("attention.wq", "feed_forward.w1", "feed_forward.w3"), ColwiseParallel()),
    **dict.fromkeys(("attention.wo", "feed_forward.w2"), RowwiseParallel()),
}


def load_and_save(cases: dict[str, tuple[LlamaConfig, bool]], root: Path) -> None:
    """On each rank: loads each case's folder into its shards and saves a training with them.

    A case is its configuration, and whether its names are older: then tensor parallelism cuts it,
    and in the saved checkpoint its names begin with `model.`; else FSDP2 cuts it.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, (config, older) in cases.items():
        model = titan_llama(config, older=older)
        for block in model.layers.children():
            if older:
                parallelize_module(block, mesh, _CUT)
            else:
                fully_shard(block, mesh=mesh)
        if not older:
            fully_shard(model, mesh=mesh)
        load_from(root / name, model)
        state = model.state_dict()
        named = {"model": state} if older else state
        save(root / f"{name}-saved", {**training_states(state), **named})
