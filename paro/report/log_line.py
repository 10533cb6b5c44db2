"""The printed lines of a run: Megatron's exact format, with more fields appended."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing this loads torch, which preprocessing does not need
    from paro.report.record import IterationRecord, Metrics, RankTimes, RunFacts, Validation

_NAME_WIDTH = 48  # characters of an argument's or timer's name with the dots after it
_NOTICEABLE = 0.02  # least fraction of an iteration for which a straggler is named
_Values = Mapping[str, tuple[float | str | None, str]]  # by name, each with its format


def arguments_block(arguments: Mapping[str, object]) -> str:
    """Format all arguments sorted by name, with dots up to the column of values."""
    lines = [
        f"  {name} {'.' * (_NAME_WIDTH - len(name))} {value}"
        for name, value in sorted(arguments.items(), key=lambda item: item[0].lower())
    ]
    title = "------------------------ arguments ------------------------"
    end = "-------------------- end of arguments ---------------------"
    return "\n".join([title, *lines, end])


def iteration_line(
    interval: Sequence[IterationRecord],
    metrics: Metrics,
    facts: RunFacts,
    *,
    with_throughput: bool,
    seconds_left: float,
    now: datetime,
) -> str:
    """Format Megatron's log line of an interval; parsers of Megatron's logs read it unchanged."""
    last = interval[-1]
    title = f" [{now:%Y-%m-%d %H:%M:%S}] iteration {last.iteration:8d}/{facts.train_iters:8d}"
    tflops = metrics.tflops_per_device if with_throughput else None
    # The loss is NaN if every iteration of the interval was skipped.
    loss = metrics.lm_loss if metrics.lm_loss >= 0.0 else None
    values: _Values = {
        "consumed samples": (last.consumed_samples, "12d"),
        "elapsed time per iteration (ms)": (metrics.iteration_time_ms, ".1f"),
        "throughput per GPU (TFLOP/s/GPU)": (tflops, ".1f"),
        "learning rate": (last.learning_rate, ".6E"),
        "decoupled learning rate": (last.decoupled_learning_rate, ".6E"),
        "global batch size": (last.global_batch_size, "5d"),
        "lm loss": (loss, ".6E"),
        "z loss": (None if last.skipped else last.z_loss, ".6E"),
        "loss scale": (last.loss_scale, ".1f"),
        "grad norm": (last.grad_norm if last.has_tokens else None, ".3f"),
        "num zeros": (last.num_zeros, ""),
        "params norm": (last.params_norm, ".3f"),
        "outer grad norm": (metrics.outer_grad_norm, ".3f"),
        "outer grad cosine": (metrics.outer_grad_cosine, ".3f"),
        "data phase": (metrics.data_phase, ""),
        "number of skipped iterations": (metrics.skipped_iterations, "3d"),
        "number of nan iterations": (metrics.nan_iterations, "3d"),
        "tokens/s": (metrics.tokens_per_second, ".1f"),
        "MFU": (metrics.mfu, ".2%"),
        "time left": (duration(seconds_left), ""),
    }
    return _fields(title, values).rstrip(" ")


def _fields(title: str, values: _Values) -> str:
    """Format a title and named values, each in its own format; None is left out."""
    given = {name: value for name, value in values.items() if value[0] is not None}
    texts = (f"{name}: {value:{form}}" for name, (value, form) in given.items())
    return " | ".join([title, *texts, ""])


def impossible_line(metrics: Metrics, facts: RunFacts) -> str:
    """Explain an MFU above 100%, with causal attention counted as it is computed."""
    return (
        f"WARNING: MFU of {100.0 * metrics.mfu_causal:.0f}% with causal attention halved: more "
        f"than the device can compute, so either its peak ({facts.peak.source}) is higher, which "
        "--peak-tflops can say, or not everything is computed"
    )


def perplexity(lm_loss: float) -> float:
    """Compute exp of the loss, bounded so that an untrained model gives a finite number."""
    return math.exp(min(20.0, lm_loss))


def validation_block(validation: Validation) -> str:
    """Return the validation line between two rules."""
    on = f" on {validation.data_set} set" if validation.data_set else ""
    title, loss = f" validation loss at iteration {validation.iteration}{on}", validation.lm_loss
    values: _Values = {
        "lm loss value": (loss, ".6E"),
        "lm loss PPL": (None if loss is None else perplexity(loss), ".6E"),
        "lm loss of averaged weights": (validation.ema_loss, ".6E"),
        "bits per byte": (validation.bits_per_byte, ".6f"),
        "samples": (validation.read, ""),
    }
    line = _fields(f"{title} | no answered token" if loss is None else title, values)
    rule = "-" * (len(line) + 1)
    return "\n".join([rule, line, rule])


def timer_lines(everywhere: Sequence[Mapping[str, float]], *, option: str, iterations: int) -> str:
    """Format Megatron's timer block: a line per timer, in ms per iteration, over the ranks."""
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
        label = f"    {(name + ' ').ljust(_NAME_WIDTH, '.')}:"
        if option == "max":
            lines.append(f"{label} {max(times):.2f}")
        elif option == "minmax":
            lines.append(f"{label} ({min(times):.2f}, {max(times):.2f})")
        else:
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {ms:.2f}" for rank, ms in enumerate(times)]
    return "\n".join(lines)


def straggler_line(everywhere: Sequence[RankTimes], *, iterations: int) -> str:
    """Name the rank that other ranks wait for, and the cause: compute, data or communication.

    All ranks reach the end of a step together. So the straggler is the rank that waits least for
    other ranks: the rank with the most compute and data time.
    """
    to_ms = 1000.0 / iterations
    busy = [times.compute + times.data for times in everywhere]
    slowest = max(range(len(busy)), key=busy.__getitem__)
    slowest_rank = everywhere[slowest]
    step = slowest_rank.step * to_ms
    excess = {
        "compute": (slowest_rank.compute - median(times.compute for times in everywhere)) * to_ms,
        "data": (slowest_rank.data - median(times.data for times in everywhere)) * to_ms,
    }
    cause = max(excess, key=excess.__getitem__)
    shown = (
        f" slowest rank: {slowest} | compute (ms): {slowest_rank.compute * to_ms:.1f}"
        f" | data (ms): {slowest_rank.data * to_ms:.1f}"
        f" | communication (ms): {slowest_rank.communication * to_ms:.1f}"
        f" | waiting for other ranks (ms): {slowest_rank.agreement * to_ms:.1f} | "
    )
    if excess[cause] > _NOTICEABLE * step:
        return f"{shown}cause: {cause}, {excess[cause]:.1f} ms above the median rank |"
    least_exposed = min(times.communication for times in everywhere) * to_ms
    if least_exposed > _NOTICEABLE * step:
        return f"{shown}cause: communication, every rank waits {least_exposed:.1f} ms or more |"
    return f"{shown}cause: none, ranks differ by less than {100 * _NOTICEABLE:.0f}% of a step |"


def duration(seconds: float) -> str:
    """Return seconds as 1:02:03, preceded by the days if there are any."""
    return str(timedelta(seconds=max(0, round(seconds))))
