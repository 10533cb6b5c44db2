"""What may be lost: every subset of nodes by brute force, and copies that cost no traffic."""

from __future__ import annotations

from itertools import combinations

import pytest

from paro.planning.search_space import legal_strategies
from paro.planning.sending import Sender, traffic_of
from paro.planning.survival import survival
from paro.precision import BYTES_OF, PrecisionConfig
from paro.spec.sharding_spec import specs_of
from paro.strategy import parse_strategy
from paro.topology import make_topology
from tests.paro.planning.test_cost_model import moves, one_unit


def held_without(lost: set[int], degrees: tuple[int, ...], world_size: int) -> bool:
    """Whether the other ranks hold every shard of every degree, by the topology's own offsets."""
    topology = make_topology(world_size=world_size, group_size=1, degrees=degrees)
    for degree in degrees:
        held = {topology.shard_start(rank, degree, world_size) for rank in range(world_size)}
        left = {
            topology.shard_start(rank, degree, world_size)
            for rank in range(world_size)
            if rank not in lost
        }
        if left != held:
            return False
    return True


def most_lost(parts: list[set[int]], degrees: tuple[int, ...], world_size: int) -> int:
    """The largest number of parts any of which may be lost at once."""
    for number in range(1, len(parts) + 1):
        for some in combinations(parts, number):
            if not held_without(set().union(*some), degrees, world_size):
                return number - 1
    raise AssertionError("all ranks can be lost")


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(2, 4), (4, 2), (3, 2), (1, 4), (2, 3)])
def test_it_is_the_most_that_any_loss_leaves_whole(num_nodes: int, ranks_per_node: int) -> None:
    world_size = num_nodes * ranks_per_node
    ranks = [{rank} for rank in range(world_size)]
    nodes = [
        set(range(first, first + ranks_per_node)) for first in range(0, world_size, ranks_per_node)
    ]
    for strategy in legal_strategies(world_size, ranks_per_node):
        found = survival(strategy, world_size=world_size, ranks_per_node=ranks_per_node)
        assert found.ranks == most_lost(ranks, strategy.degrees, world_size), strategy
        assert found.nodes == most_lost(nodes, strategy.degrees, world_size), strategy


def test_groups_need_not_be_nodes() -> None:
    strategy = parse_strategy("III", world_size=16, group_size=2)
    assert survival(strategy, world_size=16, ranks_per_node=4).nodes == 3
    strategy = parse_strategy("2,2,6", world_size=12, group_size=2)  # shard 0 is on ranks 0 and 6
    assert survival(strategy, world_size=12, ranks_per_node=4).nodes == 1
    assert survival(strategy, world_size=12, ranks_per_node=8).nodes == 0


@pytest.mark.parametrize(
    "precision",
    [
        PrecisionConfig(compute="fp32"),
        PrecisionConfig(compute="bf16"),
        PrecisionConfig(compute="bf16", grad_reduce_in_bf16=True),
    ],
    ids=PrecisionConfig.describe,
)
def test_copies_of_optimizer_shards_send_what_the_formula_says(precision: PrecisionConfig) -> None:
    numel, ranks, group = 64 * 48, 8, 2
    grads, params = numel * BYTES_OF[precision.wire], numel * BYTES_OF[precision.compute]
    sent, nodes = {}, {}
    for degree in (2, 4, 8):
        topology = make_topology(world_size=ranks, group_size=group, degrees=(group, degree))
        strategy = parse_strategy(f"2,2,{degree}", world_size=ranks, group_size=group)
        specs = specs_of(one_unit(numel), strategy, topology, precision)
        sent[degree] = traffic_of(moves(3), specs, Sender(group_size=group, rank=None)).inter
        nodes[degree] = survival(strategy, world_size=ranks, ranks_per_node=group).nodes
        copies = (grads + params) / group + (grads - params) / degree - 2 * grads / ranks
        assert sent[degree] == copies
    assert nodes == {2: 3, 4: 1, 8: 0}
    if grads == params:
        assert sent[2] == sent[4] == sent[8] > 0


def test_a_description_names_ranks_and_nodes() -> None:
    def text(name: str, group_size: int) -> str:
        strategy = parse_strategy(name, world_size=8, group_size=group_size)
        return survival(strategy, world_size=8, ranks_per_node=4).describe()

    assert text("IIG", 4) == "no rank may be lost: each optimizer shard is on one"
    assert text("III", 4) == "any 1 rank or 1 node may be lost with every state held"
    assert text("III", 2) == "any 3 ranks or 1 node may be lost with every state held"
    strategy = parse_strategy("NNI", world_size=4, group_size=2)
    alone = survival(strategy, world_size=4, ranks_per_node=4).describe()
    assert alone == "any 1 rank, but no node, may be lost with every state held"
