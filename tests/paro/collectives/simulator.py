"""Runs the schedules of all positions in one process, as threads or step by step."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product

from paro.collectives.schedule import MESSAGES_UNDER_WAY, Chunk, Chunks, Op, Step

# The contributions to a chunk that a place holds, each once.
Content = frozenset[int]


class DeadlockError(AssertionError):
    """No place can continue."""


@dataclass
class Place:
    """One rank: its chunks, and the steps that have arrived."""

    steps: tuple[Step, ...]
    chunks: dict[Chunk, Content]
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


def start(op: Op, schedules: Sequence[tuple[Step, ...]], num_chunks: int) -> list[Place]:
    """All places before the first step: with their own shards, or their contributions to all."""
    num_places = len(schedules)
    places = []
    for place, steps in enumerate(schedules):
        chunks = {
            Chunk(owner, chunk): frozenset([place] if op is not Op.ALL_GATHER else [owner])
            for owner, chunk in product(range(num_places), range(num_chunks))
            if op is not Op.ALL_GATHER or owner == place
        }
        places.append(Place(steps=steps, chunks=chunks))
    return places


def check_end(op: Op, places: Sequence[Place], num_chunks: int) -> None:
    """Every chunk is complete on the places that must have it."""
    everybody = frozenset(range(len(places)))
    for place, state in enumerate(places):
        owners = [place] if op is Op.REDUCE_SCATTER else range(len(places))
        for chunk in (Chunk(*key) for key in product(owners, range(num_chunks))):
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
            raise DeadlockError(f"of {steps_of} steps only {ended} ended")
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
