"""The parts of LLaMA's units that can be computed slice by slice, and how the slices are joined."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from model.config import (
    MLP_CUTS,
    VOCABULARY_CUTS,
    LlamaConfig,
    attention_cuts,
    attention_norms,
)
from model.cross_entropy import join_scores
from model.layers import shared_norm
from model.lora_config import down_name, up_name
from model.parts import SlicedPart


def _add(_module: nn.Module, slices: Iterable[Callable[..., Tensor]], *args: Any) -> Tensor:
    """The sum of the slices' partial results."""
    total: Tensor | None = None
    for run in slices:
        partial_BSD = run(*args)
        total = partial_BSD if total is None else total + partial_BSD
    assert total is not None, "no slices"
    return total


def _add_after(
    norm: str,
    epsilon: float,
    block: nn.Module,
    slices: Iterable[Callable[..., Tensor]],
    x_BSD: Tensor,
    *args: Any,
) -> Tensor:
    """The same of slices that share the norm of their input."""
    shared = shared_norm(x_BSD, getattr(block, norm), epsilon)
    out_BSD = _add(block, slices, x_BSD, *args, shared)
    shared.release()
    return out_BSD


def _join_losses(
    _head: nn.Module,
    slices: Iterable[Callable[..., tuple[Tensor, Tensor]]],
    x_BSD: Tensor,
    labels_BS: Tensor,
    token_weights_BS: Tensor,
    _weight_VD: Tensor,
) -> Tensor:
    scores = (run(x_BSD, labels_BS, token_weights_BS) for run in slices)
    return join_scores(scores, token_weights_BS)


LOOK_UP = SlicedPart(
    method="look_up", of_slice="look_up_slice", cuts=VOCABULARY_CUTS, join=_add, of_rows=True
)
LOSS = SlicedPart(
    method="loss", of_slice="score_slice", cuts=VOCABULARY_CUTS, join=_join_losses, of_rows=True
)


def block_parts(config: LlamaConfig) -> tuple[SlicedPart, ...]:
    """Attention and MLP; attention is cut between groups of queries with their keys and values."""
    attention = SlicedPart(
        method="attention",
        of_slice="attention",
        cuts=attention_cuts(config),
        replicated=attention_norms(config),
        join=partial(_add_after, "attention_norm", config.norm_epsilon),
        shares=config.num_query_groups,
    )
    mlp = SlicedPart(
        method="mlp",
        of_slice="mlp",
        cuts=MLP_CUTS,
        replicated=("mlp_norm",),
        join=partial(_add_after, "mlp_norm", config.norm_epsilon),
    )
    return _with_adapters(attention, config), _with_adapters(mlp, config)


def _with_adapters(part: SlicedPart, config: LlamaConfig) -> SlicedPart:
    """The part, whose slices read the adapters of its weights whole."""
    if config.lora is None:
        return part
    targets = [name for name in part.cuts if name in config.lora.targets]
    adapters = [of(name) for name in targets for of in (down_name, up_name)]
    return replace(part, replicated=(*part.replicated, *adapters), of_starts=True)
