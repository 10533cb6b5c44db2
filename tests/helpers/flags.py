"""Configurations: small LLaMA models, and runs as the entry script takes them from flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from model.config import LlamaConfig
from paro.arguments.parser import parse_args
from paro.config.run import RunConfig, configure, take_world
from paro.distributed.world import World


def configured(flags: str | Sequence[str], world: World | None = None) -> RunConfig:
    """A run on the ranks of `world`: by default those of its dry run, or one process."""
    args = parse_args(flags.split() if isinstance(flags, str) else flags)
    return configure(args, world or take_world(args))


Heads = tuple[int, int, int]  # of queries, of keys and values, and channels of each


def llama(
    layers: int, hidden: int, ffn: int, *, heads: Heads, length: int, vocab: int, **more: Any
) -> LlamaConfig:
    """Makes a configuration of these sizes."""
    names = (field.name for field in fields(LlamaConfig))
    values = (layers, hidden, ffn, *heads, length, vocab)
    sizes: dict[str, Any] = dict(zip(names, values, strict=False))
    return LlamaConfig(**sizes, **more)
