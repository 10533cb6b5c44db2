"""Time breakdown over the ranks: Megatron's timer lines, and the straggler line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

_WIDTH = 48
_NOTICEABLE = 0.02  # fraction of an iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Seconds that one rank spent since the last log line, by kind."""

    step: float = 0.0
    data: float = 0.0  # waiting for batches
    communication: float = 0.0  # exposed gathers, reductions, all-gather of updated parameters
    agreement: float = 0.0  # waiting for all ranks to reach the end of the step

    def __add__(self, other: RankTimes) -> RankTimes:
        sums = {name: own + getattr(other, name) for name, own in asdict(self).items()}
        return RankTimes(**sums)

    @property
    def compute(self) -> float:
        """The step time without all waiting."""
        return max(0.0, self.step - self.data - self.communication - self.agreement)


def timer_lines(everywhere: Sequence[Mapping[str, float]], *, option: str, iterations: int) -> str:
    """Megatron's timer block: one line per timer, in ms per iteration, over the ranks."""
    to_ms = 1000.0 / iterations
    names = list(dict.fromkeys(name for timers in everywhere for name in timers))
    title = {
        "max": "max time across ranks (ms):",
        "minmax": "(min, max) time across ranks (ms):",
        "all": "times across ranks (ms):",
    }[option]
    lines = [title]
    for name in names:
        times = [timers.get(name, 0.0) * to_ms for timers in everywhere]
        label = f"    {(name + ' ').ljust(_WIDTH, '.')}:"
        if option == "max":
            lines.append(f"{label} {max(times):.2f}")
        elif option == "minmax":
            lines.append(f"{label} ({min(times):.2f}, {max(times):.2f})")
        else:
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {ms:.2f}" for rank, ms in enumerate(times)]
    return "\n".join(lines)


def straggler_line(everywhere: Sequence[RankTimes], *, iterations: int) -> str:
    """Which rank the others wait for, and why: compute, data, or only communication.

    All ranks reach the end of a step together, so the straggler is the rank that waits least for
    the others: the one with the most compute and data time.
    """
    to_ms = 1000.0 / iterations
    busy = [times.compute + times.data for times in everywhere]
    slowest = max(range(len(busy)), key=busy.__getitem__)
    own = everywhere[slowest]
    step = own.step * to_ms
    excess = {
        "compute": (own.compute - median(times.compute for times in everywhere)) * to_ms,
        "data": (own.data - median(times.data for times in everywhere)) * to_ms,
    }
    cause = max(excess, key=excess.__getitem__)
    shown = (
        f" slowest rank: {slowest} | compute (ms): {own.compute * to_ms:.1f}"
        f" | data (ms): {own.data * to_ms:.1f}"
        f" | communication (ms): {own.communication * to_ms:.1f}"
        f" | waiting for other ranks (ms): {own.agreement * to_ms:.1f} | "
    )
    if excess[cause] > _NOTICEABLE * step:
        return f"{shown}cause: {cause}, {excess[cause]:.1f} ms above the median rank |"
    least_exposed = min(times.communication for times in everywhere) * to_ms
    if least_exposed > _NOTICEABLE * step:
        return f"{shown}cause: communication, every rank waits {least_exposed:.1f} ms or more |"
    return f"{shown}cause: none, ranks differ by less than {100 * _NOTICEABLE:.0f}% of a step |"
