"""Small LLaMA configurations."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from model.config import LlamaConfig

Heads = tuple[int, int, int]  # of queries, of keys and values, and channels of each


def llama(
    layers: int, hidden: int, ffn: int, *, heads: Heads, length: int, vocab: int, **more: Any
) -> LlamaConfig:
    """Makes a configuration of these sizes."""
    names = (field.name for field in fields(LlamaConfig))
    values = (layers, hidden, ffn, *heads, length, vocab)
    sizes: dict[str, Any] = dict(zip(names, values, strict=False))
    return LlamaConfig(**sizes, **more)
