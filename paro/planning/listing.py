"""Lists a training step in words: each action, what it sends on which stream, what is alive."""

# The list is that of the engine (paro/step/plan.py), followed by the tally of what is allocated.
# What has no effect under a strategy is left out: a wait for nothing, a collective along no axis.
# Neighbouring stretches that differ only in the unit, as those of equal blocks do, are one entry.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from paro.distributed.byte_counter import Sent
from paro.planning.cost_model import (
    codes_of,
    gradient_codes_of,
    sent_along,
    sent_spans,
    strategy_of,
)
from paro.planning.memory.gathering import MOST_MICRO_BATCHES, PeakMemory, Point, Tally
from paro.quantities import size_text
from paro.step.actions import WAITED_BY, Action, Move, Verb
from paro.step.plan import Pass, StepPlan, Stretch, step_plan
from paro.strategy import Strategy
from paro.topology import Axis, Link, Topology, Use

_WORDS = {
    Verb.WAIT: "wait for {}",
    Verb.KEEP: "keep fp8 casts of {}",
    Verb.DROP: "free fp8 casts of {}",
    Verb.RELEASE: "free {}",
    Verb.ALLOCATE: "allocate gradients of {}",
    Verb.FREE: "free gradients of {} when reduced",
    Verb.WAIT_REDUCED: "wait for gradients of {}",
    Verb.NORM: "all-reduce the norm",
    Verb.UPDATE: "UPDATE {}",
    Verb.FORWARD: "FORWARD {}",
    Verb.LOSS: "FORWARD {}: gradients of the loss",
    Verb.RECOMPUTE: "RECOMPUTE {}",
    Verb.BACKWARD: "BACKWARD {}: to its first gradient",
    Verb.GRADIENTS: "BACKWARD {}: the rest",
}
# The collectives of an action, one for each of its spans.
_SENT = {
    Verb.GATHER: ((Use.GATHER, "all-gather {}"),),
    Verb.REDUCE: ((Use.REDUCE, "reduce-scatter gradients of {}"),),
    Verb.STEP_REDUCE: (
        (Use.REDUCE, "step reduce-scatter of {}"),
        (Use.REDUCE, "replica all-reduce of {}"),
    ),
    Verb.GATHER_UPDATED: ((Use.GATHER, "all-gather updated {}"),),
}
# The same of what is sent as codes.
_CODED = {
    Verb.STEP_REDUCE: (
        (Use.REDUCE, "step reduce-scatter of {}"),
        (Use.EXCHANGE, "step all-to-all of codes of {}"),
        (Use.EXCHANGE, "replica all-gather of codes of {}"),
    ),
    Verb.GATHER_UPDATED: ((Use.GATHER, "all-gather codes of updated {}"),),
}
_WHERE = {Link.INTRA: "inside", Link.INTER: "between"}
_COLUMNS = ("inside", "between", "stream", "params", "grads", "activations", "total")


Cells = tuple[str, ...]


class _Row(NamedTuple):
    """A line of the listing; lines with equal words and keys differ only in the unit."""

    words: str
    key: tuple[object, ...]
    cells: Cells


class _Entry(NamedTuple):
    """A stretch of the list: the number of its unit, and the bytes that were alive before it."""

    unit: int
    alive: int
    rows: list[_Row]

    def repeats(self, other: _Entry, step: int) -> bool:
        """Whether it does what `other` does, for the unit `step` units further."""
        same = [row[:2] for row in self.rows] == [row[:2] for row in other.rows]
        return same and self.unit - other.unit == step


