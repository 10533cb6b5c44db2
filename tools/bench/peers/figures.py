"""Medians, ratios, agreement checks, tables and plots of the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from paro.report.record import PlannedStep
from paro.text import align
from tools.bench.shared.turns import median_known
from tools.shared.output import text_table
from tools.shared.picture import drawing

OURS, THEIRS = "tab:orange", "tab:blue"
PANELS = (
    ("seconds per step", "seconds", 1.0),
    ("tokens per second", "tokens_per_second", 1.0),
    ("model states, MB on a rank", "state_bytes", 1e6),
    ("peak memory, MB on a rank", "peak_bytes", 1e6),
    ("sent by all NICs, MB per step", "nic_bytes", 1e6),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRun:
    """Results of one contender in one round; figures are per optimizer step, over all ranks."""

    contender: str
    seconds: float  # of the slowest rank
    cpu_seconds: float  # summed over all ranks and their threads
    state_bytes: int  # of the rank with the most
    peak_bytes: int | None  # of the rank with the most; None where the system does not report it
    nic_bytes: int | None  # sent by all nodes together; None where no interface is watched
    losses: list[float]  # of every step, including warm-up
    grad_norms: list[float]
    # Time the computation waited, mean over ranks, by cause; None where it is not reported.
    waited_seconds: dict[str, float] | None = None

    @property
    def waited(self) -> float | None:
        return None if self.waited_seconds is None else sum(self.waited_seconds.values())


Rounds = dict[str, list[TimedRun]]  # by contender, in the order of rounds
Row = dict[str, Any]  # figures of a contender, as --json has them


class DisagreementError(RuntimeError):
    """The error for contenders that should train identically and do not."""


def check_agreement(reference: TimedRun, run: TimedRun, tolerance: float) -> None:
    """Raise unless losses agree to `tolerance` and gradient norms to ten times that, relatively.

    Adam is invariant to a wrong scale of the gradients; the norms reveal it.
    """
    for what, allowed in (("losses", tolerance), ("grad_norms", 10.0 * tolerance)):
        theirs, own = getattr(reference, what), getattr(run, what)
        assert len(theirs) == len(own), f"{len(own)} steps of {run.contender}, not {len(theirs)}"
        for step, (expected, value) in enumerate(zip(theirs, own, strict=True), start=1):
            # Written so that NaN counts as a difference.
            if not abs(value - expected) <= allowed * abs(expected):
                raise DisagreementError(
                    f"{run.contender} differs from {reference.contender}: {what} {value:.6g} and "
                    f"{expected:.6g} in step {step}, more than {allowed:g} apart"
                )


def summarize(rounds: Rounds, tokens_per_step: int, rank_flops: float) -> list[Row]:
    """Make a row of medians per contender; `rank_flops`: a rank's share of a step."""
    rows = []
    for name, runs in rounds.items():
        seconds = median(run.seconds for run in runs)
        row = {
            "contender": name,
            "seconds": seconds,
            "tokens_per_second": tokens_per_step / seconds,
            "cpu_seconds": median(run.cpu_seconds for run in runs),
            "state_bytes": max(run.state_bytes for run in runs),
            "peak_bytes": median_known(run.peak_bytes for run in runs),
            "nic_bytes": median_known(run.nic_bytes for run in runs),
            "waited_seconds": median_known(run.waited for run in runs),
            # Of these, for tokens of the ranks that share a sample.
            "context_seconds": median_known(
                (run.waited_seconds or {}).get("context") for run in runs
            ),
            # Of a rank, as MFU counts them, with attention halved.
            "flops_per_second": rank_flops / seconds,
        }
        rows.append(row)
    return rows


def compare(rounds: Rounds, baseline: str) -> list[Row]:
    """Make a row per contender, the baseline too: medians over rounds of ratios within one."""
    rows = []
    for name, runs in rounds.items():
        pairs = list(zip(runs, rounds[baseline], strict=True))
        speeds = [other.seconds / run.seconds for run, other in pairs]
        row = {
            "contender": name,
            "baseline": baseline,
            "speed": median(speeds),  # tokens per second; above 1 is faster
            "slowest": min(speeds),  # the least favourable round
            "fastest": max(speeds),
            "state_bytes": median(run.state_bytes / other.state_bytes for run, other in pairs),
            "peak_bytes": median_known(_ratio(t.peak_bytes, o.peak_bytes) for t, o in pairs),
            "nic_bytes": median_known(_ratio(t.nic_bytes, o.nic_bytes) for t, o in pairs),
        }
        rows.append(row)
    return rows


