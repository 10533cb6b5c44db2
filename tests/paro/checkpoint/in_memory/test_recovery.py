"""Ranks recover from the nodes that are left: any strategy, fewer or other nodes, damaged files."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from paro.checkpoint.chunks import chunked_states
from paro.checkpoint.in_memory.folder import SnapshotFolder
from paro.checkpoint.in_memory.recovery import (
    ChunkTransfer,
    Recovery,
    SnapshotChunk,
    StateChunk,
    assign,
    offers_for,
    overlap,
    recover,
    split,
)
from paro.checkpoint.in_memory.snapshot import DATA, RECORD, SnapshotWriter
from paro.layout import Chunk
from tests.helpers.ranks import run_ranks
from tests.paro.checkpoint.toy_run import Cut, assert_true, control_here, make_shards

FLAGS = {"seed": "1"}
III = Cut(world_size=4, group_size=2, degrees=(2, 2, 2))
IIG = Cut(world_size=4, group_size=2, degrees=(2, 2, 4))
NNN = Cut(world_size=4, group_size=2, degrees=(1, 1, 1))
TWO_OF_EIGHT = Cut(world_size=8, group_size=2, degrees=(2, 2, 4))
GGG = Cut(world_size=4, group_size=4, degrees=(4, 4, 4))


def write_nodes(
    root: Path,
    cut: Cut,
    *,
    iterations: Sequence[int] = (5, 6),
    start: str = "a",
    is_true: bool = True,
    per_node: int = 2,
) -> None:
    """The snapshots that all ranks of a run left, one folder for each node."""
    for rank in range(cut.world_size):
        node = rank // per_node
        folder = root / f"node{node}"
        folder.mkdir(parents=True, exist_ok=True)
        near = range(node * per_node, (node + 1) * per_node)
        states = chunked_states(make_shards(cut, rank, filled=is_true), writers=near)
        name = f"rank-{rank:05d}-{start}"
        writer = SnapshotWriter(folder, name=name, rank=rank, states=states, flags=FLAGS)
        for iteration in iterations:
            writer.write(iteration, {"at": iteration}, Tensor.copy_)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank got."""

    found: Recovery | None
    lines: list[str]
    own_bytes: int = 0
    left: list[str] = field(default_factory=list)  # files of its node


def recover_on(
    root: Path, cut: Cut, nodes: Sequence[int], *, newer_than: int = -1, flags: object = None
) -> Outcome:
    """On this rank, which runs on node `nodes[rank]`."""
    rank = dist.get_rank()
    near = tuple(each for each, node in enumerate(nodes) if node == nodes[rank])
    path = root / f"node{nodes[rank]}"
    path.mkdir(exist_ok=True)
    shards = make_shards(cut, rank, filled=False)
    lines: list[str] = []
    states = chunked_states(shards)
    found = recover(
        SnapshotFolder(path, control_here(), near),
        states,
        FLAGS if flags is None else {"seed": "2"},
        newer_than=newer_than,
        log=lines.append,
    )
    if found is None:
        assert not any(shard.values.any() for shard in shards), "unchanged"
    else:
        assert_true(shards)
    dist.barrier()
    own = sum(v.nbytes for state in states.values() for v in state.chunks.values())
    left = sorted(each.name for each in path.iterdir())
    return Outcome(found, lines, own, left)


