"""Times collectives against each other, in turns, and checks every result that was timed."""

# A shared machine's speed drifts, so in every round each algorithm has its turn, in an order that
# rotates, and a figure is the median over rounds of the slowest rank.
#
# Idle process groups cost time as well: their threads wake up all the time. On one machine 8 idle
# ranks took 0.015 of a core, with the groups of one algorithm 0.06, with those of all five 0.19: a
# tenth of its two cores. Creating and closing them takes a tenth of a second or two. So only the
# groups in use exist, and an algorithm runs all sizes of an op before the next one's groups.

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple

import torch
from torch import Tensor

from paro.collectives.api import Collectives, make_collectives
from paro.collectives.choice import AlgorithmChoice
from paro.collectives.interface import Request
from paro.collectives.spans import needed_groups
from paro.distributed.control import Control
from paro.distributed.groups import make_groups
from paro.distributed.links import make_links
from paro.distributed.process_group import RuntimeConfig
from paro.distributed.timers import synchronize, time_of
from paro.layout import ALIGN
from paro.machine.choice import pieces_by
from paro.machine.machine import Machine
from paro.measuring.trial import Move, Trial, make_trial
from paro.topology import COLLECTIVE_STREAMS, AxisSpan, Topology

# A turn of small messages is repeated until it takes about so long, within the limits below; every
# repetition has its own buffer, so that each result can be checked.
TURN_SECONDS = 0.02
MOST_REPEATS = 20
# Ranks leave a barrier at different times: for a single short collective that would matter.
LEAST_REPEATS = 3
SHORT_SECONDS = 0.2
BUSY_ROUNDS = 1  # the last one: next to computing even small messages take a tenth of a second
# More per rank would not stay in a cache that CPU ranks share; GPUs have room for it.
MOST_BYTES = {"cpu": 4 << 20, "cuda": 4 << 30}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One collective by one algorithm: seconds of the slowest rank in each round."""

    move: Move
    algorithm: str
    repeats: int
    seconds_by_round: tuple[float, ...]
    correct: bool
    cpu_seconds: float | None = None  # a rank's processor time, the mean over ranks
    busy_seconds: float | None = None  # while every rank also computes

    @property
    def seconds(self) -> float:
        return median(self.seconds_by_round)


class Turn(NamedTuple):
    """A repetition's seconds, and whether all results were right; of one rank, or of all."""

    seconds: float
    correct: bool
    cpu_seconds: float = 0.0  # of all threads; over all ranks: the mean
    busy_seconds: float | None = None


