"""Schedules and pipelines of every shape, in one process: complete, counted, without deadlock."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import prod

import pytest

from paro.collectives.hops import h_ring_hops, ho_ring_hops, ring_hops
from paro.collectives.pipeline import chunk_ranges, make_pipeline
from paro.collectives.schedule import (
    MESSAGES_UNDER_WAY,
    Chunks,
    Hops,
    Op,
    ScheduleStep,
    ShardChunk,
    cut,
    make_schedule,
)
from paro.layout import ALIGN
from tests.helpers.requests import sent_fraction

# The contributions to a chunk that a place holds, each once.
Content = frozenset[int]


@dataclass
class Place:
    """One rank: its chunks, and the steps that have arrived."""

    steps: tuple[ScheduleStep, ...]
    chunks: dict[ShardChunk, Content]
    arrived: set[int] = field(default_factory=set)
    sent: set[int] = field(default_factory=set)
    followers: list[list[int]] = field(default_factory=list)  # per step: the sends that wait for it

    def __post_init__(self) -> None:
        self.followers = [[] for _ in self.steps]
        for index, step in enumerate(self.steps):
            for before in step.send.after:
                self.followers[before].append(index)

    def of_level(self, level: int) -> list[int]:
        return [index for index, step in enumerate(self.steps) if step.level == level]

    def may_send(self, index: int) -> bool:
        return self.arrived.issuperset(self.steps[index].send.after)

    def message(self, chunks: Chunks) -> list[Content]:
        return [self.chunks[chunk] for chunk in chunks]

    def take(self, index: int, message: list[Content]) -> None:
        """A receive; the same contribution must not arrive twice."""
        receive = self.steps[index].receive
        assert self.arrived.issuperset(receive.after)
        for chunk, content in zip(receive.chunks, message, strict=True):
            if receive.adds:
                assert not self.chunks[chunk] & content, f"{receive} adds something twice"
                content = content | self.chunks[chunk]
            self.chunks[chunk] = content
        self.arrived.add(index)


def start(op: Op, schedules: Sequence[tuple[ScheduleStep, ...]], num_chunks: int) -> list[Place]:
    """All places before the first step: with their own shards, or their contributions to all."""
    num_places = len(schedules)
    places = []
    for place, steps in enumerate(schedules):
        chunks = {
            ShardChunk(owner, chunk): frozenset([place] if op is not Op.ALL_GATHER else [owner])
            for owner, chunk in product(range(num_places), range(num_chunks))
            if op is not Op.ALL_GATHER or owner == place
        }
        places.append(Place(steps=steps, chunks=chunks))
    return places


def check_end(op: Op, places: Sequence[Place], num_chunks: int) -> None:
    everybody = frozenset(range(len(places)))
    for place, state in enumerate(places):
        owners = [place] if op is Op.REDUCE_SCATTER else range(len(places))
        for chunk in (ShardChunk(*key) for key in product(owners, range(num_chunks))):
            whole = frozenset([chunk.owner]) if op is Op.ALL_GATHER else everybody
            assert state.chunks[chunk] == whole, f"place {place} holds {chunk} without all parts"


def run_as_threads(places: Sequence[Place], levels: int, seed: int) -> None:
    """A thread per level and place; tagged sends start as soon as possible.

    Receives of a level end in order, and an addition waits for its dependencies. A random thread
    runs next, repeatedly.
    """
    rng = random.Random(seed)
    streams = [(place, level) for place in range(len(places)) for level in range(levels)]
    steps_of = {(place, level): places[place].of_level(level) for place, level in streams}
    tag = {(stream[0], i): n for stream in streams for n, i in enumerate(steps_of[stream])}
    wires: dict[tuple[int, int, int, int], list[Content]] = {}  # by sender, receiver, level and tag
    ended = dict.fromkeys(streams, 0)

    def send_what_may_go(place: int, candidates: Iterable[int]) -> None:
        state = places[place]
        for index in candidates:
            step = state.steps[index]
            if index not in state.sent and state.may_send(index):
                content = state.message(step.send.chunks)
                wires[place, step.send.peer, step.level, tag[place, index]] = content
                state.sent.add(index)

    def receive(place: int, level: int) -> bool:
        index = steps_of[place, level][ended[place, level]]
        receive = places[place].steps[index].receive
        key = (receive.peer, place, level, tag[place, index])
        if key not in wires or not places[place].arrived.issuperset(receive.after):
            return False
        places[place].take(index, wires.pop(key))
        ended[place, level] += 1
        send_what_may_go(place, places[place].followers[index])
        return True

    for place, state in enumerate(places):
        send_what_may_go(place, range(len(state.steps)))
    while todo := [stream for stream in streams if ended[stream] < len(steps_of[stream])]:
        rng.shuffle(todo)
        before = dict(ended)
        for stream in todo:
            # Some advance several steps, so that they get far ahead of others.
            for _ in range(rng.choice((1, 1, 2, 8))):
                if ended[stream] == len(steps_of[stream]) or not receive(*stream):
                    break
        if ended == before:
            raise AssertionError(f"a deadlock: of {steps_of} steps only {ended} ended")
    assert not wires, "somebody sent what nobody received"


def run_one_by_one(places: Sequence[Place]) -> None:
    """One thread per place: every step blocks until both neighbours reach the same step."""
    for index in range(len(places[0].steps)):
        outgoing = []
        for place, state in enumerate(places):
            step = state.steps[index]
            assert state.may_send(index), f"place {place} waits for a later step at {index}"
            outgoing.append(state.message(step.send.chunks))
        for state in places:
            state.take(index, outgoing[state.steps[index].receive.peer])


def most_posted(places: Sequence[Place], levels: int) -> int:
    """The most messages in flight on a level of a place, by its dependencies."""
    most = 0
    for state in places:
        for level in range(levels):
            indices = state.of_level(level)
            for position, index in enumerate(indices):
                done = [p for p, i in enumerate(indices) if i in state.steps[index].send.after]
                most = max(most, position - max(done, default=-1))
    assert most <= MESSAGES_UNDER_WAY
    return most


TWO_LEVELS: dict[str, Hops] = {"h-ring": h_ring_hops, "ho-ring": ho_ring_hops}
ALL_SIZES = list(product(range(1, 9), range(1, 9)))
# What is smallest, odd, not square and large; `make verify` takes all.
SIZES = [(1, 1), (1, 4), (2, 1), (2, 2), (3, 2), (2, 5), (4, 4), (5, 3), (8, 2), (6, 8)]
OPS = list(Op)


Steps = tuple[ScheduleStep, ...]


def schedules_of(op: Op, hops: Hops, sizes: tuple[int, ...], num_chunks: int) -> list[Steps]:
    return [make_schedule(op, hops, sizes, place, num_chunks).steps for place in range(prod(sizes))]


def check(op: Op, hops: Hops, sizes: tuple[int, ...], num_chunks: int) -> list[Steps]:
    schedules = schedules_of(op, hops, sizes, num_chunks)
    levels = len(sizes)
    places = start(op, schedules, num_chunks)
    run_as_threads(places, levels, seed=prod(sizes) + num_chunks)
    check_end(op, places, num_chunks)
    places = start(op, schedules, num_chunks)
    run_one_by_one(places)
    check_end(op, places, num_chunks)
    most_posted(places, levels)
    return schedules


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.value)
@pytest.mark.parametrize("name", TWO_LEVELS)
@pytest.mark.parametrize(
    "sizes",
    [pytest.param(s, marks=() if s in SIZES else pytest.mark.verify) for s in ALL_SIZES],
    ids=str,
)
def test_two_levels(name: str, op: Op, sizes: tuple[int, int]) -> None:
    num_chunks = 2 if prod(sizes) <= 24 else 1
    inner, outer = sizes
    passes = 2 if op is Op.ALL_REDUCE else 1
    rows = outer if name == "ho-ring" or num_chunks > 1 else 1
    for schedule in check(op, TWO_LEVELS[name], sizes, num_chunks):
        steps = [sum(step.level == level for step in schedule) for level in (0, 1)]
        assert steps == [
            passes * rows * (inner - 1) * num_chunks,
            passes * (outer - 1) * num_chunks,
        ]
    schedule = make_schedule(op, TWO_LEVELS[name], sizes, 0, num_chunks)
    fractions = [sent_fraction(schedule, prod(sizes), num_chunks, level) for level in (0, 1)]
    assert fractions[0] == pytest.approx(passes * (inner - 1) / inner)
    assert fractions[1] == pytest.approx(passes * (outer - 1) / (inner * outer))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.value)
@pytest.mark.parametrize("hops", [ring_hops, h_ring_hops, ho_ring_hops], ids=["ring", "h", "ho"])
@pytest.mark.parametrize("size", [1, 2, 5, 16])
def test_one_level(hops: Hops, op: Op, size: int) -> None:
    """With one kind of links all three are the plain ring."""
    schedules = check(op, hops, (size,), num_chunks=2)
    assert schedules == schedules_of(op, ring_hops, (size,), 2)
    passes = 2 if op is Op.ALL_REDUCE else 1
    assert {len(schedule) for schedule in schedules} == {passes * (size - 1) * 2}


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (3, 3), (2, 4), (4, 4)], ids=str)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.value)
@pytest.mark.parametrize("num_chunks", [1, 3, 8])
def test_ho_ring_in_any_order_of_events(op: Op, sizes: tuple[int, int], num_chunks: int) -> None:
    schedules = schedules_of(op, ho_ring_hops, sizes, num_chunks)
    for seed in range(5):
        places = start(op, schedules, num_chunks)
        run_as_threads(places, 2, seed)
        check_end(op, places, num_chunks)


def test_the_drawing_of_ho_ring() -> None:
    """Place 0 of 2 groups of 3 receives d, then c and b of its own row, then f and e."""
    schedule = make_schedule(Op.ALL_GATHER, ho_ring_hops, (3, 2), 0, 1).steps
    received = ["abcdef"[step.receive.chunks[0].owner] for step in schedule]
    assert received == ["d", "c", "b", "f", "e"]
    # d is sent around the inner ring as soon as it has arrived, and waits only for the link.
    assert schedule[3].send.chunks == (ShardChunk(owner=3, number=0),)
    assert 0 in schedule[3].send.after


@pytest.mark.parametrize("hops", [h_ring_hops, ho_ring_hops], ids=["h", "ho"])
def test_additions_have_one_order(hops: Hops) -> None:
    for place in range(8):
        last: dict[ShardChunk, int] = {}
        for index, step in enumerate(
            make_schedule(Op.REDUCE_SCATTER, hops, (4, 2), place, 2).steps
        ):
            for chunk in step.receive.chunks:
                if chunk in last:
                    assert last[chunk] in step.receive.after
                last[chunk] = index


def test_the_last_chunks_are_short() -> None:
    assert cut(10, 66, 4) == [(10, 30), (30, 50), (50, 60), (60, 66)]


@pytest.mark.parametrize("op", Op)
def test_a_level_works_on_the_next_chunk_while_the_other_has_this_one(op: Op) -> None:
    """Stages take one unit of time; a level runs its stages in the order of their queue."""
    num_chunks = 6
    stages = make_pipeline(op, num_chunks)
    free, end = [0, 0], list[int]()
    for stage in stages:
        begin = max(free[stage.level], 0 if stage.after is None else end[stage.after])
        end.append(begin + 1)
        free[stage.level] = begin + 1
    busiest = max(sum(stage.level == level for stage in stages) for level in (0, 1))
    fills = 0 if op is Op.ALL_REDUCE else 1  # the first chunk is alone
    assert max(end) == busiest + fills


@pytest.mark.parametrize(("numel", "num_chunks"), [(8, 1), (8, 4), (64, 4), (72, 4), (8000, 7)])
def test_chunks_are_even_and_aligned(numel: int, num_chunks: int) -> None:
    ranges = chunk_ranges(numel, num_chunks)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == numel
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    assert all(start % ALIGN == 0 and stop > start for start, stop in ranges)
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= ALIGN