@pytest.mark.ranks
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_gets_its_states_from_the_other(tmp_path: Path, lost: int) -> None:
    write_nodes(tmp_path, III)
    shutil.rmtree(tmp_path / f"node{lost}")
    outcomes = run_ranks(recover_on, 4, tmp_path, III, (0, 0, 1, 1))
    for outcome in outcomes:
        assert (outcome.found.iteration, outcome.found.common) == (6, {"at": 6})
        lost_bytes = sum(each.own_bytes for each in outcomes[2 * lost : 2 * lost + 2])
        assert outcome.found.other_nodes_bytes == lost_bytes
        assert outcome.found.own_node_bytes == sum(o.own_bytes for o in outcomes) - lost_bytes
    kept = [f"rank-{rank:05d}-a.1{kind}" for rank in (0, 1) for kind in (DATA, RECORD)]
    if lost == 1:
        assert outcomes[0].left == kept
        assert outcomes[2].left == []


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("before", "after", "nodes"),
    [
        (III, IIG, (1, 1, 0, 0)),  # other nodes, another strategy
        (NNN, III, (0, 0, 2, 2)),  # node 1 is lost, a new one has come
        (IIG, NNN, (0, 0, 1, 1)),
        (TWO_OF_EIGHT, IIG, (0, 0, 1, 1)),  # half of the nodes are left
        (TWO_OF_EIGHT, III, (0, 2, 3, 3)),  # a rank on a new node beside two old ones
        (GGG, III, (0, 1, 1, 0)),
    ],
)
def test_states_are_found_by_chunk(
    tmp_path: Path, before: Cut, after: Cut, nodes: tuple[int, ...]
) -> None:
    write_nodes(tmp_path, before)
    for node in range(4):
        if node not in nodes:
            shutil.rmtree(tmp_path / f"node{node}", ignore_errors=True)
    for outcome in run_ranks(recover_on, 4, tmp_path, after, nodes):
        assert outcome.found is not None, outcome.lines


@pytest.mark.ranks
def test_what_nobody_holds_is_left_to_the_checkpoint(tmp_path: Path) -> None:
    write_nodes(tmp_path, IIG)
    shutil.rmtree(tmp_path / "node1")
    for outcome in run_ranks(recover_on, 4, tmp_path, IIG, (0, 0, 1, 1)):
        assert outcome.found is None
        passed = [line for line in outcome.lines if "passing over iteration" in line]
        assert [line.split()[3] for line in passed] == ["6", "5"]
        assert "continues from --load" in outcome.lines[-1]
        assert outcome.left == []


@pytest.mark.ranks
def test_the_newest_iteration_that_all_have(tmp_path: Path) -> None:
    """One node was a step ahead; a damaged file of it has another holder."""
    write_nodes(tmp_path / "ahead", IIG, iterations=(6, 7))
    write_nodes(tmp_path, IIG)
    shutil.rmtree(tmp_path / "node0")
    shutil.move(tmp_path / "ahead" / "node0", tmp_path / "node0")
    for outcome in run_ranks(recover_on, 4, tmp_path, IIG, (0, 0, 1, 1)):
        assert outcome.found.iteration == 6
        assert sum("passing over iteration 7" in line for line in outcome.lines) == 1
        assert all(".1." in name or ".0." in name for name in outcome.left)
        assert len(outcome.left) == 4


@pytest.mark.ranks
@pytest.mark.parametrize("iterations", [(5, 6), (6, 7)])
def test_what_two_starts_computed_is_not_mixed(tmp_path: Path, iterations: Sequence[int]) -> None:
    """A node that was away has copies of the start in which it left; the others went on."""
    write_nodes(tmp_path, III)
    write_nodes(tmp_path / "away", IIG, iterations=iterations, start="9", is_true=False)
    shutil.rmtree(tmp_path / "node1")
    shutil.move(tmp_path / "away" / "node1", tmp_path / "node1")
    for outcome in run_ranks(recover_on, 4, tmp_path, III, (0, 0, 1, 1)):
        assert outcome.found.iteration == 6
        assert outcome.found.other_nodes_bytes > 0
        assert not any("-9." in name for name in outcome.left)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [DATA, RECORD])
def test_damaged_files_are_named_and_replaced_by_another_holder(tmp_path: Path, kind: str) -> None:
    write_nodes(tmp_path, III)
    path = tmp_path / "node0" / f"rank-00001-a.1{kind}"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    for outcome in run_ranks(recover_on, 4, tmp_path, III, (0, 0, 1, 1)):
        assert outcome.found.iteration == 6
        assert outcome.found.other_nodes_bytes > 0
        assert sum(f"{path} is damaged" in line for line in outcome.lines) == 1


