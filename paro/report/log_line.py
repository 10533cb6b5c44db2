"""The printed lines of a run: Megatron's exact format, with more fields appended."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime

from paro.report.record import IterationRecord, Metrics, RunFacts, Validation
from paro.report.time_left import duration

_NAME_WIDTH = 48


def arguments_block(arguments: Mapping[str, object]) -> str:
    """Return all arguments sorted by name, with dots up to one column."""
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
    """Return the log line of an interval; parsers of Megatron's line find every field in its
    position."""
    last = interval[-1]
    fields = [
        f" [{now:%Y-%m-%d %H:%M:%S}] iteration {last.iteration:8d}/{facts.train_iters:8d}",
        f"consumed samples: {last.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {metrics.iteration_time_ms:.1f}",
    ]
    if with_throughput:
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {metrics.tflops_per_device:.1f}")
    fields.append(f"learning rate: {last.learning_rate:.6E}")
    fields.append(f"global batch size: {last.global_batch_size:5d}")
    if metrics.lm_loss >= 0.0:  # NaN: every iteration of the interval was skipped
        fields.append(f"lm loss: {metrics.lm_loss:.6E}")
    fields.append(f"loss scale: {last.loss_scale:.1f}")
    if last.has_tokens:
        fields.append(f"grad norm: {last.grad_norm:.3f}")
    if last.num_zeros is not None:
        fields.append(f"num zeros: {last.num_zeros}")
    if last.params_norm is not None:
        fields.append(f"params norm: {last.params_norm:.3f}")
    fields.append(f"number of skipped iterations: {metrics.skipped_iterations:3d}")
    fields.append(f"number of nan iterations: {metrics.nan_iterations:3d}")
    fields.append(f"tokens/s: {metrics.tokens_per_second:.1f}")
    fields.append(f"MFU: {100.0 * metrics.mfu:.2f}%")
    fields.append(f"time left: {duration(seconds_left)}")
    return "".join(field + " | " for field in fields).rstrip(" ")


def impossible_line(metrics: Metrics, facts: RunFacts) -> str:
    """What an MFU above 100% may mean, if attention is counted as it is computed."""
    return (
        f"WARNING: MFU of {100.0 * metrics.mfu_causal:.0f}% with causal attention halved: more "
        f"than the device can compute, so either its peak ({facts.peak.source}) is higher, which "
        "--peak-tflops can say, or not everything is computed"
    )


def perplexity(lm_loss: float) -> float:
    """exp of the loss, bounded so that an untrained model gives a finite number."""
    return math.exp(min(20.0, lm_loss))


def validation_block(found: Validation) -> str:
    """Return the validation line between two rules."""
    where = f"iteration {found.iteration}" + (f" on {found.data_set} set" if found.data_set else "")
    line = f" validation loss at {where} | "
    if found.lm_loss is None:
        line += "no answered token | "
    else:
        line += f"lm loss value: {found.lm_loss:.6E} | "
        line += f"lm loss PPL: {perplexity(found.lm_loss):.6E} | "
    if found.bits_per_byte is not None:
        line += f"bits per byte: {found.bits_per_byte:.6f} | "
    line += f"samples: {found.read} | "
    rule = "-" * (len(line) + 1)
    return "\n".join([rule, line, rule])