def _ratio(value: float | None, other: float | None) -> float | None:
    return None if value is None or not other else value / other


# Text and plots #


def summary_table(summaries: Sequence[Row]) -> str:
    """Return the text table: seconds, tokens and bytes by contender."""
    return text_table(
        {
            "contender": row["contender"],
            "s/step": f"{row['seconds']:.3f}",
            "tokens/s": f"{row['tokens_per_second']:.1f}",
            "states MB": _shown(row["state_bytes"], 1e6),
            "peak MB": _shown(row["peak_bytes"], 1e6),
            "NIC MB/step": _shown(row["nic_bytes"], 1e6),
            "CPU s/step": f"{row['cpu_seconds']:.2f}",
            "waited s/step": _shown(row["waited_seconds"]),
            "GFLOP/s a rank": f"{row['flops_per_second'] / 1e9:.2f}",
        }
        for row in summaries
    )


def ratio_table(ratios: Sequence[Row]) -> str:
    """Return the text table: every contender as multiples of one baseline."""
    return text_table(
        {
            f"against {row['baseline']}": row["contender"],
            "tokens/s": f"{row['speed']:.2f}",
            "(rounds)": f"({row['slowest']:.2f}-{row['fastest']:.2f})",
            "states": _shown(row["state_bytes"], form=".3f"),
            "peak": _shown(row["peak_bytes"], form=".3f"),
            "NIC": _shown(row["nic_bytes"], form=".3f"),
        }
        for row in ratios
    )


def prediction_table(summaries: Sequence[Row], planned: Mapping[str, PlannedStep]) -> str:
    """Format a table of steps, and of the share that waits for others' tokens, as predicted."""
    head = ["beside its prediction", "s/step", "predicted", "error", "tokens awaited", "predicted"]
    rows = []
    for row in summaries:
        if row["context_seconds"] is None:
            continue
        share = f"{row['context_seconds'] / row['seconds']:.1%}"
        cells = ["-", "-", share, "-"]
        if (step := planned.get(row["contender"])) is not None:
            predicted = step.seconds["step"]
            context = step.seconds.get("context", 0.0) / predicted
            error = f"{predicted / row['seconds'] - 1:+.1%}"
            cells = [f"{predicted:.3f}", error, share, f"{context:.1%}"]
        rows.append([row["contender"], f"{row['seconds']:.3f}", *cells])
    return align([head, *rows])


def _shown(value: float | None, unit: float = 1.0, form: str = ".2f") -> str:
    return "-" if value is None else f"{value / unit:{form}}"


def plot(path: Path, title: str, summaries: Sequence[Row], rounds: Rounds) -> None:
    """Write the plot; a figure that was not measured leaves its panel empty."""
    with drawing(path, 2, 3, size=(16, 9)) as (figure, (*bars, curves)):
        figure.suptitle(title)
        for panel, (label, field, unit) in zip(bars, PANELS, strict=True):
            _draw_bars(panel, label, {row["contender"]: row[field] for row in summaries}, unit)
        for above, (name, runs) in enumerate(reversed(rounds.items())):
            # The curves coincide: wider ones go below.
            steps, width = range(1, len(runs[0].losses) + 1), 2 * (len(rounds) - above)
            curves.plot(steps, runs[0].losses, linewidth=width, label=name)
        curves.set(title="loss", xlabel="step")
        curves.legend(fontsize="x-small")


def _draw_bars(axis: Any, label: str, values: dict[str, float | None], unit: float) -> None:
    axis.set_title(label)
    if not any(values.values()):
        axis.text(0.5, 0.5, "not measured here", ha="center", transform=axis.transAxes)
        axis.set_axis_off()
        return
    colours = [OURS if name.startswith("paro:") else THEIRS for name in values]
    widths = [(value or 0.0) / unit for value in values.values()]
    drawn = axis.barh(list(values), widths, color=colours)
    texts = [_shown(value, unit, ".4g") for value in values.values()]
    axis.bar_label(drawn, texts, padding=2, fontsize="small")
    axis.margins(x=0.2)
    axis.invert_yaxis()  # the first contender on top, as in the table
