"""How many ranks or nodes may be lost at once with every state still held by another."""

# A shard at degree d is on every d-th rank: shard s on the ranks s, s + d, s + 2d, ... No state is
# sharded more finely than the optimizer's (`is_legal`), so its master parameters and moments have
# the fewest copies: where they survive, so do the parameters. Gradients are computed again.
#
# More copies need not send more between groups. With the degrees (m, m, d) in groups of m ranks,
# m | d | n and r = n / d copies, a rank sends of V bytes of gradients and W bytes of parameters
#
#     (1/m - 1/d) V + 2 (r - 1) / (r d) V + (1/m - 1/d) W = (V + W) / m + (V - W) / d - 2 V / n
#
# between groups, in the step's reduction, the replicas' all-reduce and the all-gather of updated
# parameters: the same for every d if gradients are sent in the type of the parameters.

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from paro.errors import UserError, count_text
from paro.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Survival:
    """The losses at once, whichever they are, that leave a holder of every state."""

    ranks: int
    nodes: int

    def describe(self) -> str:
        """What may be lost, as text."""
        if self.ranks == 0:
            return "no rank may be lost: each optimizer shard is on one"
        nodes = f" or {count_text(self.nodes, 'node')}" if self.nodes else ", but no node,"
        return f"any {count_text(self.ranks, 'rank')}{nodes} may be lost with every state held"


def survival(strategy: Strategy, *, world_size: int, ranks_per_node: int) -> Survival:
    """What a strategy survives on nodes of consecutive ranks."""
    degree = strategy.optim
    return Survival(
        ranks=world_size // degree - 1,
        nodes=_fewest_nodes(degree, world_size, ranks_per_node) - 1,
    )


def check_nodes(survive: int, world_size: int, ranks_per_node: int) -> None:
    """Raise `UserError` unless some node is left when `survive` are lost."""
    num_nodes = -(-world_size // ranks_per_node)
    if 0 < num_nodes <= survive:
        raise UserError(
            f"--paro-survive {survive}: the {count_text(world_size, 'rank')} are on "
            f"{count_text(num_nodes, 'node')}, of which at most {num_nodes - 1} can be lost"
        )


@cache
def _fewest_nodes(degree: int, world_size: int, ranks_per_node: int) -> int:
    """Return the nodes that hold a shard at `degree`, of the shard that fewest nodes hold."""
    return min(
        len({rank // ranks_per_node for rank in range(shard, world_size, degree)})
        for shard in range(degree)
    )