@pytest.mark.ranks
def test_copies_of_another_run_or_older_than_the_checkpoint_are_not_used(tmp_path: Path) -> None:
    write_nodes(tmp_path, III)
    for outcome in run_ranks(recover_on, 4, tmp_path, III, (0, 0, 1, 1), newer_than=6):
        assert outcome.found is None
        assert ["the checkpoint is as new" in line for line in outcome.lines] == [True]
    write_nodes(tmp_path / "other", III)
    for outcome in run_ranks(recover_on, 4, tmp_path / "other", III, (0, 0, 1, 1), flags=2):
        assert outcome.found is None
        assert sum("other flags (--seed)" in line for line in outcome.lines) == 2  # nodes
        assert outcome.left == []


@pytest.mark.ranks
def test_nothing_there_is_no_line(tmp_path: Path) -> None:
    for outcome in run_ranks(recover_on, 4, tmp_path, III, (0, 0, 1, 1)):
        assert (outcome.found, outcome.lines) == (None, [])


def test_each_part_comes_from_the_holder_that_sends_least() -> None:
    row = [Chunk((first,), (2,)) for first in (0, 2, 4)]
    whole = Chunk((0,), (6,))
    wants = [[StateChunk("a", whole), StateChunk("b", row[0])], [], []]
    offers = [
        [],
        [(0, 0, whole), (0, 1, row[0])],
        [(0, 0, row[1]), (0, 1, row[0])],
    ]
    messages = [ChunkTransfer(1, 0, "a", whole), ChunkTransfer(2, 0, "b", row[0])]
    assert assign(wants, offers) == (messages, [])


def test_parts_of_several_holders_make_a_whole_or_what_is_lost_is_returned() -> None:
    wants = [[StateChunk("a", Chunk((0, 0), (4, 4)))]]
    halves = [[(0, 0, Chunk((0, 0), (4, 3)))], [(0, 0, Chunk((1, 1), (3, 3)))]]
    _, lost = assign(wants, halves)
    assert lost == [StateChunk("a", Chunk((0, 3), (1, 1)))]
    halves[1].append((0, 0, Chunk((0, 3), (1, 1))))
    messages, lost = assign(wants, halves)
    assert (sum(message.chunk.numel for message in messages), lost) == (16, [])


def test_a_rank_offers_only_parts_that_it_holds_of_chunks_that_are_wanted() -> None:
    """A rank compares what other ranks want with its own chunks alone."""
    wants = [[StateChunk("a", Chunk((2 * rank,), (2,)))] for rank in range(50)]
    snapshot: Any = None
    held = {"a": Chunk((7,), (2,)), "b": Chunk((0,), (100,))}
    parts = {name: [SnapshotChunk(chunk, snapshot, 0)] for name, chunk in held.items()}
    offers = offers_for(wants, parts)
    assert offers == [(3, 0, Chunk((7,), (1,))), (4, 0, Chunk((8,), (1,)))]


def elements(chunk: Chunk) -> set[tuple[int, ...]]:
    ranges = (range(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
    return set(product(*ranges))


def any_chunk(random: Random, num_dims: int) -> Chunk:
    return Chunk(
        tuple(random.randrange(4) for _ in range(num_dims)),
        tuple(random.randrange(1, 5) for _ in range(num_dims)),
    )


def test_overlap_and_rest_are_those_of_sets() -> None:
    random = Random(0)
    for number in range(600):
        one, *others = (any_chunk(random, number % 4) for _ in range(4))
        common = overlap(one, others[0])
        assert (set() if common is None else elements(common)) == elements(one) & elements(
            others[0]
        )
        parts = [one]
        for other in others:
            _, parts = split(parts, other)
        left = elements(one).difference(*map(elements, others))
        assert sum(part.numel for part in parts) == len(left), "disjoint"
        assert set().union(*map(elements, parts)) == left
