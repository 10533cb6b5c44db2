"""LLaMA-3 in plain torch with torchtitan's names, and its checkpoints by ranks that share it."""

from __future__ import annotations

import warnings
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
from torch.nn.functional import scaled_dot_product_attention, silu

from model.config import LlamaConfig
from paro.spec.states import MOMENTS


class _Attention(nn.Module):
    """Causal attention whose queries and keys rotate in pairs of neighbouring channels."""

    def __init__(self, config: LlamaConfig, *, older: bool) -> None:
        super().__init__()
        hidden, self.head = config.hidden_size, config.kv_channels
        queries, keys = (
            self.head * heads for heads in (config.num_attention_heads, config.num_query_groups)
        )
        holder = self if older else nn.Module()
        for name, rows in {"wq": queries, "wk": keys, "wv": keys}.items():
            setattr(holder, name, nn.Linear(hidden, rows, bias=False))
        if not older:
            self.qkv_linear = holder
        self.wo = nn.Linear(queries, hidden, bias=False)

    def forward(self, x_BSD: Tensor, turns_SH: Tensor) -> Tensor:
        holder = getattr(self, "qkv_linear", self)
        split = (each(x_BSD).unflatten(-1, (-1, self.head)) for each in self._parts(holder))
        q, k, v = (each.transpose(1, 2) for each in split)
        q, k = (_turned(each, turns_SH) for each in (q, k))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: Tensor = self.wo(out.transpose(1, 2).flatten(2))
        return result

    @staticmethod
    def _parts(holder: Any) -> tuple[nn.Module, ...]:
        return holder.wq, holder.wk, holder.wv


def _turned(x_BNSH: Tensor, turns_SH: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x_BNSH.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns_SH).flatten(-2)


class _FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.ffn_hidden_size, bias=False)
        self.w2 = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.ffn_hidden_size, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        result: Tensor = self.w2(silu(self.w1(x_BSD)) * self.w3(x_BSD))
        return result


class _Block(nn.Module):
    def __init__(self, config: LlamaConfig, *, older: bool) -> None:
        super().__init__()
        self.attention = _Attention(config, older=older)
        self.feed_forward = _FeedForward(config)
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.norm_epsilon)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, config.norm_epsilon)

    def forward(self, x_BSD: Tensor, turns_SH: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), turns_SH)
        result: Tensor = x_BSD + self.feed_forward(self.ffn_norm(x_BSD))
        return result


class TitanLlama(nn.Module):
    """A LLaMA-3 without scaled positions; `older`: parameters are named as in torchtitan 0.2."""

    def __init__(self, config: LlamaConfig, *, older: bool) -> None:
        super().__init__()
        self.config, self.last = config, "output" if older else "lm_head"
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        blocks = {str(n): _Block(config, older=older) for n in range(config.num_layers)}
        self.layers = nn.ModuleDict(blocks)
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_epsilon)
        output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.add_module(self.last, output)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        head = self.config.kv_channels
        frequencies = self.config.rotary_base ** -(torch.arange(0, head, 2).float() / head)
        angles_SH = torch.outer(torch.arange(tokens_BS.shape[1]).float(), frequencies)
        turns_SH = torch.polar(torch.ones_like(angles_SH), angles_SH)
        x_BSD = self.tok_embeddings(tokens_BS)
        for block in self.layers.values():
            x_BSD = block(x_BSD, turns_SH)
        result: Tensor = self.get_submodule(self.last)(self.norm(x_BSD))
        return result


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
        model = TitanLlama(config, older=older)
        for block in model.layers.values():
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
