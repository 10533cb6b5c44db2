"""The links of this machine, timed in a given time, and the machine with what was timed."""

# The thorough measurement lets algorithms take turns, because a machine's speed drifts within its
# minutes. Here an algorithm has its process groups once, and times all it has to.

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from paro.collectives.interface import Collectives
from paro.collectives.schedule import Op
from paro.machine.machine import Device, Machine, Measured, fit_link
from paro.measuring.race import (
    LEAST_REPEATS,
    Outcome,
    Race,
    Turn,
    Turns,
    computing,
    count_repeats,
    turn_of_all,
)
from paro.measuring.trial import Move, Trial, moves_of, zero_trial
from paro.topology import AxisSpan, Link, axes_of

SIZES = tuple(4 << (10 + 2 * step) for step in range(8))  # bytes of the whole buffer, up to 64 MiB
# Larger messages than the largest that is timed take what the two largest say of bandwidth. Where
# both are mostly latency, that is noise: 4 and 16 KB say nothing of 1 MB.
_GROWTH = 3  # of the time of the smallest size, at the second that is timed


def time_links(
    race: Race,
    spans: Sequence[AxisSpan],
    *,
    most_bytes: int,
    seconds: float,
    say: Callable[[str], None],
) -> list[Outcome]:
    """Return every op along each of these spans by all algorithms, in about so many seconds;
    collective.

    A curve has the smallest size, and one whose bytes take most of its time, or the largest; others
    while its share of the time that is left lasts. The largest is `most_bytes`, or a step above.
    """
    found: list[Outcome] = []
    end = time.monotonic() + seconds
    sizes = [size for size in SIZES if size < 4 * most_bytes or size in SIZES[:2]]
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
) -> list[Outcome]:
    """Return a collective at two sizes or more, as `seconds` allow."""
    rank, device = race.control.world.rank, race.control.device
    found: dict[int, Outcome] = {}

    def time_at(move: Move) -> Outcome:
        outcome = _timed(race, collectives, name, zero_trial(move, rank, device))
        found[move.num_bytes] = outcome
        return outcome

    smallest, *larger = moves
    outcome = time_at(smallest)
    enough = _GROWTH * outcome.seconds
    for move in larger:
        trial = zero_trial(move, rank, device)
        once = min(_turn(race, collectives, trial, 1).seconds for _ in range(2))  # undisturbed
        if once >= enough or move is larger[-1]:
            outcome = time_at(move)
            if outcome.seconds >= enough:
                break
    far = outcome.move.num_bytes
    for move in sorted(larger, key=lambda move: abs(math.log(move.num_bytes / far))):
        used = sum(_seconds_to_time(race, each.move, each) for each in found.values())
        expected = _seconds_to_time(race, move, outcome)
        if move.num_bytes not in found and used + expected <= seconds:
            time_at(move)
    return [found[size] for size in sorted(found)]


def _timed(race: Race, collectives: Collectives, name: str, trial: Trial) -> Outcome:
    """Return a collective at one size."""
    found = Turns(race.control.device.type)
    for _ in range(1 + race.rounds):
        found.add(trial.move, _turn(race, collectives, trial, found.repeats))
    if race.while_computing:
        with computing(race.control.device):
            repeats = min(found.repeats, LEAST_REPEATS)
            busy = _turn(race, collectives, trial, repeats).seconds
        found.turns[-1] = found.turns[-1]._replace(busy_seconds=busy)
    return found.outcome(trial.move, name)


def _turn(race: Race, collectives: Collectives, trial: Trial, repeats: int) -> Turn:
    return turn_of_all(race.control.gather(race.turn(collectives, trial, repeats)))


def _seconds_to_time(race: Race, move: Move, like: Outcome) -> float:
    """About how long `_timed` takes, at most, for more or fewer bytes than `like` has."""
    longer = max(1.0, move.num_bytes / like.move.num_bytes)
    once = longer * like.seconds
    repeats = count_repeats(move, Turn(once, correct=True), race.control.device.type)
    busy = longer * (like.busy_seconds or 0.0) * min(repeats, LEAST_REPEATS)
    return (1 + race.rounds * repeats) * once + busy


def with_measured(
    machine: Machine, outcomes: Sequence[Outcome], device: Device | None, *, source: str
) -> Machine:
    """Return the machine with what was timed, and links fitted to it; wrong results are
    left out."""
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
