"""Text for a search result: the best candidate, why it is the best, and the runner-up."""

from __future__ import annotations

from collections.abc import Iterator

from paro.planning.estimator import BITS_GAIN, Estimate
from paro.planning.planner import MEMORY_TIE, TIE, SearchResult
from paro.quantization.formats import FULL_BITS
from paro.text import size_text
from paro.topology import PLANNED_WAITS


def describe(plan: SearchResult, *, chose: str = "chose") -> Iterator[str]:
    """Yield lines for the start of a run; `chose` is the verb in front of the best candidate."""
    yield (
        f"planner: {plan.num_candidates} candidates, {plan.num_simulated} of them simulated; they "
        f"differ in {plan.searched}"
    )
    if (best := plan.best) is None:
        return
    on_host = f", and {size_text(best.host_bytes)} of host memory" if best.host_bytes else ""
    yield (
        f"planner: {chose} {best.candidate.describe()}: {seconds_text(best.seconds)} a step, MFU "
        f"{best.mfu:.1%}, {best.memory_bytes / 1e9:.1f} of the {plan.limit_text}{on_host}"
    )
    yield f"planner: because {_reason(plan, best)}"
    if plan.other_bits is not None:
        yield f"planner: {bits_text(best, plan.other_bits)}"
    elif best.candidate.inter_bits == FULL_BITS:
        yield "planner: 16 bits: nothing that codes could shorten crosses groups"
    if plan.runner_up is None:
        yield "planner: no other strategy fits"
        return
    second = plan.runner_up
    yield (
        f"planner: the runner-up {second.candidate.describe()} {behind(second, best)}, with "
        f"{size_text(second.memory_bytes)}; it waits {exposed_text(second)}"
    )


def bits_text(estimate: Estimate, other: Estimate) -> str:
    """Write how step times differ with quantized values between groups and with 16 bits."""
    full, quantized = (other, estimate) if estimate.precision.quantizes else (estimate, other)
    bits = quantized.precision.describe_inter_bits()
    text = (
        f"a step takes {seconds_text(quantized.seconds)} with {bits} between groups, "
        f"{seconds_text(full.seconds)} with 16"
    )
    if quantized.seconds >= full.seconds:
        return f"{text}: packing costs more than it saves"
    if quantized.seconds >= full.seconds * (1 - BITS_GAIN):
        return f"{text}: that is less than {BITS_GAIN:.0%} saved"
    return text


def behind(second: Estimate, best: Estimate) -> str:
    """Write why the runner-up is second: it takes longer, or sends more."""
    slower = second.seconds / best.seconds - 1
    if abs(slower) > TIE:
        return f"is {abs(slower):.1%} {'slower' if slower > 0 else 'faster'}"
    if second.sent.inter <= best.sent.inter:
        return "takes as long"
    sent, less = second.sent.inter / 1e9, best.sent.inter / 1e9
    return f"takes as long but sends {sent:.1f} GB between groups instead of {less:.1f}"


def _reason(plan: SearchResult, best: Estimate) -> str:
    reason = f"it {spent_text(best)}"
    enough = best.seconds / (1 + MEMORY_TIE)
    faster = [e for e in plan.front if not e.fits and e.seconds < enough]
    if not faster:
        return f"{reason}; none is more than {MEMORY_TIE:.0%} faster, even with more memory"
    nearest = min(faster, key=lambda e: e.memory_bytes)
    return (
        f"{reason}; {nearest.candidate.describe()} would be "
        f"{best.seconds / nearest.seconds - 1:.1%} faster but needs "
        f"{size_text(nearest.memory_bytes)}"
    )


def exposed_text(estimate: Estimate) -> str:
    """Write the exposed communication of a step by kind, longest first."""
    parts = sorted(estimate.timeline.exposed.items(), key=lambda part: -part[1])
    floor = 0.001 * estimate.seconds
    waits = ((PLANNED_WAITS[kind].words, time) for kind, time in parts if time > floor)
    listed = (f"{seconds_text(time)} for {words}" for words, time in waits)
    return ", ".join(listed) or "for nothing"


def spent_text(estimate: Estimate) -> str:
    """Write the compute time and the exposed communication of a step."""
    seconds = seconds_text(estimate.timeline.compute_seconds)
    return f"computes for {seconds} and waits {exposed_text(estimate)}"


def seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
