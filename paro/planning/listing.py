"""Formats a training step as a table, for --show-step: each action, bytes sent and allocated."""

# In: a `StepTally`, which counts the bytes allocated after each action of a step's schedule, and
# the rank whose sent bytes are shown. Out: lines, which the dry run prints. Actions without effect
# are left out: a wait for a collective that was not queued, a collective of one rank. The schedule
# comes in segments, the actions of one unit's forward or backward hooks. Consecutive segments that
# differ in the unit alone, as of equal blocks, are one, and so are repeated actions, such as ring
# steps. Columns name links inside groups (such as nodes) and between them.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

from paro.collectives.schedule import Op
from paro.errors import count_text
from paro.planning.sending import Sender, muon_sent
from paro.planning.tally import StepTally
from paro.step.actions import PASS_OF, WAITED_BY, Action, ActionKind, Buckets, number_buffers
from paro.step.schedule import LISTED_MICRO_BATCHES, Pass, StepSchedule
from paro.text import align, size_text
from paro.topology import Axis, Link, Sent

_ACTION_TEXTS = {
    ActionKind.WAIT: "wait for {}",
    ActionKind.DROP_FP8: "free fp8 casts of {}",
    ActionKind.RELEASE: "free {}",
    ActionKind.ALLOCATE: "allocate gradients of {}",
    ActionKind.FREE: "free gradients of {} when reduced",
    ActionKind.WAIT_REDUCED: "wait for gradients of {}",
    ActionKind.NORM: "all-reduce the norm",
    ActionKind.UPDATE: "UPDATE {}",
    ActionKind.ALLOCATE_SLOT: "allocate a slot of {}",
    ActionKind.FREE_SLOT: "free a slot of {}",
    ActionKind.COPY: "copy the slice of {}",
    ActionKind.WAIT_SHIFTED: "wait for the next slice of {}",
    ActionKind.WAIT_GRADS: "wait for the slice's gradients of {}",
    ActionKind.ACCUMULATE: "accumulate gradients of {}",
    ActionKind.FORWARD: "FORWARD {}",
    ActionKind.LOSS: "FORWARD {}: gradients of the loss",
    ActionKind.RECOMPUTE: "RECOMPUTE {}",
    ActionKind.BACKWARD: "BACKWARD {}: to its first gradient",
    ActionKind.GRADIENTS: "BACKWARD {}: the rest",
}
# The words for a collective, by action, op and whether values are quantized. A quantized
# reduce-scatter is an all-to-all with a local sum; a shift round the ring is listed with the op
# that it replaces.
_COLLECTIVE_TEXTS = {
    (ActionKind.GATHER, Op.ALL_GATHER, False): "all-gather {}",
    (ActionKind.REDUCE, Op.REDUCE_SCATTER, False): "reduce-scatter gradients of {}",
    (ActionKind.GRAD_SYNC, Op.REDUCE_SCATTER, False): "step reduce-scatter of {}",
    (ActionKind.GRAD_SYNC, Op.ALL_REDUCE, False): "replica all-reduce of {}",
    (ActionKind.GRAD_SYNC, Op.REDUCE_SCATTER, True): "step all-to-all of codes of {}",
    (ActionKind.GRAD_SYNC, Op.ALL_GATHER, True): "replica all-gather of codes of {}",
    (ActionKind.PARAM_ALL_GATHER, Op.ALL_GATHER, False): "all-gather updated {}",
    (ActionKind.PARAM_ALL_GATHER, Op.ALL_GATHER, True): "all-gather codes of updated {}",
    (ActionKind.SHIFT, Op.ALL_GATHER, False): "send the slice of {} on",
    (ActionKind.SHIFT_BACK, Op.ALL_GATHER, False): "send the slice of {} back",
    (ActionKind.SHIFT_GRADS, Op.REDUCE_SCATTER, False): "send the slice's gradients of {} back",
}
# Actions that are of all units of a Muon bucket.
_OF_BUCKET = (ActionKind.GRAD_SYNC, ActionKind.PARAM_ALL_GATHER)
_LINK_NAMES = {Link.INTRA: "inside", Link.INTER: "between"}
_COLUMNS = ("inside", "between", "stream")  # before allocated bytes
_WAITS = (ActionKind.WAIT, ActionKind.WAIT_REDUCED, ActionKind.WAIT_SHIFTED, ActionKind.WAIT_GRADS)

Cells = tuple[str, ...]


class _Line(NamedTuple):
    """A line of the listing; two lines with equal keys differ at most in the unit."""

    key: tuple[object, ...]
    unit: int  # the unit's number relative to that of the segment
    words: str
    cells: Cells


class _Segment(NamedTuple):
    """The lines of the actions of one unit's hooks, and the bytes allocated before them."""

    unit: int
    name: str
    allocated: int
    lines: list[_Line]

    @property
    def key(self) -> tuple[object, ...]:
        return tuple((line.key, line.unit) for line in self.lines)


