"""The strategies that a run may have: by nodes that may be lost, outer steps and rotation."""

from __future__ import annotations

import math
from typing import NamedTuple

from model.config import LlamaConfig
from paro.spec.outer_steps import OuterConfig
from paro.strategy import FLAG, Strategy, Survival, survival
from paro.topology import divisors


class StrategyLimits(NamedTuple):
    """Limits of a run's strategies: its ranks, groups and nodes, and its outer steps."""

    world_size: int
    group_size: int
    ranks_per_node: int
    survive: int  # number of nodes that may be lost at once without losing any state
    outer: OuterConfig | None = None  # outer steps between groups; None: ranks are synchronous

    def survival(self, strategy: Strategy) -> Survival:
        """Count the ranks and nodes that may be lost under a strategy."""
        node, alone = self.ranks_per_node, None if self.outer is None else self.group_size
        return survival(strategy, world_size=self.world_size, ranks_per_node=node, alone=alone)

    def loss_reason(self, strategy: Strategy) -> str | None:
        """Say that a strategy holds too few copies of states; None if it holds enough."""
        may_lose = self.survival(strategy)
        if may_lose.nodes >= self.survive:
            return None
        return f"--paro-survive {self.survive}: under {FLAG} {strategy.name} {may_lose.describe()}"

    def infeasible_reason(self, strategy: Strategy, rotated: LlamaConfig | None) -> str | None:
        """Say why a run cannot have a strategy; None if it can.

        `rotated` is the model if its weights rotate, None if they are gathered.
        """
        sizes = {"world_size": self.world_size, "group_size": self.group_size}
        reason = self.loss_reason(strategy)
        if reason is None and self.outer is not None:
            reason = self.outer.infeasible_reason(strategy, **sizes)
        if reason is None and rotated is not None:
            reason = rotation_infeasible_reason(strategy, rotated, **sizes)
        return reason


def muon_conflict(optimizer: str, *, rotates: bool) -> str | None:
    """Say why an optimizer does not let weights rotate; None if it does, or they are gathered."""
    if optimizer != "muon" or not rotates:
        return None
    return (
        "--optimizer muon needs whole matrices, and --paro-materialize rotate cuts them along "
        "columns too: leave one of them out"
    )


def rotation_conflict(config: LlamaConfig) -> str | None:
    """Say why a model's weights cannot rotate on any number of ranks; None if they can on some."""
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
    """Say why a model's weights cannot rotate under a strategy; None if they can.

    Weights rotate only inside groups, and only if each matrix has a slice for every ring rank.
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
        some = ", ".join(map(str, divisors(common)[1:])) or "none"
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
