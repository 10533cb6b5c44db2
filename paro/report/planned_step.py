"""Compares measured steps with the planner's, and says what to measure where they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from paro.report.record import IterationRecord, PlannedStep

SETTLED, COMPARED = 10, 20  # iterations 11 to 20 are compared with the plan
_TOLERANCE = 0.15  # largest relative error of step time or memory without a warning

_LINKS = "tools/bench_collectives.py --machine-file, launched as this run, measures the links"
_DEVICE = "tools/bench_collectives.py --machine-file, given this model's sizes, measures the device"


class Part(NamedTuple):
    """A part of a step's time: computation, or exposed communication of one kind."""

    name: str  # key in the run record and in dashboard tags
    words: str
    seconds: Callable[[IterationRecord], float]
    remedy: str  # advice if the measured part differs from the planned part


def _computing(record: IterationRecord) -> float:
    return (record.iteration_time_ms - record.data_wait_ms) / 1000.0 - record.exposed.total


PARTS = (
    Part("computing", "computing", _computing, _DEVICE),
    Part("gather", "gathers", lambda record: record.exposed.gather, _LINKS),
    Part("reduce", "gradient reductions", lambda record: record.exposed.reduce, _LINKS),
    Part("publish", "updated parameters", lambda record: record.exposed.publish, _LINKS),
    Part("context", "attention's tokens", lambda record: record.exposed.context, _LINKS),
)


def measured_seconds(records: Sequence[IterationRecord], planned: PlannedStep) -> dict[str, float]:
    """Return medians of a step and its planned parts, named as in `PlannedStep.seconds`."""
    whole = median(record.iteration_time_ms / 1000.0 for record in records)
    parts = {part.name: median(map(part.seconds, records)) for part in _parts(planned)}
    return {"step": whole} | parts


def _parts(planned: PlannedStep) -> list[Part]:
    """Return the planned parts of this run: attention waits only where ranks share samples."""
    return [part for part in PARTS if part.name in planned.seconds]


def comparison(
    planned: PlannedStep,
    measured: Mapping[str, float],
    *,
    peak_bytes: int,
    planned_bytes: int,
) -> Iterator[str]:
    """Yield a line of measured (planned) values, and a line for each part that is far off."""
    texts = [
        f"{part.words} {measured[part.name]:.3g} ({planned.seconds[part.name]:.3g})"
        for part in _parts(planned)
    ]
    yield (
        f"> measured (and planned on machine {planned.machine}), in seconds: a step "
        f"{measured['step']:.3g} ({planned.seconds['step']:.3g}): {', '.join(texts)}; memory "
        f"{peak_bytes / 1e9:.3g} ({planned_bytes / 1e9:.3g}) GB"
    )
    step = max(measured["step"], planned.seconds["step"])
    for part in _parts(planned):
        more = measured[part.name] - planned.seconds[part.name]
        if abs(more) > _TOLERANCE * step:
            than = "more" if more > 0.0 else "less"
            yield f"> {part.words}: {abs(more):.3g} s {than} than planned; {part.remedy}"
    if abs(peak_bytes - planned_bytes) > _TOLERANCE * planned_bytes:
        yield "> memory is not as planned; --log-memory-interval 1 measures it by kind"
