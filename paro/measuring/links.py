"""The links of this machine, timed in a given time, and the machine with what was timed."""

# The thorough measurement lets algorithms take turns, because a machine's speed drifts within its
# minutes. Here an algorithm has its process groups once, and times all it has to.

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median

from paro.collectives.interface import Collectives
from paro.collectives.schedule import Op
from paro.measuring.race import (
    LEAST_REPEATS,
    Outcome,
    Race,
    Turn,
    computing,
    count_repeats,
    turn_of_all,
)
from paro.measuring.trial import Move, Trial, moves_of, zero_trial
from paro.planning.machine.machine import Device, Machine, Measured, fit_link
from paro.topology import AxisSpan, Link, axes_of

SIZES = tuple(4 << (10 + 2 * step) for step in range(8))  # bytes of the whole buffer, up to 64 MiB
_LEAST_SIZES = 2  # of two follow a latency and a bandwidth
_RUNS = 8  # of a collective, about, with the slower ones while ranks compute


def time_links(
    race: Race,
    spans: Sequence[AxisSpan],
    *,
    most_bytes: int,
    seconds: float,
    say: Callable[[str], None],
) -> list[Outcome]:
    """Every op along each of these spans by all algorithms, in about so many seconds; collective.

    Sizes grow until one is `most_bytes`, or a curve has used its share of the time that is left;
    the two smallest are always timed.
    """
    found: list[Outcome] = []
    end = time.monotonic() + seconds
    sizes = [size for size in SIZES if size < 4 * most_bytes or size in SIZES[:_LEAST_SIZES]]
    num_visits = len(spans) * len(race.algorithms)
    for span in spans:
        say(f"links, {axes_of(span).value}")
        for name in race.algorithms:
            left = race.control.gather(end - time.monotonic())[0]
            share = left / (num_visits * len(Op))
            num_visits -= 1
            with race.collectives(name, frozenset({span})) as collectives:
                for op in Op:
                    moves = moves_of(op, span, sizes, ranks=race.topology.world_size)
                    found += _curve(race, collectives, name, moves, share)
    return found


def _curve(
    race: Race, collectives: Collectives, name: str, moves: Sequence[Move], seconds: float
) -> Iterator[Outcome]:
    """A collective at growing sizes, while the next is expected to end within `seconds`."""
    rank, device = race.control.world.rank, race.control.device
    left, before = seconds, 0.0
    for number, move in enumerate(moves):
        if number >= _LEAST_SIZES:
            expected = before * move.num_bytes / moves[number - 1].num_bytes
            if _RUNS * expected > left:
                return
        outcome = _timed(race, collectives, name, zero_trial(move, rank, device))
        before = min(outcome.seconds_by_round)
        left -= _RUNS * outcome.seconds
        yield outcome


def _timed(race: Race, collectives: Collectives, name: str, trial: Trial) -> Outcome:
    """A collective at one size."""

    def turn(repeats: int) -> Turn:
        return turn_of_all(race.control.gather(race.turn(collectives, trial, repeats)))

    repeats = count_repeats(trial.move, turn(1))
    turns = [turn(repeats) for _ in range(race.rounds)]
    busy: float | None = None
    if race.while_computing:
        with computing(race.control.device):
            busy = turn(min(repeats, LEAST_REPEATS)).seconds
    return Outcome(
        move=trial.move,
        algorithm=name,
        repeats=repeats,
        seconds_by_round=tuple(turn.seconds for turn in turns),
        correct=all(turn.correct for turn in turns),
        cpu_seconds=median(turn.cpu_seconds for turn in turns),
        busy_seconds=busy,
    )


def with_measured(
    machine: Machine, outcomes: Sequence[Outcome], device: Device | None, *, source: str
) -> Machine:
    """The machine with what was timed, and links fitted to it; wrong results are left out."""
    machine = replace(
        machine,
        source=source,
        device=device,
        measured=tuple(
            Measured(
                axes=axes_of(outcome.move.span),
                op=outcome.move.op,
                algorithm=outcome.algorithm,
                bytes=outcome.move.num_bytes,
                seconds=outcome.seconds,
                cpu_seconds=outcome.cpu_seconds,
                busy_seconds=outcome.busy_seconds,
            )
            for outcome in outcomes
            if outcome.correct
        ),
    )
    known = {link: machine.link(link) for link in Link}
    intra, inter = (
        fit_link(machine, link, speed.bits_per_second if speed and speed.is_typed else None)
        for link, speed in known.items()
    )
    return replace(machine, intra=intra, inter=inter)
