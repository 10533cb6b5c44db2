"""The failures of a study of recovery, in a file, and the tables and the picture of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from tools.bench.recovery.cases import CASES, Case
from tools.shared.output import markdown_table, write_json
from tools.shared.picture import drawing, log_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failure and its cost; seconds are from the kill to the next new iteration."""

    case: str
    kind: str
    where: int  # the rank or node
    seconds: float
    computed_again: int  # iterations that had been printed
    recovered: int | None  # iteration from memory
    recovery_seconds: float | None  # of that: agreeing, reading, sending
    step_seconds: float  # of the undisturbed training
    load: float  # of the machine before it


@dataclass(slots=True, kw_only=True)
class Study:
    """The measurements so far, as their file has them."""

    path: Path
    undisturbed: dict[str, list[list[str]]] = field(default_factory=dict)
    step_seconds: dict[str, float] = field(default_factory=dict)
    losses_compared: int = 0
    complaints: list[str] = field(default_factory=list)
    steady: dict[str, dict[str, float]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Study:
        """Read a file of failures; empty if it does not exist."""
        content = json.loads(path.read_text()) if path.exists() else {"failures": []}
        failures = [Failure(**each) for each in content.pop("failures")]
        return cls(path=path, failures=failures, **content)

    def save(self) -> None:
        kept = {k: v for k, v in asdict(self).items() if k != "path"}
        write_json(self.path, kept, is_update=True)

    def of(self, case: Case, kind: str | None = None) -> list[Failure]:
        return [f for f in self.failures if f.case == case.name and kind in (None, f.kind)]

    def wanted(self, case: Case) -> list[str]:
        """Return the kinds of failures of which some are missing, those with most missing first."""
        missing = {kind: count - len(self.of(case, kind)) for kind, count in case.kinds.items()}
        return sorted((k for k, left in missing.items() if left > 0), key=lambda k: -missing[k])


def tables(study: Study) -> str:
    """Return the figures by case, and by kind of failure, as Markdown."""
    return "\n".join((*_by_case(study), "", *_by_kind(study), "", *_steady(study)))


def _by_case(study: Study) -> list[str]:
    rows: list[tuple[object, ...]] = []
    for case in CASES:
        failures = study.of(case)
        if not failures:
            continue
        seconds = [failure.seconds for failure in failures]
        from_memory = [f for f in failures if f.recovery_seconds is not None]
        own = [f.recovery_seconds or 0.0 for f in from_memory]
        steps = [(f.recovery_seconds or 0.0) / f.step_seconds for f in from_memory]
        recovery = (f"{median(own):.2f}", f"{max(steps):.2f}") if own else ("from disk", "")
        again = max(failure.computed_again for failure in failures)
        rows.append((case.name, len(failures), again, _median_and_most(seconds), *recovery))
    heads = "training | failures | computed again, at most | s to the next new iteration: median, "
    heads += "most | recovery: median s | in steps, at most"
    return markdown_table(heads, rows)


def _median_and_most(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.1f}, {max(seconds):.1f}"


def _by_kind(study: Study) -> list[str]:
    rows = []
    names = {case.name for case in CASES if case.own_flags}
    kinds = dict.fromkeys(kind for case in CASES for kind in case.kinds)
    for kind in kinds:
        failures = [f for f in study.failures if f.kind == kind and f.case in names]
        if failures:
            seconds = [failure.seconds for failure in failures]
            again = max(failure.computed_again for failure in failures)
            rows.append((kind, len(failures), again, _median_and_most(seconds)))
    heads = "failure, from memory | number | computed again, at most | s: median, most"
    return markdown_table(heads, rows)


def _steady(study: Study) -> list[str]:
    rows = [
        (name, f"{ratios['step_ratio'] - 1.0:+.1%}", f"{ratios['nic_bytes_ratio'] - 1.0:+.2%}")
        for name, ratios in study.steady.items()
    ]
    return markdown_table("training | a step with a copy takes | NIC bytes", rows)


def plot(study: Study, path: Path) -> None:
    """Draw the seconds from each kill to the next new iteration, by case."""
    cases = [case for case in CASES if study.of(case)]
    with drawing(path, 1, 1, size=(8, 0.7 * len(cases) + 1.2)) as (_, (panel,)):
        panel.boxplot(
            [[failure.seconds for failure in study.of(case)] for case in cases],
            orientation="horizontal",
            tick_labels=[f"{case.name} ({len(study.of(case))})" for case in cases],
        )
        panel.invert_yaxis()
        log_scale(panel.xaxis)
        panel.set(xlabel="seconds from a failure to the next new iteration")
        ticks = [15, 20, 30, 40, 60, 80, 120]
        panel.set_xticks(ticks, labels=map(str, ticks))
        panel.set_xticks([], minor=True)
        panel.grid(alpha=0.3)