def step_lines(
    tally: StepTally, num_micro_batches: int, sender: Sender, *, other_bytes: int
) -> Iterator[str]:
    """Yield the table of a step: its last micro-batch, its end, the update; then how others differ.

    Bytes sent are of the rank `sender`; `other_bytes` are allocated throughout, in addition to the
    model states.
    """
    run, units = tally.run, tally.step.units
    schedule = tally.step.schedule(min(num_micro_batches, LISTED_MICRO_BATCHES))
    lister = _StepLister(tally, sender, other_bytes)
    lister.follow(schedule.update)
    *_, (forward, backward) = [[*map(lister.follow, both)] for both in schedule.micro_batches]
    names = (*_COLUMNS, *tally.columns(tally.at()))
    lines: list[Cells] = [("", *names), *lister.lines_of("forward of", forward)]
    lines += lister.lines_of("backward of", backward)
    lines.append(("the end of the step",))
    lines += lister.lines_of("", lister.follow(schedule.end))
    lines += lister.lines_of("update of", lister.follow(schedule.update))
    which = f"the last of {num_micro_batches} micro-batches"
    which = which if num_micro_batches > 1 else "its micro-batch"
    yield f"> a step, action by action: {which}, the end of the step, and the update"
    yield "    MB that rank 0 sends inside its group and between groups, and that are alive after"
    yield "    an action, or at most while it computes (upper case); total: with model states"
    muon = muon_sent(tally.specs)
    if muon.intra or muon.inter:
        yield f"    before the updates, Muon's rounds send {_megabytes(muon.intra)} inside and " + (
            f"{_megabytes(muon.inter)} between groups on average"
        )
    if any(unit.bucket_size > 1 for unit in units):
        yield "    of the blocks that it reduces in one step reduce-scatter it updates one"
    if not run.overlaps:
        yield "    nothing overlaps: every collective is waited for where it is queued"
    left = (0, 1 + names.index("stream"))
    aligned = iter(align([cells for cells in lines if cells[1:]], left).splitlines())
    yield from (f"  {next(aligned) if cells else text}" for text, *cells in lines)
    yield from lister.differences(schedule)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f}"


_Listed = TypeVar("_Listed", _Line, _Segment)


def _range(segments: Sequence[_Segment]) -> str:
    return " to ".join(dict.fromkeys((segments[0].name, segments[-1].name)))


def _merged(
    items: Sequence[_Listed], *, within: bool = False
) -> Iterator[tuple[Sequence[_Listed], Sequence[_Listed]]]:
    """Yield (lines or segments to print, their repetitions), with `within` inside one unit only."""
    while items:
        period, stop = _repetition(items, within=within)
        yield items[:period], items[period:stop]
        items = items[stop:]


