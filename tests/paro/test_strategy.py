"""Letter strategies, degrees and names; axes, peers and nested shards of every shape."""

from __future__ import annotations

from functools import partial
from itertools import combinations, pairwise, product

import pytest

from paro.planning.search_space import legal_strategies
from paro.planning.sending import Sender, traffic_of
from paro.precision import BYTES_OF, PrecisionConfig
from paro.spec.sharding_spec import specs_of
from paro.strategy import (
    LETTERS,
    dominating_letters,
    effective_letters,
    is_legal,
    parse_strategy,
    survival,
)
from paro.topology import Link, make_topology, nested_range
from tests.helpers.refusals import refused
from tests.paro.planning.on_ranks import moves, one_unit

LEGAL = (
    *("NNN", "NNI", "NNG", "NII", "NIG", "NGG", "INI", "ING"),
    *("III", "IIG", "IGG", "GNG", "GIG", "GGG"),
)
ALL = ["".join(letters) for letters in product(LETTERS, repeat=3)]


@pytest.mark.parametrize("letters", sorted(set(ALL) - set(LEGAL)))
def test_refused_letters_name_a_legal_alternative_with_the_same_params_and_grads(
    letters: str,
) -> None:
    better = dominating_letters(letters)
    assert is_legal(better)
    assert better[:2] == letters[:2]
    parse = partial(parse_strategy, letters, world_size=8, group_size=4)
    refused(parse, f"--paro-strategy {letters} ... {better}")


@pytest.mark.parametrize("letters", LEGAL)
def test_letters_become_degrees(letters: str) -> None:
    strategy = parse_strategy(letters.lower(), world_size=8, group_size=4)
    assert strategy.name == letters
    assert strategy.degrees == tuple({"N": 1, "I": 4, "G": 8}[letter] for letter in letters)


@pytest.mark.parametrize(
    ("name", "letters"),
    [("ddp", "NNN"), ("zero1", "NNG"), ("ZeRO2", "NGG"), ("zero3", "GGG"), ("hsdp", "III")],
)
def test_known_names(name: str, letters: str) -> None:
    assert parse_strategy(name, world_size=8, group_size=2).name == letters


def test_degrees() -> None:
    strategy = parse_strategy("2, 4, 8", world_size=8, group_size=4)
    assert (strategy.name, strategy.degrees) == ("2,4,8", (2, 4, 8))


@pytest.mark.parametrize(
    ("text", "world_size", "group_size", "complaint"),
    [
        ("XYZ", 8, 4, "unknown"),
        ("NN", 8, 4, "unknown"),
        ("1,a,2", 8, 4, "unknown"),
        ("0,1,2", 8, 4, "unknown"),
        ("1,3,6", 8, 4, "3 does not divide the 8 ranks"),
        ("4,2,2", 8, 4, "not legal ... 4,2,4"),
        ("2,2,6", 6, 3, "2 does not divide 3"),
        # Letters are judged as letters where levels coincide.
        ("IIN", 8, 1, "not legal"),
        ("IIN", 8, 8, "not legal"),
        *(("IIG", 8, n, f"--paro-group-size {n} ... one of 1, 2, 4, 8") for n in (0, 3, 16, -2)),
    ],
)
def test_refused_texts(text: str, world_size: int, group_size: int, complaint: str) -> None:
    parse = partial(parse_strategy, text, world_size=world_size, group_size=group_size)
    refused(parse, complaint)


def test_effective_letters_on_one_group() -> None:
    strategy = parse_strategy("IIG", world_size=4, group_size=4)
    assert effective_letters(strategy, world_size=4, group_size=4) == "GGG"
    assert effective_letters(strategy, world_size=8, group_size=4) == "III"
    alone = parse_strategy("IIG", world_size=4, group_size=1)
    assert effective_letters(alone, world_size=4, group_size=1) == "NNG"
    assert effective_letters(alone, world_size=1, group_size=1) is None
    odd = parse_strategy("2,4,8", world_size=8, group_size=4)
    assert effective_letters(odd, world_size=8, group_size=4) is None


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


# Axes, peers and nested shards

SHAPES = list(product(range(1, 9), repeat=2))


def test_usual_axes() -> None:
    topology = make_topology(world_size=6, group_size=3, degrees=(1, 3, 6))
    intra, inter = topology.axes
    assert (intra.inner, intra.outer, intra.link) == (1, 3, Link.INTRA)
    assert (inter.inner, inter.outer, inter.link) == (3, 6, Link.INTER)
    assert topology.members((intra,), 4) == (3, 4, 5)
    assert topology.members((inter,), 4) == (1, 4)
    assert topology.members((intra, inter), 4) == (0, 1, 2, 3, 4, 5)


def test_no_axis_has_size_one() -> None:
    assert make_topology(world_size=1, group_size=1, degrees=(1, 1, 1)).axes == ()
    assert len(make_topology(world_size=4, group_size=4, degrees=(1, 4, 4)).axes) == 1


@pytest.mark.parametrize(("groups", "group_size"), SHAPES)
def test_members_partition_the_world(groups: int, group_size: int) -> None:
    world = groups * group_size
    topology = make_topology(world_size=world, group_size=group_size, degrees=(1, world))
    for axis in topology.axes:
        found = {topology.members((axis,), rank) for rank in range(world)}
        assert sorted(rank for members in found for rank in members) == list(range(world))
        assert all(len(members) == axis.size for members in found)
        assert all(
            [axis.digit(rank) for rank in members] == list(range(axis.size)) for members in found
        )


@pytest.mark.parametrize(("groups", "group_size"), SHAPES)
def test_shards_tile_the_buffer_and_nest(groups: int, group_size: int) -> None:
    world = groups * group_size
    topology = make_topology(world_size=world, group_size=group_size, degrees=(world,))
    numel = world * 3
    degrees = sorted({1, group_size, world})
    for degree in degrees:
        starts = {topology.shard_start(rank, degree, numel) for rank in range(world)}
        assert sorted(starts) == list(range(0, numel, numel // degree))
    for rank in range(world):
        for coarse, fine in pairwise(degrees):
            outer = topology.shard_start(rank, coarse, numel)
            start, stop = nested_range(topology.axes_between(coarse, fine), rank, numel // coarse)
            assert stop - start == numel // fine
            assert topology.shard_start(rank, fine, numel) == outer + start
