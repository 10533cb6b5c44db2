"""Measurements of the training loop, the summary for the metrics file, and dashboard tags."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from paro.distributed.exposed_time import ExposedTime


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsRecord:
    """Measurements of an iteration in which groups trained alone (outer steps)."""

    lm_losses: tuple[float, ...]  # of each group; NaN: the group skipped the step
    # Of the round that ended in the iteration; None: none did.
    outer_grad_norm: float | None = None  # L2 norm of the mean of what groups moved
    # Mean cosine between what a group moved and their mean, weighted by what groups moved.
    outer_grad_cosine: float | None = None
    num_left_out: int | None = None  # groups that took no part


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationRecord:
    """Measurements of one iteration; every iteration makes one, whether it is logged or not."""

    iteration: int  # iteration number, from 1
    consumed_samples: int  # training samples consumed up to and including this iteration
    global_batch_size: int
    lm_loss: float  # mean loss over the global batch; may be NaN
    grad_norm: float  # L2 norm of gradients before clipping; may be NaN
    learning_rate: float
    loss_scale: float
    iteration_time_ms: float
    skipped: bool  # True: no update, for example since a gradient was not finite
    intra_bytes: int  # bytes that this rank sent in this iteration inside its group
    inter_bytes: int  # bytes that this rank sent in this iteration between groups
    num_zeros: float | None = None  # gradient elements equal to 0; None: not counted, or skipped
    params_norm: float | None = None  # L2 norm of updated parameters; None: not computed
    z_loss: float | None = None  # mean z-loss, not in the loss; None: --z-loss-weight is 0
    decoupled_learning_rate: float | None = None  # None: --decoupled-lr is not given
    data_wait_ms: float = 0.0  # ms of waiting for batches, mean over ranks
    # Exposed communication, mean over ranks.
    exposed: ExposedTime = field(default_factory=ExposedTime)
    has_tokens: bool = True  # False: every token is masked, so loss and norm are NaN
    held: Mapping[str, int] = field(default_factory=dict)  # bytes held on this rank by kind
    allocator: Mapping[str, int] = field(default_factory=dict)  # CUDA allocator statistics
    groups: GroupsRecord | None = None  # None: all ranks are synchronous


class Validation(NamedTuple):
    """An evaluation of held-out data after an iteration, and the samples that it read."""

    iteration: int
    consumed_samples: int  # training samples consumed before the evaluation
    lm_loss: float | None  # mean loss; None: every token that was read is masked
    read: str  # held-out samples that the evaluation read, such as `1 to 48`
    bits_per_byte: float | None = None
    data_set: str | None = None  # the data set's name if there are several, or after training
    ema_loss: float | None = None  # mean loss of averaged weights; None: not evaluated

    @property
    def name(self) -> str:
        return self.data_set or "validation"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """The seconds that one rank spent since the last log line, by kind."""

    step: float = 0.0
    data: float = 0.0  # seconds of waiting for batches
    communication: float = 0.0  # seconds of exposed gathers, reductions and param all-gathers
    agreement: float = 0.0  # seconds of waiting for all ranks to reach the end of the step

    def __add__(self, other: RankTimes) -> RankTimes:
        sums = {name: value + getattr(other, name) for name, value in asdict(self).items()}
        return RankTimes(**sums)

    @property
    def compute(self) -> float:
        """The step time without all waiting."""
        return max(0.0, self.step - self.data - self.communication - self.agreement)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakThroughput:
    """Peak throughput of one device, and where the number comes from."""

    flops_per_second: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """The planner's prediction of a step on the machine of --paro-machine."""

    machine: str
    global_batch_size: int
    seconds: Mapping[str, float]  # step, compute, and exposed communication by kind, in seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Constants of a run that convert seconds into throughput, and the planner's predictions."""

    world_size: int
    seq_length: int
    train_iters: int
    flops_per_token: float  # FLOPs of forward and backward, attention over all positions
    flops_per_token_causal: float  # FLOPs of forward and backward, causal attention counted half
    peak: PeakThroughput
    model_state_bytes: int  # this rank's parameters, gradients, master parameters and moments
    predicted: Mapping[str, int] = field(default_factory=dict)  # predicted bytes by kind at peak
    planned: PlannedStep | None = None  # predicted step; None unless the machine file has a device
    phases: dict[str, int] = field(default_factory=dict)  # of data: samples before each

    def phase_of(self, sample: int) -> str | None:
        """Name the data phase of a sample, counted from 1; None without phases."""
        return next((name for name in reversed(self.phases) if self.phases[name] < sample), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """A line of the metrics file, with the fields in the order of the file."""

    iteration: int
    consumed_samples: int
    lm_loss: float
    grad_norm: float
    learning_rate: float
    iteration_time_ms: float
    tokens_per_second: float
    data_wait_ms: float
    tflops_per_device: float
    mfu: float
    mfu_causal: float
    peak_memory_bytes: int
    peak_reserved_bytes: int | None  # peak that the CUDA allocator reserved; None on a CPU
    model_state_bytes: int
    intra_bytes: int
    inter_bytes: int
    exposed_gather_ms: float
    exposed_reduce_ms: float
    exposed_publish_ms: float
    exposed_context_ms: float
    exposed_intra_ms: float | None  # ms of exposed communication inside groups; None: not measured
    exposed_inter_ms: float | None
    skipped_iterations: int
    nan_iterations: int
    z_loss: float | None = None  # None: --z-loss-weight is 0
    decoupled_learning_rate: float | None = None  # None: --decoupled-lr is not given
    data_phase: str | None = None  # of the last sample; None: without --data-phases
    # With outer steps alone, else None: the mean loss of each group, and the last round's gradient.
    group_lm_losses: tuple[float | None, ...] | None = None
    outer_grad_norm: float | None = None
    outer_grad_cosine: float | None = None


def summarize(
    interval: Sequence[IterationRecord],
    facts: RunFacts,
    *,
    peak_memory_bytes: int,
    peak_reserved_bytes: int | None = None,
) -> Metrics:
    """Summarize the iterations since the last logged one.

    Loss and speed are means over the interval, the loss of the iterations that were not skipped and
    NaN if all were; everything else is from the last iteration.
    """
    last = interval[-1]
    seconds = math.fsum(record.iteration_time_ms for record in interval) / 1000.0
    losses = [record.lm_loss for record in interval if not record.skipped]
    samples = sum(record.global_batch_size for record in interval)
    tokens_per_second = samples * facts.seq_length / seconds
    per_device = tokens_per_second / facts.world_size
    flops_per_second = per_device * facts.flops_per_token
    return Metrics(
        iteration=last.iteration,
        consumed_samples=last.consumed_samples,
        lm_loss=math.fsum(losses) / len(losses) if losses else math.nan,
        grad_norm=last.grad_norm,
        learning_rate=last.learning_rate,
        iteration_time_ms=seconds * 1000.0 / len(interval),
        data_wait_ms=math.fsum(record.data_wait_ms for record in interval) / len(interval),
        tokens_per_second=tokens_per_second,
        tflops_per_device=flops_per_second / 1e12,
        mfu=flops_per_second / facts.peak.flops_per_second,
        mfu_causal=per_device * facts.flops_per_token_causal / facts.peak.flops_per_second,
        peak_memory_bytes=peak_memory_bytes,
        peak_reserved_bytes=peak_reserved_bytes,
        model_state_bytes=facts.model_state_bytes,
        intra_bytes=last.intra_bytes,
        inter_bytes=last.inter_bytes,
        **_exposed_ms([asdict(record.exposed) for record in interval]),
        skipped_iterations=sum(record.skipped for record in interval),
        nan_iterations=sum(
            record.has_tokens and not math.isfinite(record.lm_loss) for record in interval
        ),
        z_loss=last.z_loss,
        decoupled_learning_rate=last.decoupled_learning_rate,
        data_phase=facts.phase_of(last.consumed_samples),
        **_of_groups([record.groups for record in interval if record.groups is not None]),
    )


def _of_groups(interval: Sequence[GroupsRecord]) -> dict[str, Any]:
    """Map the fields of groups that trained alone in an interval to values; empty if none did."""
    if not interval:
        return {}
    rounds = [groups for groups in interval if groups.outer_grad_norm is not None]
    losses = [
        [loss for loss in of_group if not math.isnan(loss)]
        for of_group in zip(*(groups.lm_losses for groups in interval), strict=True)
    ]
    return {
        "group_lm_losses": tuple(fmean(each) if each else None for each in losses),
        "outer_grad_norm": rounds[-1].outer_grad_norm if rounds else None,
        "outer_grad_cosine": rounds[-1].outer_grad_cosine if rounds else None,
    }


def _exposed_ms(seconds: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    """Map each `exposed_*_ms` field to the mean over iterations; None if never measured."""
    means: dict[str, Any] = {}
    for name in seconds[0]:
        measured = [value for record in seconds if (value := record[name]) is not None]
        mean = math.fsum(measured) * 1000.0 / len(measured) if measured else None
        means[f"exposed_{name}_ms"] = mean
    return means


def scalars_of(
    record: IterationRecord, metrics: Metrics, facts: RunFacts, *, totals: Mapping[str, int]
) -> dict[str, float]:
    """Return tags and values of one iteration; values that were not measured have no tag."""
    planned = {} if facts.planned is None else facts.planned.seconds
    exposed = {name: s for name, s in asdict(record.exposed).items() if s is not None}
    tags: dict[str, float | None] = {
        "learning-rate": record.learning_rate,
        "decoupled-learning-rate": record.decoupled_learning_rate,
        "batch-size": record.global_batch_size,
        "loss-scale": record.loss_scale,
        "world-size": facts.world_size,
        "grad-norm": record.grad_norm if record.has_tokens else None,
        "lm loss": None if record.skipped else record.lm_loss,
        "num-zeros": record.num_zeros,
        "params-norm": record.params_norm,
        "z-loss": None if record.skipped else record.z_loss,
        "iteration-time": record.iteration_time_ms / 1000.0,
        "throughput": metrics.tflops_per_device,
        "throughput/tokens-per-second": metrics.tokens_per_second,
        "throughput/tokens-per-second-per-device": metrics.tokens_per_second / facts.world_size,
        "throughput/tflops-per-device": metrics.tflops_per_device,
        "throughput/mfu-attention-in-full": metrics.mfu,
        "throughput/mfu-causal-attention-halved": metrics.mfu_causal,
        "mem-max-allocated-bytes": metrics.peak_memory_bytes,
        "memory/peak-measured-bytes": metrics.peak_memory_bytes,
        "memory/model-states-bytes": facts.model_state_bytes,
        **{f"mem-{name}": number for name, number in record.allocator.items()},
        "memory/peak-reserved-bytes": metrics.peak_reserved_bytes,
        **{f"memory/measured-{kind}-bytes": size for kind, size in record.held.items()},
        **{f"memory/predicted-{kind}-bytes": size for kind, size in facts.predicted.items()},
        "communication/intra-bytes": record.intra_bytes,
        "communication/inter-bytes": record.inter_bytes,
        **{f"communication/exposed-{name}-ms": s * 1000.0 for name, s in exposed.items()},
        # The plan's values, to draw next to the measured iteration time and exposed communication.
        **{f"planned/{name}-ms": seconds * 1000.0 for name, seconds in planned.items()},
        "data/wait-ms": record.data_wait_ms,
        **{f"steps/{name}": number for name, number in totals.items()},
        **_tags_of_groups(record.groups),
    }
    return {tag: value for tag, value in tags.items() if value is not None}


def _tags_of_groups(groups: GroupsRecord | None) -> dict[str, float | None]:
    if groups is None:
        return {}
    losses = {
        f"outer/lm-loss-group-{group}": None if math.isnan(loss) else loss
        for group, loss in enumerate(groups.lm_losses)
    }
    return {
        **losses,
        "outer/grad-norm": groups.outer_grad_norm,
        "outer/grad-cosine": groups.outer_grad_cosine,
        "outer/groups-left-out": groups.num_left_out,
    }
