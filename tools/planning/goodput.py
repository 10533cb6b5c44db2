"""The share of its time in which a run with failing nodes makes progress."""

# Nodes fail independently and without memory, so failures of n nodes come every M = MTBF / n on
# average. Each one ends all ranks. A run that keeps its state every tau seconds of work, at a cost
# of delta seconds, and needs R seconds until it trains again, takes
#
#     T = M exp(R / M) (exp((tau + delta) / M) - 1)
#
# seconds for tau seconds of work (J. Daly, A higher order estimate of the optimum checkpoint
# interval for restart dumps, Future Generation Computer Systems 22, 2006: its complete model). By
# the derivative, tau / T is largest where (tau + delta) / M + log(1 - tau / M) = 0.
#
# Local copies are the same with a small delta, what a copy delays a step. If K nodes may be lost, a
# failure is recovered from memory unless K others fail within the R seconds after it, with
# probability p = P(Poisson(R / M) >= K): then all copies of some state may be gone (the worst
# case), and the run continues from a checkpoint. So checkpoints on disk are needed every M / p on
# average, and the two shares multiply: checkpoints of two levels, as in A. Moody et al., SC 2010.

from __future__ import annotations

import math
from dataclasses import dataclass

from paro.errors import check_positive, count_text

# What a local copy delays a step by, as a share of it.
COPY_SHARE = 0.02
_MOST = 500.0  # an exponent beyond which nothing progresses


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Failing nodes, and the costs of a restart and of checkpoints on disk."""

    num_nodes: int
    mtbf_hours: float  # of one node
    restart_seconds: float  # from a failure until the state is read: noticing, starting, building
    checkpoint_seconds: float  # to write a checkpoint, and to read one

    def __post_init__(self) -> None:
        check_positive(mtbf_hours=self.mtbf_hours, restart_seconds=self.restart_seconds)

    @property
    def seconds_between(self) -> float:
        """The mean time from one failure of any node to the next."""
        return self.mtbf_hours * 3600.0 / self.num_nodes

    def describe(self) -> str:
        return (
            f"a node fails every {self.mtbf_hours:,g} hours, one of the "
            f"{count_text(self.num_nodes, 'node')} every {self.seconds_between / 3600.0:,.1f}"
        )


@dataclass(frozen=True, slots=True)
class Goodput:
    """The share of useful work; the work between checkpoints on disk, and between local copies."""

    share: float
    checkpoint_seconds: float
    copy_steps: int | None = None


def from_disk(failures: Failures) -> Goodput:
    """Compute the goodput with checkpoints at their best interval."""
    return _best(failures, failures.seconds_between)


def from_memory(
    failures: Failures, *, survives: int, step_seconds: float, transfer_seconds: float
) -> Goodput:
    """Compute the goodput with local copies at their best interval, checkpoints for other losses.

    `transfer_seconds` is the time to send a lost node's states from the nodes that hold them.
    """
    between, cost = failures.seconds_between, COPY_SHARE * step_seconds
    restart = failures.restart_seconds + transfer_seconds
    num_steps = max(1, round(_best_interval(between, cost) / step_seconds))
    share = _share(between, num_steps * step_seconds, cost, restart)
    beyond = _at_least(survives, restart / between)
    rest = _best(failures, between / beyond if beyond > 0.0 else math.inf)
    return Goodput(share * rest.share, rest.checkpoint_seconds, num_steps)


def _best(failures: Failures, between: float) -> Goodput:
    """Compute the goodput of checkpoints at the best interval, for losses so many seconds apart."""
    if math.isinf(between):
        return Goodput(1.0, math.inf)
    save = failures.checkpoint_seconds
    interval = _best_interval(between, save)
    return Goodput(_share(between, interval, save, failures.restart_seconds + save), interval)


def _best_interval(between: float, cost: float) -> float:
    """Return the seconds of work between savings that leave the largest share of time to work."""
    low, high = 0.0, between * (1.0 - 1e-12)
    for _ in range(100):
        middle = (low + high) / 2
        if (middle + cost) / between + math.log1p(-middle / between) > 0.0:
            low = middle
        else:
            high = middle
    return low


def _share(between: float, work: float, cost: float, restart: float) -> float:
    """Return the share of time in which work counts, with failures every `between` seconds."""
    if (work + cost + restart) / between > _MOST:
        return 0.0
    per_work = math.expm1((work + cost) / between) * math.exp(restart / between)
    return work / (between * per_work) if per_work > 0.0 else math.exp(-restart / between)


def _at_least(count: int, mean: float) -> float:
    """Return the probability of so many events or more where `mean` are expected (Poisson)."""
    below, term = 0.0, math.exp(-mean)
    for number in range(count):
        below += term
        term *= mean / (number + 1)
    if count == 0 or below < 0.5:
        return 1.0 - below
    # Terms from `count` on, as 1 - below would lose them to rounding.
    rest, number = 0.0, count
    while term > rest * 1e-16:
        rest += term
        number += 1
        term *= mean / number
    return rest
