"""Letters, degrees and names of strategies; axes and nested shards; the order of units."""

from __future__ import annotations

from functools import partial
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paro.layout import (
    ALIGN,
    ParamChunk,
    make_sliced_layout,
    make_whole_layout,
    parameter_runs,
    split_range,
)
from paro.planning.search_space import legal_strategies
from paro.spec.strategy_limits import StrategyLimits
from paro.strategy import (
    LETTERS,
    effective_letters,
    is_legal,
    parse_strategy,
)
from paro.topology import make_topology, nested_range
from tests.helpers.refusals import refused

LEGAL = (
    *("NNN", "NNI", "NNG", "NII", "NIG", "NGG", "INI", "ING"),
    *("III", "IIG", "IGG", "GNG", "GIG", "GGG"),
)
ALL = ["".join(letters) for letters in product(LETTERS, repeat=3)]


@pytest.mark.parametrize("letters", sorted(set(ALL) - set(LEGAL)))
def test_refused_letters_name_a_legal_alternative(letters: str) -> None:
    better = letters[:2] + max(letters[:2], key=LETTERS.index)
    assert is_legal(better)
    assert better[:2] == letters[:2]
    parse = partial(parse_strategy, letters, world_size=8, group_size=4)
    refused(parse, f"--paro-strategy {letters} ... {better}")


@pytest.mark.parametrize("letters", LEGAL)
def test_letters_become_degrees(letters: str) -> None:
    strategy = parse_strategy(letters.lower(), world_size=8, group_size=4)
    assert strategy.name == letters
    assert strategy.degrees == tuple({"N": 1, "I": 4, "G": 8}[letter] for letter in letters)


def test_refused_texts() -> None:
    for text, world_size, group_size, complaint in (
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
    ):
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


def most_lost(parts: list[set[int]], degrees: tuple[int, ...], world_size: int) -> int:
    """The largest number of parts whose loss leaves every shard, by the topology's own offsets."""
    topology = make_topology(world_size=world_size, group_size=1, degrees=degrees)
    starts = [
        [topology.shard_start(rank, degree, world_size) for rank in range(world_size)]
        for degree in degrees
    ]
    for number in range(1, len(parts) + 1):
        for some in combinations(parts, number):
            left = {*range(world_size)}.difference(*some)
            if any({held[rank] for rank in left} != {*held} for held in starts):
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
        found = StrategyLimits(world_size, 1, ranks_per_node, survive=0).survival(strategy)
        assert found.ranks == most_lost(ranks, strategy.degrees, world_size), strategy
        assert found.nodes == most_lost(nodes, strategy.degrees, world_size), strategy


def test_groups_need_not_be_nodes() -> None:
    strategy = parse_strategy("III", world_size=16, group_size=2)
    assert StrategyLimits(16, 2, 4, survive=0).survival(strategy).nodes == 3
    strategy = parse_strategy("2,2,6", world_size=12, group_size=2)  # shard 0 is on ranks 0 and 6
    assert StrategyLimits(12, 2, 4, survive=0).survival(strategy).nodes == 1
    assert StrategyLimits(12, 2, 8, survive=0).survival(strategy).nodes == 0


# Axes, peers and nested shards


@pytest.mark.parametrize(
    ("groups", "group_size"), [(1, 1), (1, 4), (3, 1), (2, 3), (4, 4), (8, 2), (5, 6)]
)
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


# The flat order of a unit, and the chunks that a checkpoint stores


def test_matrices_first_aligned_and_padded_for_the_world() -> None:
    needs_padding = {"norm": (5,), "weight": (3, 7), "scalar": ()}
    layout = make_whole_layout(needs_padding, world_size=6)
    assert [placed.chunk.name for placed in layout.chunks] == ["weight", "norm", "scalar"]
    assert all(placed.offset % ALIGN == 0 for placed in layout.chunks)
    assert layout.matrix_stop == 24
    assert layout.numel == 48
    covered = np.zeros(layout.numel, dtype=int)
    for begin, end in layout.gaps():
        covered[begin:end] += 1
    for start in range(0, layout.numel, layout.numel // 6):
        for part in layout.chunk_ranges(start, start + layout.numel // 6):
            covered[part.offset : part.offset + part.high - part.low] += 1
    assert (covered == 1).all(), "gaps and pieces cover the buffer once"


@st.composite
def chunks_and_ranges(draw: st.DrawFn) -> tuple[ParamChunk, int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    start = tuple(draw(st.integers(0, size - 1)) for size in shape)
    extent = tuple(
        draw(st.integers(1, size - first)) for size, first in zip(shape, start, strict=True)
    )
    chunk = ParamChunk(name="p", shape=shape, offsets=start, sizes=extent)
    low = draw(st.integers(0, chunk.numel))
    return chunk, low, draw(st.integers(low, chunk.numel))


@settings(deadline=None)
@given(chunks_and_ranges())
def test_chunks_and_runs_name_a_range_in_order(case: tuple[ParamChunk, int, int]) -> None:
    chunk, low, high = case
    parameter = np.arange(int(np.prod(chunk.shape))).reshape(chunk.shape)
    cut = tuple(slice(a, a + e) for a, e in zip(chunk.offsets, chunk.sizes, strict=True))
    flat = parameter[cut].reshape(-1)

    runs = [list(range(begin, end)) for begin, end in parameter_runs(chunk, low, high)]
    assert [index for run in runs for index in run] == list(flat[low:high])

    position, parts = low, [*split_range(chunk, low, high)]
    assert len(parts) <= max(1, 2 * len(chunk.shape) - 1)
    for begin, part in parts:
        assert begin == position
        position += part.numel
        corner = tuple(slice(a, a + e) for a, e in zip(*part, strict=True))
        assert list(parameter[corner].reshape(-1)) == list(flat[begin:position])
    assert position == high


def test_a_sliced_layout_holds_every_element_once() -> None:
    shapes = {"wq": (12, 7), "bq": (12,), "wo": (7, 12), "w_up": (13, 3)}
    cuts = {"wq": 0, "bq": 0, "wo": 1, "w_up": 0}
    layout = make_sliced_layout(shapes, cuts=cuts, number=4, world_size=8)
    assert layout.numel % (8 * 8) == 0
    seen = {name: np.zeros(shape) for name, shape in shapes.items()}
    for start in range(0, layout.numel, layout.numel // 4):
        stop = start + layout.numel // 4
        for part in layout.chunk_ranges(start, stop):
            chunk = part.chunk
            assert (part.offset - start < layout.matrix_stop) == (chunk.name != "bq")
            assert (part.low, part.high) == (0, chunk.numel), "cut by the end of its slice"
            where = tuple(slice(a, a + b) for a, b in zip(chunk.offsets, chunk.sizes, strict=True))
            seen[chunk.name][where] += 1
    assert all((counts == 1).all() for counts in seen.values())
