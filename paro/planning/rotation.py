"""Says why the weights of a model cannot rotate, and what to change."""

from __future__ import annotations

import math

from model.config import LlamaConfig
from paro.strategy import FLAG, Strategy

MUON_ROTATES = (
    "--optimizer muon needs whole matrices, and --paro-materialize rotate cuts them along columns "
    "too: leave one of them out"
)


def rotation_conflict(config: LlamaConfig) -> str | None:
    """Why a model's weights cannot rotate on any ranks; None if they can on some."""
    if config.fp8_format is not None:
        conflict = "has no fp8, whose scales are those of whole weights: leave --fp8-format"
    elif config.torch_compile is not None:
        conflict = "computes blocks in slices, which are not compiled: leave --torch-compile"
    elif config.keeps_core:
        conflict = "recomputes attention slice by slice and keeps nothing of it: leave "
        conflict += "--paro-recompute-keep"
    else:
        return None
    return f"--paro-materialize rotate {conflict} out, or gather parameters"


def rotation_infeasible_reason(
    strategy: Strategy, config: LlamaConfig, *, world_size: int, group_size: int
) -> str | None:
    """Why a model's weights cannot rotate under a strategy, and what to change; None if they can.

    They rotate only inside groups, and only if every rank of the ring gets a slice of each matrix.
    """
    degree = strategy.params
    if (conflict := rotation_conflict(config)) is not None:
        return conflict
    if not 1 < degree == strategy.grads <= group_size:
        return (
            "--paro-materialize rotate needs params and grads sharded over the same 2 or more "
            f"ranks of a group: {FLAG} {strategy.name} shards them over {degree} and "
            f"{strategy.grads}, in groups of {group_size} of the {world_size} ranks; use III or "
            "IIG in groups of 2 or more (--paro-group-size)"
        )
    heads, groups = config.num_attention_heads, config.num_query_groups
    if heads % degree or groups % degree:
        common = math.gcd(heads, groups, world_size)
        some = ", ".join(str(d) for d in range(2, common + 1) if common % d == 0) or "none"
        return (
            f"--paro-materialize rotate over {degree} ranks cannot cut --num-attention-heads "
            f"{heads} with --num-query-groups {groups}: both must be multiples of {degree}; of "
            f"these heads, numbers of ranks that would work: {some} (--paro-group-size)"
        )
    for flag, size in (
        ("--ffn-hidden-size", config.ffn_hidden_size),
        ("--vocab-size", config.vocab_size),
    ):
        if size < degree:
            return f"{flag} {size} is too small to rotate over {degree} ranks"
    return None
