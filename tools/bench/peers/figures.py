"""Medians, ratios, agreement checks and tables of the turns; pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from paro.report.record import PlannedStep
from paro.text import align
from tools.bench.shared.turns import median_known
from tools.shared.output import text_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
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


Rounds = dict[str, list[Turn]]  # by contender, in the order of rounds


class DisagreementError(RuntimeError):
    """Contenders that should train identically do not."""


def check_agreement(reference: Turn, turn: Turn, tolerance: float) -> None:
    """Raises unless losses agree to `tolerance` and gradient norms to ten times that, relatively.

    Adam is invariant to a wrong scale of the gradients; the norms reveal it.
    """
    for what, allowed in (("losses", tolerance), ("grad_norms", 10.0 * tolerance)):
        theirs, own = getattr(reference, what), getattr(turn, what)
        assert len(theirs) == len(own), f"{len(own)} steps of {turn.contender}, not {len(theirs)}"
        for step, (expected, value) in enumerate(zip(theirs, own, strict=True), start=1):
            # Written so that NaN counts as a difference.
            if not abs(value - expected) <= allowed * abs(expected):
                raise DisagreementError(
                    f"{turn.contender} differs from {reference.contender}: {what} {value:.6g} and "
                    f"{expected:.6g} in step {step}, more than {allowed:g} apart"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Medians over the rounds of one contender."""

    contender: str
    seconds: float
    tokens_per_second: float
    cpu_seconds: float
    state_bytes: int
    peak_bytes: float | None
    nic_bytes: float | None
    waited_seconds: float | None
    context_seconds: float | None  # of these, for tokens of the ranks that share a sample
    flops_per_second: float  # of a rank, as MFU counts them, with attention halved


def summarize(rounds: Rounds, tokens_per_step: int, rank_flops: float) -> list[Summary]:
    """One summary per contender, in their order; `rank_flops`: a rank's share of a step."""
    return [
        Summary(
            contender=name,
            seconds=median(turn.seconds for turn in turns),
            tokens_per_second=tokens_per_step / median(turn.seconds for turn in turns),
            cpu_seconds=median(turn.cpu_seconds for turn in turns),
            state_bytes=max(turn.state_bytes for turn in turns),
            peak_bytes=median_known(turn.peak_bytes for turn in turns),
            nic_bytes=median_known(turn.nic_bytes for turn in turns),
            waited_seconds=median_known(turn.waited for turn in turns),
            context_seconds=median_known(
                (turn.waited_seconds or {}).get("context") for turn in turns
            ),
            flops_per_second=rank_flops / median(turn.seconds for turn in turns),
        )
        for name, turns in rounds.items()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """A contender relative to a baseline: medians over rounds of the ratios within a round."""

    contender: str
    baseline: str
    speed: float  # tokens per second; above 1 is faster
    slowest: float  # the least favourable round
    fastest: float
    state_bytes: float
    peak_bytes: float | None
    nic_bytes: float | None


def compare(rounds: Rounds, baseline: str) -> list[Ratios]:
    """The ratios of every contender to the baseline, including its own."""
    found = []
    for name, turns in rounds.items():
        pairs = list(zip(turns, rounds[baseline], strict=True))
        speeds = [other.seconds / turn.seconds for turn, other in pairs]
        ratios = Ratios(
            contender=name,
            baseline=baseline,
            speed=median(speeds),
            slowest=min(speeds),
            fastest=max(speeds),
            state_bytes=median(turn.state_bytes / other.state_bytes for turn, other in pairs),
            peak_bytes=median_known(_ratio(t.peak_bytes, o.peak_bytes) for t, o in pairs),
            nic_bytes=median_known(_ratio(t.nic_bytes, o.nic_bytes) for t, o in pairs),
        )
        found.append(ratios)
    return found


def _ratio(value: float | None, other: float | None) -> float | None:
    return None if value is None or not other else value / other


# Text #


def summary_table(summaries: Sequence[Summary]) -> str:
    """Text table: seconds, tokens and bytes by contender."""
    return text_table(
        {
            "contender": row.contender,
            "s/step": f"{row.seconds:.3f}",
            "tokens/s": f"{row.tokens_per_second:.1f}",
            "states MB": _mb(row.state_bytes),
            "peak MB": _mb(row.peak_bytes),
            "NIC MB/step": _mb(row.nic_bytes),
            "CPU s/step": f"{row.cpu_seconds:.2f}",
            "waited s/step": "-" if row.waited_seconds is None else f"{row.waited_seconds:.2f}",
            "GFLOP/s a rank": f"{row.flops_per_second / 1e9:.2f}",
        }
        for row in summaries
    )


def ratio_table(ratios: Sequence[Ratios]) -> str:
    """Text table: every contender as multiples of one baseline."""
    return text_table(
        {
            f"against {row.baseline}": row.contender,
            "tokens/s": f"{row.speed:.2f}",
            "(rounds)": f"({row.slowest:.2f}-{row.fastest:.2f})",
            "states": _times(row.state_bytes),
            "peak": _times(row.peak_bytes),
            "NIC": _times(row.nic_bytes),
        }
        for row in ratios
    )


def prediction_table(summaries: Sequence[Summary], planned: Mapping[str, PlannedStep]) -> str:
    """Text table: steps, and the share of them that waits for others' tokens, as predicted."""
    head = ["beside its prediction", "s/step", "predicted", "error", "tokens awaited", "predicted"]
    rows = []
    for row in summaries:
        if row.context_seconds is None:
            continue
        share = f"{row.context_seconds / row.seconds:.1%}"
        cells = ["-", "-", share, "-"]
        if (step := planned.get(row.contender)) is not None:
            predicted = step.seconds["step"]
            context = step.seconds.get("context", 0.0) / predicted
            error = f"{predicted / row.seconds - 1:+.1%}"
            cells = [f"{predicted:.3f}", error, share, f"{context:.1%}"]
        rows.append([row.contender, f"{row.seconds:.3f}", *cells])
    return align([head, *rows])


def _mb(count: float | None) -> str:
    return "-" if count is None else f"{count / 1e6:.2f}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None or math.isnan(ratio) else f"{ratio:.3f}"
