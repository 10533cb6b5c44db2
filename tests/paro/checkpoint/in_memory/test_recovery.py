"""Ranks recover from the nodes that are left: any strategy, fewer or other nodes, damaged files."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
    recover,
)
from paro.checkpoint.in_memory.snapshot import DATA, RECORD, SnapshotWriter
from paro.layout import Chunk
from tests.helpers.ranks import run_ranks
from tests.paro.checkpoint.test_manifest import flip
from tests.paro.checkpoint.toy_run import IIG, NNN, Cut, assert_true, control_here, make_shards

FLAGS = {"seed": "1"}
III = Cut(world_size=4, group_size=2, degrees=(2, 2, 2))
TWO_OF_EIGHT = Cut(world_size=8, group_size=2, degrees=(2, 2, 4))
GGG = Cut(world_size=4, group_size=4, degrees=(4, 4, 4))


def write_nodes(
    root: Path,
    cut: Cut,
    *,
    iterations: Sequence[int] = (5, 6),
    start: str = "a",
    is_true: bool = True,
) -> None:
    """The snapshots that all ranks of a run left, one folder for each node."""
    for rank in range(cut.world_size):
        node = rank // 2
        folder = root / f"node{node}"
        folder.mkdir(parents=True, exist_ok=True)
        near = range(node * 2, node * 2 + 2)
        states = chunked_states(make_shards(cut, rank, filled=is_true), writers=near)
        name = f"rank-{rank:05d}-{start}"
        writer = SnapshotWriter(folder, name=name, rank=rank, states=states, flags=FLAGS)
        for iteration in iterations:
            writer.write(iteration, {"at": iteration}, Tensor.copy_)


@dataclass(frozen=True, slots=True)
class Outcome:
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


def without(root: Path, *nodes: int) -> None:
    for node in nodes:
        shutil.rmtree(root / f"node{node}")


def replaced(root: Path, node: int, cut: Cut, **how: Any) -> None:
    """A node has what it wrote in another run."""
    write_nodes(root / "other", cut, **how)
    without(root, node)
    shutil.move(root / "other" / f"node{node}", root / f"node{node}")


@dataclass(frozen=True, slots=True)
class Case:
    """A run that wrote copies, what then happens to its nodes, and the ranks that recover."""

    before: Cut | None = III
    after: Cut = III
    nodes: tuple[int, ...] = (0, 0, 1, 1)  # of the ranks that recover
    happens: Callable[[Path], object] = lambda _root: None
    options: Mapping[str, Any] = field(default_factory=dict)


AWAY = {"start": "9", "is_true": False}  # a node was away, and the others went on
CASES = {
    "node 0 lost": Case(happens=lambda root: without(root, 0)),
    "node 1 lost": Case(happens=lambda root: without(root, 1)),
    "other nodes, another strategy": Case(III, IIG, (1, 1, 0, 0)),
    "a new node": Case(NNN, III, (0, 0, 2, 2), lambda root: without(root, 1)),
    "half of the nodes": Case(TWO_OF_EIGHT, IIG, (0, 0, 1, 1), lambda root: without(root, 2, 3)),
    "GGG to III": Case(GGG, III, (0, 1, 1, 0)),
    "nobody": Case(IIG, IIG, happens=lambda root: without(root, 1)),
    "ahead": Case(IIG, IIG, happens=lambda root: replaced(root, 0, IIG, iterations=(6, 7))),
    "two starts": Case(happens=lambda root: replaced(root, 1, IIG, iterations=(5, 6), **AWAY)),
    "two starts, ahead": Case(
        happens=lambda root: replaced(root, 1, IIG, iterations=(6, 7), **AWAY)
    ),
    f"damaged {DATA}": Case(happens=lambda root: flip(root / f"node0/rank-00001-a.1{DATA}", 0)),
    f"damaged {RECORD}": Case(happens=lambda root: flip(root / f"node0/rank-00001-a.1{RECORD}", 0)),
    "older": Case(options={"newer_than": 6}),
    "other flags": Case(options={"flags": 2}),
    "nothing": Case(None),
}


def recover_each(root: Path) -> dict[str, Outcome]:
    return {
        name: recover_on(root / name, case.after, case.nodes, **case.options)
        for name, case in CASES.items()
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    root = tmp_path_factory.mktemp("nodes")
    for name, case in CASES.items():
        (root / name).mkdir()
        if case.before is not None:
            write_nodes(root / name, case.before)
        case.happens(root / name)
    of_ranks = run_ranks(recover_each, 4, root)
    return {name: [of_rank[name] for of_rank in of_ranks] for name in CASES}


Found = dict[str, list[Outcome]]


@pytest.mark.ranks
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_gets_its_states_from_the_other(found: Found, lost: int) -> None:
    outcomes = found[f"node {lost} lost"]
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
def test_what_nobody_holds_is_left_to_the_checkpoint(found: Found) -> None:
    for outcome in found["nobody"]:
        assert outcome.found is None
        passed = [line for line in outcome.lines if "passing over iteration" in line]
        assert [line.split()[3] for line in passed] == ["6", "5"]
        assert "continues from --load" in outcome.lines[-1]
        assert outcome.left == []
    # Copies of another run, or older than the checkpoint, are not used.
    for outcome in found["older"]:
        assert outcome.found is None
        assert ["the checkpoint is as new" in line for line in outcome.lines] == [True]
    for outcome in found["other flags"]:
        assert outcome.found is None
        assert sum("other flags (--seed)" in line for line in outcome.lines) == 2  # nodes
        assert outcome.left == []
    assert {(outcome.found, *outcome.lines) for outcome in found["nothing"]} == {(None,)}


@pytest.mark.ranks
def test_the_newest_iteration_that_all_have(found: Found) -> None:
    for name in [*CASES][2:6]:  # under another strategy, and on other nodes
        assert all(outcome.found.iteration == 6 for outcome in found[name]), name
    for outcome in found["ahead"]:
        assert outcome.found.iteration == 6
        assert sum("passing over iteration 7" in line for line in outcome.lines) == 1
        assert all(".1." in name or ".0." in name for name in outcome.left)
        assert len(outcome.left) == 4
    # What two starts computed is not mixed.
    for outcome in (*found["two starts"], *found["two starts, ahead"]):
        assert outcome.found.iteration == 6
        assert outcome.found.other_nodes_bytes > 0
        assert not any("-9." in name for name in outcome.left)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [DATA, RECORD])
def test_damaged_files_are_named_and_replaced_by_another_holder(found: Found, kind: str) -> None:
    for outcome in found[f"damaged {kind}"]:
        assert outcome.found.iteration == 6
        assert outcome.found.other_nodes_bytes > 0
        assert sum(f"rank-00001-a.1{kind} is damaged" in line for line in outcome.lines) == 1


def test_each_part_comes_from_the_holder_that_sends_least() -> None:
    row = [Chunk((first,), (2,)) for first in (0, 2, 4)]
    whole = Chunk((0,), (6,))
    wants = [[StateChunk("a", whole), StateChunk("b", row[0])], [], []]
    offers = [[], [(0, 0, whole), (0, 1, row[0])], [(0, 0, row[1]), (0, 1, row[0])]]
    messages = [ChunkTransfer(1, 0, 0, "a", whole), ChunkTransfer(2, 0, 1, "b", row[0])]
    assert assign(wants, offers) == (messages, [[], [], []])


def test_a_rank_offers_only_parts_that_it_holds_of_chunks_that_are_wanted() -> None:
    """A rank compares what other ranks want with its own chunks alone."""
    wants = [[StateChunk("a", Chunk((2 * rank,), (2,)))] for rank in range(50)]
    snapshot: Any = None
    held = {"a": Chunk((7,), (2,)), "b": Chunk((0,), (100,))}
    parts = {name: [SnapshotChunk(chunk, snapshot, 0)] for name, chunk in held.items()}
    offers = offers_for(wants, parts)
    assert offers == [(3, 0, Chunk((7,), (1,))), (4, 0, Chunk((8,), (1,)))]
