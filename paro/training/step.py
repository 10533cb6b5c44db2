"""Runs a training step: micro-batches, loss, gradient norm, step checks, update; `TrainState`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import tee
from typing import Any

import torch
from torch import Tensor

from data.loader import Batch
from model.lora import drops_of
from paro.collectives.quantized import FORGOTTEN_AFTER
from paro.config.train import TrainConfig
from paro.distributed.control import Control
from paro.distributed.exposed_time import ExposedTime, ExposedTimer
from paro.distributed.groups import ByteCounter, Groups
from paro.distributed.timers import Timers
from paro.optim.optimizer import ParoOptimizer
from paro.report.record import RankTimes
from paro.schedule.batch_schedule import BatchSchedule
from paro.schedule.loss_scale import (
    LossScaleConfig,
    LossScaleState,
    start_loss_scale,
    update_loss_scale,
)
from paro.schedule.lr_schedule import ScheduleConfig
from paro.schedule.step_checks import (
    Expectation,
    StepChecksConfig,
    StepVerdict,
    expect_after,
    judge,
)
from paro.sharding.distributed_model import DistributedModel
from paro.topology import Sent
from paro.training.exit_signal import ExitReasons
from paro.training.micro_batches import TimedBatches, TokenWeights
from paro.training.nan_trace import origin_of


@dataclass(slots=True, kw_only=True)
class TrainState:
    """The state of a run besides model and optimizer shards, as checkpoints save and restore it."""

    loss_scale: LossScaleState
    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    scheduled_samples: int = 0  # samples of applied steps: the position in the LR schedule
    expected: Expectation = field(default_factory=Expectation)

    @classmethod
    def at_start(cls, config: LossScaleConfig) -> TrainState:
        """Return the state of a run that starts at iteration 0."""
        return cls(loss_scale=start_loss_scale(config))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStepTimes(RankTimes):
    """Times of one rank in a step: its waits by kind, and whether its loss is finite."""

    exposed: ExposedTime = field(default_factory=ExposedTime)
    loss_is_finite: bool = True


def last_iteration(config: TrainConfig, batches: BatchSchedule, state: TrainState | None) -> int:
    """Compute the last iteration of a run resumed from `state`, maybe with another batch size.

    With --train-samples the remaining samples decide, whatever the batch sizes were before.
    """
    if state is None or config.train_samples is None:
        return config.train_iters
    consumed = state.consumed_train_samples
    return state.iteration + batches.iterations_within(config.train_samples, consumed)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one optimizer step; loss and norm are NaN if no token has a weight."""

    loss: float
    grad_norm: float
    verdict: StepVerdict  # result of the step checks, equal on all ranks
    sent: Sent
    num_zeros: float | None = None  # gradient elements equal to 0; None unless logged and finite
    params_norm: float | None = None  # L2 norm of parameters after the step; None unless logged
    z_loss: float | None = None  # mean z-loss, which `loss` is without; None: --z-loss-weight is 0
    # Reasons to exit of any rank, OR-reduced.
    reasons: ExitReasons = field(default_factory=ExitReasons)
    data_wait_seconds: float = 0.0  # seconds of waiting for batches, mean over ranks
    # Exposed communication, mean over ranks.
    exposed: ExposedTime = field(default_factory=ExposedTime)
    rank_times: RankStepTimes = field(default_factory=RankStepTimes)
    origin: str | None = None  # of what is not finite, by --trace-nan

    @property
    def skipped(self) -> bool:
        """True if the parameter update was skipped, on all ranks."""
        return self.verdict is not StepVerdict.FINE


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The parts of a run, built once and never replaced during it."""

    config: TrainConfig
    batches: BatchSchedule
    schedule: ScheduleConfig
    loss_scale: LossScaleConfig
    model: DistributedModel
    optimizer: ParoOptimizer
    control: Control
    traffic: ByteCounter
    device: torch.device
    checks: StepChecksConfig
    timers: Timers
    context_groups: Groups  # context-parallel process groups; none at degree 1
    group_control: Control  # over the ranks of this rank's group, with outer steps; else over all

    @property
    def exposed_timer(self) -> ExposedTimer:
        return self.model.context.exposed_timer

    @property
    def context_parallel_size(self) -> int:
        """The number of ranks that share a sample."""
        return self.control.world.size // self.batches.data_parallel_size

    @property
    def groups_alone(self) -> dict[str, int] | None:
        """The number of groups that train alone, and the schedule of rounds; None: no groups.

        Checkpoints record it: only equal groups with equal rounds continue as they were.
        """
        outer, names = self.optimizer.outer, ("steps", "fragments", "delay", "warmup")
        rounds: dict[str, int] = {name: getattr(outer.config, f"outer_{name}") for name in names}
        return {"number": outer.num_groups, **rounds} if outer.is_on else None

    def control_of_step(self, iteration: int) -> Control:
        """Return the small collectives among ranks that are synchronous after `iteration`."""
        alone = iteration >= self.optimizer.outer.config.outer_warmup
        return self.group_control if alone else self.control

    def close(self) -> None:
        """Wait for queued communication and shut down; collective, after the last step."""
        self.model.wait_for_updated_params()
        self.model.close()
        self.context_groups.close()


def train_step(
    training: Training,
    state: TrainState,
    micro_batches: Iterator[Batch],
    *,
    reasons: Callable[[], ExitReasons] = ExitReasons,
) -> StepResult:
    """Run one optimizer step: micro-batches, one all-reduce of scalars, the update unless skipped.

    The all-reduce includes this rank's `reasons` to exit, called just before, so that all ranks
    agree to exit without another collective.
    """
    if state.iteration + 1 in training.checks.iterations_to_skip:
        return _pass_over(training, state, micro_batches, reasons)
    control = training.control_of_step(state.iteration)
    read, *again = tee(micro_batches) if training.config.trace_nan else (micro_batches,)
    timed = TimedBatches(read, training.device, training.timers)
    if state.iteration % FORGOTTEN_AFTER == 0:
        training.model.forget_grad_errors()
    loss_sum, weigh = _forward_backward(training, state, timed)
    sums, exposed, rank_times = _add_up(training, control, loss_sum, weigh, timed.seconds, reasons)
    unscale = weigh.unscale(sums["num_tokens"], sums["num_filled"])
    loss = sums["loss"] * unscale
    grad_norm = math.sqrt(sums["square_sum"]) * unscale if sums["square_sum"] >= 0 else math.nan
    scaling = training.loss_scale
    verdict = judge(
        training.checks,
        state.expected,
        loss=loss,
        grad_norm=grad_norm,
        scale_can_fall=scaling.dynamic and state.loss_scale.scale > scaling.min_loss_scale,
        has_tokens=sums["num_tokens"] > 0.0,
    )
    sent = training.traffic.take()  # the param all-gather below counts for the next step
    origin = None
    if verdict is StepVerdict.NOT_FINITE and again:
        origin = _trace(training, state, *again)
    if verdict is StepVerdict.FINE:
        _update(training, state, grad_norm=grad_norm, unscale=unscale)
    else:  # drop the errors of quantized gradients that were not applied, maybe not even finite
        training.model.forget_grad_errors()
    _advance(training, state, verdict, loss=loss, grad_norm=grad_norm)
    has_zeros = verdict not in (StepVerdict.OVERFLOW, StepVerdict.NOT_FINITE, StepVerdict.NO_TOKENS)
    return StepResult(
        loss=loss,
        grad_norm=grad_norm,
        verdict=verdict,
        sent=sent,
        num_zeros=sums.get("num_zeros") if has_zeros else None,
        params_norm=_params_norm(training, control) if training.config.log_params_norm else None,
        z_loss=sums["z_loss"] * unscale if "z_loss" in sums else None,
        reasons=ExitReasons.summed(sums),
        data_wait_seconds=sums["data_wait"] / control.world.size,
        origin=origin,
        exposed=exposed,
        rank_times=rank_times,
    )


def _pass_over(
    training: Training,
    state: TrainState,
    source: Iterator[Batch],
    reasons: Callable[[], ExitReasons],
) -> StepResult:
    """Read the samples of a step without training on them, for --iterations-to-skip."""
    timed = TimedBatches(source, training.device, training.timers)
    for _ in range(training.batches.num_micro_batches_at(state.consumed_train_samples)):
        next(timed)
    control, mine = training.control_of_step(state.iteration), reasons()._asdict()
    sums = control.sum([float(each) for each in mine.values()])
    _advance(training, state, StepVerdict.ASKED, loss=math.nan, grad_norm=math.nan)
    return StepResult(
        loss=math.nan,
        grad_norm=math.nan,
        verdict=StepVerdict.ASKED,
        sent=training.traffic.take(),
        reasons=ExitReasons.summed(dict(zip(mine, sums, strict=True))),
        exposed=training.exposed_timer.take(),
    )


def _advance(
    training: Training, state: TrainState, verdict: StepVerdict, *, loss: float, grad_norm: float
) -> None:
    """Count a step with this verdict, and begin and end the outer rounds that are due after it."""
    batch_size = training.batches.batch_size_at(state.consumed_train_samples)
    alone = training.control_of_step(state.iteration) is not training.control
    # Alone every step counts: groups have one learning rate.
    if verdict is StepVerdict.FINE or (alone and verdict is not StepVerdict.ASKED):
        state.scheduled_samples += batch_size
    state.iteration += 1
    training.optimizer.end_step(state.iteration, training.control)
    _empty_cache(training, from_level=2)
    state.consumed_train_samples += batch_size
    state.expected = expect_after(state.expected, verdict, loss=loss, grad_norm=grad_norm)
    if verdict is not StepVerdict.ASKED:
        nonfinite = verdict in (StepVerdict.OVERFLOW, StepVerdict.NOT_FINITE)
        state.loss_scale = update_loss_scale(
            training.loss_scale, state.loss_scale, found_nonfinite=nonfinite
        )


def _add_up(
    training: Training,
    control: Control,
    loss_sum: Tensor,
    weigh: TokenWeights,
    data_wait: float,
    reasons: Callable[[], ExitReasons],
) -> tuple[dict[str, float], ExposedTime, RankStepTimes]:
    """Sum scalars over the ranks of `control`, which train synchronously, in one all-reduce.

    Also return mean exposed times and this rank's own times.
    """
    optimizer, num_ranks = training.optimizer, control.world.size
    on_device = [loss_sum.double()]
    head: Any = training.model.model.head
    z_loss: Tensor | None = head.take_z_loss()
    if z_loss is not None:
        on_device.append(z_loss.double())
    if training.config.log_num_zeros_in_grad:
        on_device.append(optimizer.local_num_zeros())
    with training.timers.measure("optimizer-clip-main-grad"):
        on_device.append(optimizer.local_square_sum())
    # The step's only copy to the host, which waits until the device has finished.
    own_loss, *others, square_sum = torch.stack(on_device).tolist()
    exposed = training.exposed_timer.take()
    own_seconds = asdict(exposed)
    mine = {
        "square_sum": square_sum,
        "loss": own_loss,
        "num_tokens": weigh.num_tokens,
        "num_filled": weigh.num_filled,
        **({} if z_loss is None else {"z_loss": others.pop(0)}),
        **({"num_zeros": others.pop(0)} if others else {}),
        "data_wait": data_wait,
        **{name: float(holds) for name, holds in reasons()._asdict().items()},
        **{kind: seconds or 0.0 for kind, seconds in own_seconds.items()},
    }
    begin = time.perf_counter()
    sums = dict(zip(mine, control.sum([*mine.values()]), strict=True))
    agreement = time.perf_counter() - begin
    means: dict[str, Any] = {  # mean exposed seconds by kind; None: not measured
        kind: None if seconds is None else sums[kind] / num_ranks
        for kind, seconds in own_seconds.items()
    }
    times = RankStepTimes(
        data=data_wait,
        communication=exposed.total,
        exposed=exposed,
        agreement=agreement,
        loss_is_finite=math.isfinite(own_loss),
    )
    return sums, ExposedTime(**means), times


def _update(training: Training, state: TrainState, *, grad_norm: float, unscale: float) -> None:
    with training.timers.measure("optimizer"):
        training.optimizer.step(
            lr=training.schedule.lr_at(state.scheduled_samples),
            decoupled_lr=training.schedule.decoupled_lr_at(state.scheduled_samples),
            weight_decay=training.schedule.weight_decay_at(state.scheduled_samples),
            grad_norm=grad_norm,
            unscale=unscale,
            averages=training.optimizer.config.averages_after(state.iteration + 1),
            held=training.optimizer.outer.held(state.iteration + 1),
        )


def samples_in_full_precision(training: Training) -> int:
    """Count the samples at the start of a run during which messages are not quantized."""
    samples = training.config.inter_bits_warmup_samples
    return math.ceil(training.schedule.lr_warmup_samples) if samples is None else samples


def _forward_backward(
    training: Training, state: TrainState, micro_batches: Iterator[Batch]
) -> tuple[Tensor, TokenWeights]:
    """Compute this rank's weighted loss, a float32 scalar, and reduce all gradients."""
    model, control = training.model, training.control_of_step(state.iteration)
    num_micro_batches = training.batches.num_micro_batches_at(state.consumed_train_samples)
    shared_by = training.context_parallel_size
    weigh = TokenWeights(
        num_parts=num_micro_batches * control.world.size // shared_by,
        context_parallel_size=shared_by,
        scale=state.loss_scale.scale,
        per_token=training.config.calculate_per_token_loss,
    )
    warms_up = state.scheduled_samples < samples_in_full_precision(training)
    alone = control is not training.control
    model.begin_step(num_micro_batches, full_precision=warms_up, alone=alone)
    rank, iteration = training.control.world.rank, state.iteration
    loss_sum = torch.zeros((), dtype=torch.float32, device=training.device)
    with training.timers.measure("forward-backward"):
        for index in range(num_micro_batches):
            batch = next(micro_batches)
            # A sample's number in the global batch is the same for any number of ranks.
            part = index * training.batches.data_parallel_size + rank // shared_by
            samples = range(part * len(batch.tokens_BS), (part + 1) * len(batch.tokens_BS))
            config, seed = model.model.config, training.config.seed
            loss_sum += model.forward_backward(
                batch.tokens_BS,
                batch.labels_BS,
                weigh(batch),
                last=index + 1 == num_micro_batches,
                **batch.documents(),
                **drops_of(config, seed, iteration, samples, batch.ranges),
            )
    with training.timers.measure("all-grads-sync"):
        model.finish_grad_sync()
    _empty_cache(training, from_level=1)
    return loss_sum, weigh


def _trace(training: Training, state: TrainState, batches: Iterator[Batch]) -> str:
    """Repeat a step without its update; describe its first operation that is not finite."""
    again = TimedBatches(batches, training.device, training.timers)
    run = partial(_forward_backward, training, state, again)
    with training.traffic.paused():
        origin = origin_of(training.model.model, run, training.control_of_step(state.iteration))
    training.exposed_timer.take()
    head: Any = training.model.model.head
    head.take_z_loss()
    return origin


def _empty_cache(training: Training, *, from_level: int) -> None:
    if training.config.empty_unused_memory_level >= from_level:
        torch.cuda.empty_cache()  # a no-op where CUDA is not in use


def _params_norm(training: Training, control: Control) -> float:
    (square_sum,) = control.sum([training.optimizer.local_params_square_sum()])
    return math.sqrt(square_sum)