def step_lines(
    peak: PeakMemory,
    strategy: Strategy,
    topology: Topology,
    num_micro_batches: int,
    *,
    other_bytes: int,
) -> Iterator[str]:
    """The last micro-batch of a step, its end and the update; then what the others do otherwise.

    `other_bytes` are alive throughout, in addition to the model states.
    """
    follower = _Follower(peak, strategy, topology, other_bytes)
    plan = step_plan(follower.tally.shape, min(num_micro_batches, MOST_MICRO_BATCHES))
    follower.follow(plan.update)
    *_, (forward, backward) = [
        [follower.follow(stretches) for stretches in both] for both in plan.micro_batches
    ]
    lines: list[Cells] = [("", *_COLUMNS)]
    for what, entries in (("forward of", forward), ("backward of", backward)):
        lines += follower.lines_of(what, entries)
    lines.append(("the end of the step",))
    lines += follower.lines_of("", follower.follow(plan.finish))
    lines += follower.lines_of("update of", follower.follow(plan.update))
    which = f"the last of {num_micro_batches} micro-batches"
    which = which if num_micro_batches > 1 else "its micro-batch"
    yield f"> a step, action by action: {which}, the end of the step, and the update"
    yield "    MB that a rank sends inside its group and between groups, and that are alive after"
    yield "    an action, or at most while it computes (upper case); total: with model states"
    if not peak.prefetch_units:
        yield "    nothing overlaps: every collective is waited for where it is queued"
    widths = [max(map(len, c)) for c in zip(*(cells for cells in lines if cells[1:]), strict=True)]
    for text, *cells in lines:
        columns = (
            cell.ljust(width) if name == "stream" else cell.rjust(width)
            for name, cell, width in zip(_COLUMNS, cells, widths[1:], strict=False)
        )
        yield "  ".join(("", text.ljust(widths[0]) if cells else text, *columns)).rstrip()
    yield from follower.differences(plan)


def _merged(entries: Sequence[_Entry]) -> Iterator[tuple[Sequence[_Entry], Sequence[_Entry]]]:
    """Entries to list, each time with those that repeat them."""
    while entries:
        period, stop = _repetition(entries)
        yield entries[:period], entries[period:stop]
        entries = entries[stop:]


