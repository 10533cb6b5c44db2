"""The strategies that a run may have: by nodes that may be lost, outer steps and rotation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from model.config import LlamaConfig
from paro.errors import UserError, count_text
from paro.spec.outer_steps import OuterConfig
from paro.strategy import FLAG, Strategy, strategy_of
from paro.topology import count_nodes, divisors

MUON_CONFLICT = (
    "--optimizer muon needs whole matrices, and --paro-materialize rotate cuts them along columns "
    "too: leave one of them out"
)

# [Note: copies of shards]
# A shard at degree d is on every d-th rank: shard s on the ranks s, s + d, s + 2d, ... No state is
# sharded more finely than the optimizer's (`is_legal`), so its master parameters and moments have
# the fewest copies: where they survive, so do the parameters. Gradients are computed again. With
# the degrees (m, m, d) in groups of m ranks, m | d | n and r = n / d copies, a rank sends of V
# bytes of gradients and W of parameters
#
#     (1/m - 1/d) V + 2 (r - 1) / (r d) V + (1/m - 1/d) W = (V + W) / m + (V - W) / d - 2 V / n
#
# between groups: the same for every d if gradients are sent in the type of the parameters.


@dataclass(frozen=True, slots=True)
class Survival:
    """The number of any ranks, and of any nodes, that may be lost with every state still held."""

    ranks: int
    nodes: int
    alone: bool = False  # True: of groups that train alone one is left whole, with the anchor

    def describe(self) -> str:
        """Describe the ranks and nodes that may be lost."""
        if self.ranks == 0:
            return "no rank may be lost: each optimizer shard is on one"
        nodes = f" or {count_text(self.nodes, 'node')}" if self.nodes else ", but no node,"
        held = "a group and the anchor" if self.alone else "every state"
        return f"any {count_text(self.ranks, 'rank')}{nodes} may be lost with {held} held"


class StrategyLimits(NamedTuple):
    """Limits of a run's strategies: its ranks, groups and nodes, and its outer steps."""

    world_size: int
    group_size: int
    ranks_per_node: int
    survive: int  # number of nodes that may be lost at once without losing any state
    outer: OuterConfig | None = None  # outer steps between groups; None: ranks are synchronous

    def check_nodes(self) -> None:
        """Raise `UserError` unless some node is left when `survive` are lost."""
        num_nodes = count_nodes(self.world_size, self.ranks_per_node)
        if 0 < num_nodes <= self.survive:
            raise UserError(
                f"--paro-survive {self.survive}: the {count_text(self.world_size, 'rank')} are on "
                f"{count_text(num_nodes, 'node')}, of which at most {num_nodes - 1} can be lost"
            )

    def survival(self, strategy: Strategy) -> Survival:
        """Count the losses that a strategy survives on nodes of consecutive ranks.

        Of groups that train alone, each holds the parameters on which groups agreed, with which a
        lost group begins again.
        """
        alone = self.outer is not None
        degree = max(strategy.optim, self.group_size if alone else 1)
        nodes = _fewest_nodes(degree, self.world_size, self.ranks_per_node) - 1
        return Survival(ranks=self.world_size // degree - 1, nodes=nodes, alone=alone)

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
        reason = self.loss_reason(strategy) or self._outer_reason(strategy)
        if reason is None and rotated is not None:
            reason = self._rotation_reason(strategy, rotated)
        return reason

    def _outer_reason(self, strategy: Strategy) -> str | None:
        """Say why groups cannot train alone under a strategy; None if they can, or need not."""
        group_size, outer = self.group_size, self.outer
        if outer is None or strategy.optim <= group_size:
            return None
        degrees = (min(degree, group_size) for degree in strategy.degrees)
        inside = strategy_of(*degrees, world_size=self.world_size, group_size=group_size)
        return (
            f"--paro-outer-steps {outer.outer_steps}: groups of {count_text(group_size, 'rank')} "
            f"train alone, and under {FLAG} {strategy.name} optimizer state is sharded over "
            f"{strategy.optim} ranks: give {FLAG} {inside.name}"
        )

    def _rotation_reason(self, strategy: Strategy, config: LlamaConfig) -> str | None:
        """Say why a model's weights cannot rotate under a strategy; None if they can.

        Weights rotate only inside groups, and only if each matrix has a slice for every ring rank.
        """
        degree = strategy.params
        if (conflict := rotation_conflict(config)) is not None:
            return conflict
        if not 1 < degree == strategy.grads <= self.group_size:
            return (
                "--paro-materialize rotate needs params and grads sharded over the same 2 or more "
                f"ranks of a group: {FLAG} {strategy.name} shards them over {degree} and "
                f"{strategy.grads}, in groups of {self.group_size} of the {self.world_size} ranks; "
                "use III or IIG in groups of 2 or more (--paro-group-size)"
            )
        heads, groups = config.num_attention_heads, config.num_query_groups
        if heads % degree or groups % degree:
            common = math.gcd(heads, groups, self.world_size)
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


@cache
def _fewest_nodes(degree: int, world_size: int, ranks_per_node: int) -> int:
    """Count the nodes that hold the optimizer shard which fewest nodes hold."""
    return min(
        len({rank // ranks_per_node for rank in range(shard, world_size, degree)})
        for shard in range(degree)
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