@dataclass(slots=True)
class Turns:
    """The turns of one collective by one algorithm, of which the first does not count."""

    device_type: str
    repeats: int = 1
    turns: list[Turn] = field(default_factory=list)

    def add(self, move: Move, turn: Turn) -> None:
        """Add a turn; the first says how often to repeat a short collective."""
        if not self.turns:
            self.repeats = count_repeats(move, turn, self.device_type)
        self.turns.append(turn)

    def outcome(self, move: Move, algorithm: str) -> Outcome:
        counted = self.turns[1:]
        busy = [turn.busy_seconds for turn in counted if turn.busy_seconds is not None]
        return Outcome(
            move=move,
            algorithm=algorithm,
            repeats=self.repeats,
            seconds_by_round=tuple(turn.seconds for turn in counted),
            correct=all(turn.correct for turn in self.turns),
            cpu_seconds=median(turn.cpu_seconds for turn in counted),
            busy_seconds=median(busy) if busy else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Which algorithms race, on which topology, for how many rounds."""

    control: Control
    topology: Topology
    runtime: RuntimeConfig
    algorithms: tuple[str, ...]
    rounds: int
    machine: Machine | None = None  # its links say in how many pieces ho-ring is cut under nccl
    while_computing: bool = False  # also time every collective while all ranks compute

    def run(self, moves: Sequence[Move]) -> list[Outcome]:
        """Times every algorithm on collectives of one axis span; the same on all ranks.

        A first round is not counted: it determines how often to repeat short collectives.
        """
        rank = self.control.world.rank
        trials = [
            make_trial(move, self.topology.members(move.span, rank), rank, self.control.device)
            for move in moves
        ]
        names = self.algorithms
        kind = self.control.device.type
        found = {name: [Turns(kind) for _ in trials] for name in names}
        for number in range(1 + self.rounds):
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                late = number > max(0, self.rounds - BUSY_ROUNDS)
                repeats = [one.repeats for one in found[name]]
                turns = self._visit(name, trials, repeats, busy_too=late and self.while_computing)
                for move, turn, one in zip(moves, turns, found[name], strict=True):
                    one.add(move, turn)
        return [
            found[name][index].outcome(move, name)
            for index, move in enumerate(moves)
            for name in names
        ]

    def _visit(
        self, name: str, trials: Sequence[Trial], repeats: Sequence[int], *, busy_too: bool
    ) -> list[Turn]:
        """Return a turn of one algorithm at every trial; its process groups exist only during the
        turn."""
        spans = frozenset(trial.move.span for trial in trials)
        with self.collectives(name, spans) as collectives:
            # Starts threads and opens connections that are made lazily. The time is not used: a
            # rank that has just used its core is scheduled later in the turn that counts.
            self.turn(collectives, trials[0], 1)
            pairs = zip(trials, repeats, strict=True)
            own = [self.turn(collectives, trial, times) for trial, times in pairs]
            if busy_too:
                with computing(self.control.device):
                    own = [
                        turn._replace(
                            busy_seconds=self.turn(collectives, trial, LEAST_REPEATS).seconds
                        )
                        for turn, trial in zip(own, trials, strict=True)
                    ]
            by_rank: list[list[Turn]] = self.control.gather(own)
        return [turn_of_all(turns) for turns in zip(*by_rank, strict=True)]

    @contextmanager
    def collectives(self, name: str, spans: frozenset[AxisSpan]) -> Iterator[Collectives]:
        """Collectives by an algorithm, whose process groups exist in the block."""
        config = self.runtime.groups_on(self.control.device)
        pieces = pieces_by(self.machine) if config.backend == "nccl" else None
        choice = AlgorithmChoice(names=(name,), pieces=pieces)
        needed = needed_groups(choice, dict.fromkeys(COLLECTIVE_STREAMS, spans))
        groups = make_groups(self.topology, self.control.world.rank, needed, config)
        made = make_collectives(choice, groups, make_links(self.control.device, config.backend))
        yield made
        made.close()  # not after an exception: with a dead peer this would hang

    def turn(self, collectives: Collectives, trial: Trial, repeats: int) -> Turn:
        """Return a turn of this rank, which all of the span have at once.

        On GPUs a collective that is not timed comes first: all ranks end it together, but leave the
        barrier of their hosts at times that differ by as much as a collective takes.
        """
        device, move = self.control.device, trial.move
        ahead = int(device.type == "cuda")
        shape = ahead + repeats, -(-move.numel // ALIGN) * ALIGN
        registered, values = collectives.registered, trial.given.new_empty(0)
        num_bytes = math.prod(shape) * move.dtype.itemsize
        registered.reserve({True: (num_bytes, 1)}, self.control)
        registered.resize(values.untyped_storage(), num_bytes, trains=True)
        buffers = values.resize_(shape)[:, : move.numel].unbind()
        for buffer in buffers:
            trial.fill(buffer)

        def run(some: Sequence[Tensor]) -> None:
            for buffer in some:
                collectives.run(Request(move.op, buffer, move.span, move.dtype)).wait()

        synchronize(device)
        self.control.barrier()
        run(buffers[:ahead])
        took = time_of(lambda: run(buffers[ahead:]), device)
        return Turn(took.wall / repeats, all(map(trial.is_right, buffers)), took.cpu / repeats)


def turn_of_all(turns: Sequence[Turn]) -> Turn:
    """Combine the turns of all ranks."""
    busy = [turn.busy_seconds for turn in turns if turn.busy_seconds is not None]
    return Turn(
        seconds=max(turn.seconds for turn in turns),
        correct=all(turn.correct for turn in turns),
        cpu_seconds=fmean(turn.cpu_seconds for turn in turns),
        busy_seconds=max(busy) if busy else None,
    )


@contextmanager
def computing(device: torch.device) -> Iterator[None]:
    """Another thread computes meanwhile, as in training: matrix products as small as a block's."""
    end = threading.Event()
    left, right = (torch.ones(128, 256, device=device), torch.ones(256, 256, device=device))

    def compute() -> None:
        while not end.is_set():
            torch.mm(left, right)

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def count_repeats(move: Move, turn: Turn, device_type: str) -> int:
    """How often to repeat a collective that took as long as `turn`."""
    room = max(1, MOST_BYTES[device_type] // move.num_bytes)
    least = LEAST_REPEATS if turn.seconds < SHORT_SECONDS else 1
    return max(least, min(math.ceil(TURN_SECONDS / turn.seconds), MOST_REPEATS, room))