def _repetition(entries: Sequence[_Entry]) -> tuple[int, int]:
    """How many of the first entries repeat, and where the repetition stops."""
    for period in range(1, len(entries) // 2 + 1):
        step, stop = entries[period].unit - entries[0].unit, period
        while stop < len(entries) and entries[stop].repeats(entries[stop - period], step):
            stop += 1
        if stop >= 2 * period:
            return period, stop - stop % period
    return 1, 1


class _Follower:
    """Follows the actions of a step from its beginning."""

    def __init__(
        self, peak: PeakMemory, strategy: Strategy, topology: Topology, other_bytes: int
    ) -> None:
        self.peak, self.strategy, self.topology = peak, strategy, topology
        self.other_bytes = other_bytes
        self.tally = Tally(peak, gathers=strategy.params > 1, reduces=strategy.grads > 1)
        self._buffers = {
            buffer: (index, trains)
            for index, unit in enumerate(self.tally.shape.units)
            for trains, own in ((True, unit.trainable), (False, unit.frozen))
            for buffer in own
        }
        self._spans = [sent_spans(u, strategy, topology, peak.precision) for u in peak.units]
        self._in_flight: set[Action] = set()

    def follow(self, stretches: Pass) -> list[_Entry]:
        """The stretches of a pass, without those that have no effect."""
        entries = []
        for stretch in filter(None, stretches):
            index, alive = self._unit_of(stretch), self.tally.point("").total
            rows = [row for action in stretch for row in self._rows(action, index, alive)]
            entries += [_Entry(index, alive, rows)] if rows else []
        return entries

    def _unit_of(self, stretch: Stretch) -> int:
        computing = [action[1] for action in stretch if action[0] >= Verb.FORWARD]
        return computing[-1] if computing else self._buffers[stretch[0][1]][0]

    def _rows(self, action: Move, index: int, alive_before: int) -> Iterator[_Row]:
        verb, number = action[:2]
        point = self.tally.carry_out(action) or Point(self.tally.point(""))
        unit, trains = (number, True) if verb >= Verb.FORWARD else self._buffers[number]
        waited = {(cause, number) for cause in WAITED_BY.get(verb, ())} & self._in_flight
        self._in_flight -= waited
        sent = [*self._sent(action)]
        if verb not in _SENT:
            sent = [(_WORDS[verb], "", Sent())]
        elif sent and self.peak.prefetch_units:
            self._in_flight.add((verb, number))
        if verb in (Verb.WAIT, Verb.WAIT_REDUCED) and not waited:
            return
        if verb in (Verb.KEEP, Verb.DROP) and not self.tally.activations[unit].casts:
            return
        (now,) = self.peak.under(self.strategy, [point])
        alive = (now.whole_params + now.casts, now.whole_grads, now.activations)
        held = [f"{size / 1e6:,.1f}" for size in (*alive, now.total + self.other_bytes)]
        for words, stream, size in sent:
            key = (
                unit - index,
                trains,
                size,
                *alive[:2],
                point.snapshot.total - alive_before,
            )
            moved = (f"{part / 1e6:,.1f}" if part else "" for part in (size.intra, size.inter))
            text = f"  {words.format(self._name(unit, trains))}"
            yield _Row(words, key, (text, *moved, stream, *held))

    def _sent(self, action: Move) -> Iterator[tuple[str, str, Sent]]:
        """The collectives of an action: words, comm stream, and what a rank sends."""
        verb, number = action[:2]
        if verb not in _SENT:
            return
        index, trains = self._buffers[number]
        unit, codes = self.peak.units[index], None
        given = unit, strategy_of(unit, self.strategy), self.topology, self.peak.precision
        if verb is Verb.STEP_REDUCE:
            codes = gradient_codes_of(*given)
        elif verb is Verb.GATHER_UPDATED:
            codes = codes_of(*given)
        collectives = _SENT[verb] if codes is None else _CODED[verb]
        for (use, words), (span, size) in zip(
            collectives, self._spans[index][verb, trains], strict=True
        ):
            if span:
                axes = ", ".join(map(self._axis_text, span))
                yield words, f"{use.value} {axes}", sent_along(((span, size),))

    def _axis_text(self, axis: Axis) -> str:
        """An axis by its links, and by its degrees if others have such links too."""
        alike = [other for other in self.topology.axes if other.link is axis.link]
        degrees = f" {axis.inner}-{axis.outer}" if len(alike) > 1 else ""
        return f"{_WHERE[axis.link]}{degrees}"

    def _name(self, unit: int, trains: bool) -> str:
        return self.peak.units[unit].name + ("" if trains else " (frozen)")

    def lines_of(self, what: str, entries: Sequence[_Entry]) -> Iterator[Cells]:
        """The lines of a pass; an action alone has no heading."""
        for first, same in _merged(entries):
            rows = [row for entry in first for row in entry.rows]
            more = same[0].alive - first[0].alive if same else 0
            if len(rows) == 1 and not more:
                named = rows[0].words.format(self._range([*first, *same]))
                yield (f"  {named}", *rows[0].cells[1:])
                continue
            heading = f"{what} {self._range(first)}"
            if same:
                heading += f", and the same for {self._range(same)}"
            if more:
                heading += f", each time {size_text(abs(more))} {'more' if more > 0 else 'less'}"
            yield (heading,)
            yield from (row.cells for row in rows)

    def _range(self, entries: Sequence[_Entry]) -> str:
        ends = dict.fromkeys((entries[0].unit, entries[-1].unit))
        return " to ".join(self._name(index, True) for index in ends)

    def differences(self, plan: StepPlan) -> Iterator[str]:
        """What the first micro-batch, and those after it, send in addition to the last, or not."""
        *others, last = (
            Counter(
                (words, self._name(*self._buffers[action[1]]))
                for action in chain.from_iterable(chain(*both))
                for words, _, _ in self._sent(action)
            )
            for both in plan.micro_batches
        )
        which = ("the first micro-batch", "each between the first and the last")
        for name, sent in zip(which, others, strict=False):
            for how, found in (("also", sent - last), ("not", last - sent)):
                for words in dict.fromkeys(words for words, _ in found):
                    units = [
                        f"{count} x {unit}" if count > 1 else unit
                        for (own, unit), count in found.items()
                        if own == words
                    ]
                    all_train = len(units) == len(self.tally.shape.trainable)
                    listed = "all that trains" if all_train else ", ".join(units)
                    yield f"  {name}, {how}: {words.format(listed)}"