def _repetition(items: Sequence[_Listed], *, within: bool) -> tuple[int, int]:
    """Return the length of the repeated sequence at the start, and the end of its repetitions."""
    for period in range(1, len(items) // 2 + 1):
        step = 0 if within else items[period].unit - items[0].unit
        stop = period
        while stop < len(items):
            item, before = items[stop], items[stop - period]
            if item.key != before.key or item.unit - before.unit != step:
                break
            stop += 1
        if stop >= 2 * period:
            return period, stop - stop % period
    return 1, 1


class _StepLister:
    """A lister of a step's actions, which the tally counts in order from the first one on."""

    def __init__(self, tally: StepTally, sender: Sender, other_bytes: int) -> None:
        self.tally, self.step, self.run, self.sender = tally, tally.step, tally.run, sender
        self.topology, self.other_bytes = tally.run.topology, other_bytes
        self._buckets = Buckets(number_buffers(tally.step.units))
        self._in_flight: set[tuple[ActionKind, int]] = set()

    def follow(self, segments: Pass) -> list[_Segment]:
        """Count the segments of a pass in the tally; return all that have an effect."""
        listed = []
        for segment in filter(None, segments):
            computing = [action for action in segment if action[0] >= ActionKind.FORWARD]
            unit, name, _ = self._subject(computing[-1] if computing else segment[0])
            before = self.tally.total
            lines = [line for action in segment for line in self._lines(action, unit, before)]
            whole, _, _ = name.partition(" ")  # the unit's name without "1/2" or "frozen"
            listed += [_Segment(unit, whole, before, lines)] if lines else []
        return listed

    def _subject(self, action: Action) -> tuple[int, str, bool]:
        """Return an action's unit, the name of the buffer or unit, and whether it trains."""
        kind, number, *which = action
        buffer = self.step.buffers[self.step.buffer_of(action)]
        unit, index = buffer.unit, buffer.unit_index
        if kind >= ActionKind.FORWARD:
            name, halves = self.tally.activations[number][0], len(self.step.shape.halves(number))
            return index, f"{name} {which[0] + 1}/2" if halves > 1 else name, True
        if kind in _OF_BUCKET and unit.bucket_size > 1:
            *_, last = self._buckets.of(number)
            return index, f"{unit.name} to {self.step.buffers[last].unit.name}", buffer.trains
        return index, buffer.name, buffer.trains

    def _lines(self, action: Action, index: int, segment_before: int) -> Iterator[_Line]:
        kind, number = action[0], action[1]
        before = self.tally.total
        now = self.tally.carry_out(action) or self.tally.at()
        unit, name, trains = self._subject(action)
        waited = {(cause, number) for cause in WAITED_BY.get(kind, ())} & self._in_flight
        self._in_flight -= waited
        sent = [*self._sent(action)]
        if kind in _ACTION_TEXTS:
            sent = [(_ACTION_TEXTS[kind], "", Sent())]
        elif sent and self.run.overlaps:
            self._in_flight.add((kind, number))
        if (kind in _WAITS and not waited) or (
            kind is ActionKind.DROP_FP8 and before == self.tally.total
        ):
            return
        *held, total = self.tally.columns(now).values()
        for words, stream, size in sent:
            moved = (_megabytes(part) if part else "" for part in (size.intra, size.inter))
            text = f"  {words.format(name)}"
            allocated = map(_megabytes, (*held, total + self.other_bytes))
            key = (words, trains, size, held[:-1], now.total - segment_before)
            yield _Line(key, unit - index, words, (text, *moved, stream, *allocated))

    def _sent(self, action: Action) -> Iterator[tuple[str, str, Sent]]:
        """Yield the collectives of an action: words, comm stream, bytes sent."""
        kind, number, *_ = action
        if kind >= ActionKind.FORWARD:
            return
        for each in self.tally.specs[number].sent_by(kind):
            axes, sent = ", ".join(map(self._axis_text, each.span)), self.sender.sent([each])
            if kind in PASS_OF:
                shifts = self.run.strategy.params - 1
                sent = Sent(sent.intra // shifts, sent.inter // shifts)
            words = _COLLECTIVE_TEXTS[kind, each.op, each.is_quantized]
            yield words, f"{each.stream_kind.value} {axes}", sent

    def _axis_text(self, axis: Axis) -> str:
        """Name an axis by its links, and by its degrees if several axes have equal links."""
        on_link = [other for other in self.topology.axes if other.link is axis.link]
        degrees = f" {axis.inner}-{axis.outer}" if len(on_link) > 1 else ""
        return f"{_LINK_NAMES[axis.link]}{degrees}"

    def lines_of(self, what: str, segments: Sequence[_Segment]) -> Iterator[Cells]:
        """Yield the printed lines of a pass; a single action has no heading."""
        for first, same in _merged(segments):
            lines = [line for segment in first for line in segment.lines]
            more = same[0].allocated - first[0].allocated if same else 0
            if len(lines) == 1 and not more:
                named = lines[0].words.format(_range([*first, *same]))
                yield (f"  {named}", *lines[0].cells[1:])
                continue
            heading = f"{what} {_range(first)}"
            if same:
                heading += f", and the same for {_range(same)}"
            if more:
                heading += f", each time {size_text(abs(more))} {'more' if more > 0 else 'less'}"
            yield (heading,)
            for segment in first:
                for listed, again in _merged(segment.lines, within=True):
                    yield from (line.cells for line in listed)
                    if again:
                        times = count_text(len(again) // len(listed), "time")
                        yield (f"    the last {count_text(len(listed), 'action')}, {times} more",)

    def differences(self, schedule: StepSchedule) -> Iterator[str]:
        """Yield the collectives that other micro-batches have in addition to the last, or lack."""
        *others, last = (
            Counter(
                (words, self._subject(action)[1])
                for action in chain.from_iterable(chain(*both))
                for words, _, _ in self._sent(action)
            )
            for both in schedule.micro_batches
        )
        trained = {buffer.unit.name for buffer in self.step.buffers if buffer.trains}
        buckets = {
            self._subject((ActionKind.GRAD_SYNC, number))[1] for number, *_ in self._buckets.buckets
        }
        which = ("the first micro-batch", "each between the first and the last")
        for name, sent in zip(which, others, strict=False):
            for how, counts in (("also", sent - last), ("not", last - sent)):
                for words in dict.fromkeys(words for words, _ in counts):
                    units = [
                        f"{count} x {unit}" if count > 1 else unit
                        for (of_unit, unit), count in counts.items()
                        if of_unit == words
                    ]
                    all_of_them = {*units} in (trained, buckets)
                    listed = "all that trains" if all_of_them else ", ".join(units)
                    yield f"  {name}, {how}: {words.format(listed)}"
