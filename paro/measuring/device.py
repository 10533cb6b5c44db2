"""Measures compute rates of a rank's device, by steps of a model that each rank trains alone."""

# Without communication the planner counts for a step of n micro-batches
# (paro/planning/computing.py):
#
#     step(n)     = step_seconds + n * micro_batch + update
#     micro_batch = (FLOPs of weights) / sustained_flops + (FLOPs of attention) / attention_flops
#                   + (bytes of norms and the like) / memory_bytes_per_second
#     update      = (bytes of gradients, masters and moments) / memory_bytes_per_second
#
# So the rates of a `Device` follow from timed steps, for models like the one that was timed:
#
#     memory_bytes_per_second   an update alone
#     attention_flops           attention's kernels alone (attention.py)
#     sustained_flops           the rest of a micro-batch, which takes (step(1 + n) - step(1)) / n
#     step_seconds              the rest of step(1)
#     piece_seconds             a model as large as one slice of weights, under rotation
#
# All ranks compute at once, because ranks that share cores, memory or a power budget slow each
# other down; the slowest rank counts.

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from statistics import fmean, median
from typing import NamedTuple

import torch

from data.loader import Batch
from model.config import LlamaConfig
from model.fusion import Fusions, usable_kernels
from model.trainable import Trainable
from paro.config.run import RunConfig
from paro.distributed.comm_stream import CommStreams
from paro.distributed.control import Control
from paro.distributed.groups import make_resources
from paro.distributed.timers import ActionTime, synchronize, time_of
from paro.distributed.world import World
from paro.machine.machine import Device, Slowdown
from paro.measuring.attention import attention_rates
from paro.measuring.memory import BOOT_ID, bytes_in_use, memory_of_rank
from paro.planning.comm_costs import CODING_BYTES
from paro.planning.computing import ComputeTimes
from paro.planning.run_memory import RunMemory
from paro.quantization.blocks import choose_kernels
from paro.quantization.formats import GRADIENT_BLOCK, BlockFormat
from paro.schedule.batch_schedule import BatchSchedule
from paro.sharding.buffers import TORCH_TYPES
from paro.spec.run_spec import RunSpec
from paro.training.assembly import build_training
from paro.training.step import Training, TrainState, train_step

_PRODUCT = 1024  # rows and columns of the matrices that are multiplied to find peak FLOP/s
_QUANTIZED = 1 << 20  # number of elements that are quantized and dequantized
_JOBS = 100  # number of jobs in a comm stream that are queued, each with a wait
_FAST = 1e30  # a rate at which work takes no time
_TILE = 1 << 16  # number of random values of which weights are made, by repetition


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Numbers of timed steps; the first steps of a process take longer, and do not count."""

    warmup: int = 4
    steps: int = 5  # the most steps that count
    micro_batches: int = 4  # n of step(1 + n)
    seconds: float = math.inf  # the most seconds of steps that count, but at least one step counts
    num_layers: int | None = None  # blocks that are timed; others take the time of these; None: all


THOROUGH = Effort()


def measure_device(
    config: RunConfig,
    control: Control,
    *,
    group_size: int,
    sequence: int | None = None,
    effort: Effort = THOROUGH,
) -> Device:
    """Time the device of a rank, the slowest rank where ranks differ; collective over all ranks.

    `sequence` is the sequence length to plan for, by default that of the configuration. Slices are
    cut as for rotation over a group, or over as many ranks of a group as divide the heads.
    """
    on_gpu = control.device.type == "cuda"
    reserved = 0 if on_gpu else bytes_in_use(control.device)
    cores = None if on_gpu else min(control.gather(_cores(control)))
    timer = _StepTimer(control=control, cores=cores, effort=effort)
    timed = with_layers(config, min(config.model.num_layers, effort.num_layers or math.inf))
    lone = _LoneRank(timed, timer)
    bytes_by_second = lone.bytes_by_second()
    step, micro_batch = lone.seconds()
    update = _planned(timed.spec, _FAST, bytes_by_second).update
    whole, of_whole = lone.of_all_layers(config.spec, micro_batch)
    sequence = sequence or config.data.seq_length
    attention = attention_rates(timed.spec, sequence, control, timer.median)
    sustained = _sustained_flops(whole, of_whole, bytes_by_second, attention.of_micro_batch)
    slices = math.gcd(config.model.num_query_groups, group_size)
    piece = lone.piece_seconds(slices, micro_batch, bytes_by_second)
    if on_gpu:  # now that the kernels of a training step are loaded
        reserved = bytes_in_use(control.device)
    kind = TORCH_TYPES[config.precision.compute]
    matrix = torch.ones(_PRODUCT, _PRODUCT, dtype=kind, device=control.device)
    products = 2.0 * _PRODUCT**3 / timer.median(lambda: matrix @ matrix)
    coding = _QUANTIZED * CODING_BYTES / timer.median(_coding(control.device))
    streams = make_resources(control.device, config.runtime.distributed_backend).streams
    job = timer.median(_jobs(streams, control.device)) / _JOBS
    streams.close()
    memory = min(control.gather(memory_of_rank(control)))
    return Device(
        name=torch.cuda.get_device_name(control.device) if on_gpu else "CPU rank",
        memory_bytes=memory,
        reserved_bytes=min(max(control.gather(reserved)), memory - 1),
        peak_flops=max(products, sustained),
        sustained_flops=sustained,
        memory_bytes_per_second=bytes_by_second,
        coding_bytes_per_second=coding,
        step_seconds=max(0.0, step - micro_batch - update),
        piece_seconds=piece,
        job_seconds=job,
        attention_flops=attention.of_sequence,
        parts_flops=attention.of_parts,
        documents_flops=attention.of_documents,
        cores=cores,
        slowed=_slowed(config.spec, config.fusions, control.device),
    )


def _slowed(run: RunSpec, fusions: Fusions | None, device: torch.device) -> Slowdown | None:
    """Time matmuls during collectives on a GPU; None on a CPU, and where Triton does not run."""
    kernels = usable_kernels(run.model, fusions, TORCH_TYPES[run.precision.compute], device)
    if device.type != "cuda" or not kernels.config.fuses_loss:
        return None
    from paro.measuring.slowdown import slowed_matmuls

    return slowed_matmuls(device)


@dataclass(frozen=True, slots=True)
class _LoneRank:
    """A training that each rank runs alone, and the timer of its steps."""

    config: RunConfig
    timer: _StepTimer

    def bytes_by_second(self) -> float:
        """Time an update of all parameters, and return its memory bandwidth.

        All parameters train, even if few do in the run, whose update would be mostly overhead.
        """
        model = replace(self.config.model, lora=None)
        whole = replace(self.config, trainable=Trainable(), model=model)
        device = self.timer.control.device
        training = alone(whole, device)
        start = TrainState.at_start(whole.loss_scale)
        train_step(training, start, same_batches(whole.spec, device))  # gradients to update by
        seconds = self.timer.median(lambda: _update(training))
        training.close()
        return _planned(whole.spec, _FAST, 1.0).update / seconds

    def piece_seconds(self, slices: int, micro_batch: float, bytes_by_second: float) -> float:
        """Time a model of one slice, and return seconds that a further slice of a part costs.

        The sum of the slices' results is not counted: the planner adds it.
        """
        if slices == 1:
            return 0.0
        model, run = self.config.model, self.config.spec
        cut = replace(self.config, model=slice_of(model, slices))
        _, of_slice = _LoneRank(cut, self.timer).seconds()
        of_piece = (slices * of_slice - micro_batch) / ((slices - 1) * (2 + 2 * model.num_layers))
        num_bytes = 3 * run.tensor_bytes(model.hidden_size)
        return max(0.0, of_piece - 2 * num_bytes / bytes_by_second)  # forward and backward

    def seconds(self) -> tuple[float, float]:
        """Time a step of one micro-batch, and a micro-batch, in seconds."""
        training, more = alone(self.config, self.timer.control.device), self.timer.effort
        first = self.step_seconds(training, 1)
        later = self.step_seconds(training, 1 + more.micro_batches)
        training.close()
        return first, max((later - first) / more.micro_batches, 1e-9)

    def step_seconds(self, training: Training, count: int) -> float:
        """Time a step of `count` micro-batches, in seconds."""
        size = self.config.batches.micro_batch_size
        batches = BatchSchedule(
            micro_batch_size=size, global_batch_size=size * count, data_parallel_size=1
        )
        resized = replace(training, batches=batches)
        state = TrainState.at_start(training.loss_scale)
        source = same_batches(self.config.spec, training.device)
        return self.timer.median(lambda: train_step(resized, state, source))

    def of_all_layers(self, whole: RunSpec, micro_batch: float) -> tuple[RunSpec, float]:
        """Return the run of all layers, `whole`, and the seconds of its micro-batch.

        Inferred from `micro_batch`, the seconds with the first layers alone, with which this run
        trains. This run and its seconds are returned where the time of a block cannot be inferred.
        """
        run, layers = self.config.spec, self.config.model.num_layers
        missing = whole.model.num_layers - layers
        if not missing or layers == 1:
            return run, micro_batch
        _, of_first = _LoneRank(with_layers(self.config, 1), self.timer).seconds()
        block = (micro_batch - of_first) / (layers - 1)
        return (whole, micro_batch + missing * block) if block > 0 else (run, micro_batch)


def _sustained_flops(
    run: RunSpec, micro_batch: float, bytes_by_second: float, attention_flops: float
) -> float:
    """Compute the FLOP/s of a micro-batch without attention, by the planner's count."""
    without_products = _planned(run, _FAST, bytes_by_second, attention_flops).micro_batch
    flops = _planned(run, 1.0, _FAST, _FAST).micro_batch
    return flops / max(micro_batch - without_products, micro_batch / 10)


def slice_of(model: LlamaConfig, number: int) -> LlamaConfig:
    """Return a model as large as one of `number` slices of another."""
    return replace(
        model,
        num_attention_heads=model.num_attention_heads // number,
        num_query_groups=model.num_query_groups // number,
        ffn_hidden_size=-(-model.ffn_hidden_size // number),
        vocab_size=-(-model.vocab_size // number),
    )


def _planned(
    run: RunSpec, flops: float, bytes_by_second: float, attention_flops: float | None = None
) -> PartsOfStep:
    """Return the planner's compute times for one rank with these rates."""
    device = Device(
        name="",
        memory_bytes=1,
        reserved_bytes=0,
        peak_flops=flops,
        sustained_flops=flops,
        memory_bytes_per_second=bytes_by_second,
        attention_flops=attention_flops,
    )
    run = replace(run, device_type="cpu")
    step = RunMemory(None).step(run)
    computing = ComputeTimes(run=run, step=step, device=device)
    trained = run.strategy, step.num_trained
    micro_batch = computing.seconds + computing.collect_seconds(*trained)
    return PartsOfStep(micro_batch, computing.update_seconds(*trained))


def with_layers(config: RunConfig, number: float) -> RunConfig:
    """Return the training of a model of `number` layers."""
    return replace(config, model=replace(config.model, num_layers=int(number)))


class PartsOfStep(NamedTuple):
    """Seconds of a step of one micro-batch: of the micro-batch, and of the update."""

    micro_batch: float
    update: float


def parts_of_step(config: RunConfig, control: Control) -> PartsOfStep:
    """Time a micro-batch and an update once on all ranks, roughly; collective."""
    timer = _StepTimer(control=control, cores=None, effort=Effort(warmup=1, steps=1))
    training = alone(config, control.device)
    step = _LoneRank(config, timer).step_seconds(training, 1)
    update = timer.median(lambda: _update(training))
    training.close()
    return PartsOfStep(micro_batch=max(step - update, 1e-9), update=update)


def alone(config: RunConfig, device: torch.device) -> Training:
    """Build a training of one rank; weights repeat one random tile, which is fast to draw."""
    training = build_training(config, Control(World(), device), initialized=False)
    tile = torch.randn(_TILE, generator=torch.Generator().manual_seed(config.train.seed)) / 50
    training.optimizer.initialize(
        lambda _, begin, end: tile.repeat(-(-(end - begin) // _TILE))[: end - begin]
    )
    return training


def same_batches(run: RunSpec, device: torch.device) -> Iterator[Batch]:
    """Yield one synthetic micro-batch forever."""
    size = run.micro_batch_size, run.seq_length
    generator = torch.Generator().manual_seed(0)
    tokens_BS = torch.randint(0, run.model.vocab_size, size, generator=generator)
    mask_BS = torch.ones(size)
    batch = Batch(tokens_BS, tokens_BS, mask_BS, mask_sum=mask_BS.numel())
    return repeat(batch.to(device))


def _update(training: Training) -> None:
    training.optimizer.step(lr=0.0, weight_decay=0.0, grad_norm=1.0, unscale=0.5)


def _coding(device: torch.device) -> Callable[[], object]:
    """Return an action that quantizes gradients to 4 bits and dequantizes them."""
    form = BlockFormat(bits=4, block=GRADIENT_BLOCK)
    values = torch.linspace(-1.0, 1.0, _QUANTIZED, device=device)
    quantized = torch.empty(form.num_bytes(_QUANTIZED), dtype=torch.uint8, device=device)
    dequantized, kernels = torch.empty_like(values), choose_kernels(device)

    def action() -> None:
        kernels.quantize(values, form, quantized, transforms=True)
        kernels.dequantize(quantized, form, dequantized)

    return action


def _jobs(streams: CommStreams, device: torch.device) -> Callable[[], object]:
    """Return an action that queues jobs, and waits for each.

    The jobs add a few gradients to others, as after a reduction.
    """
    total, part = torch.zeros(16, device=device), torch.ones(16, device=device)

    def add() -> None:
        total.add_(part)

    def action() -> None:
        for _ in range(_JOBS):
            streams.submit("jobs", add).wait()

    return action


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepTimer:
    """Timer of an action that all ranks run at once."""

    control: Control
    cores: float | None
    effort: Effort = THOROUGH

    def median(self, action: Callable[[], object]) -> float:
        """Time an action, and return the median over steps of the slowest rank, in seconds.

        For ranks that share cores: the mean processor time divided by a rank's share of the cores.
        Wall-clock time has waits for cores on which others compute; in training others are idle.
        """
        effort = self.effort
        warmup = [self._time(action) for _ in range(effort.warmup)]
        slowest = max(self.control.gather(warmup[-1].wall))
        steps = max(1, int(min(effort.steps, effort.seconds / max(slowest, 1e-9))))
        by_rank = self.control.gather([self._time(action) for _ in range(steps)])
        by_step = list(zip(*by_rank, strict=True))
        if self.cores is not None and self.cores < torch.get_num_threads():
            return median(fmean(took.cpu for took in ranks) for ranks in by_step) / self.cores
        return median(max(took.wall for took in ranks) for ranks in by_step)

    def _time(self, action: Callable[[], object]) -> ActionTime:
        synchronize(self.control.device)
        self.control.barrier()
        return time_of(action, self.control.device)


def _cores(control: Control) -> float:
    """Return an equal share of the cores that the ranks on this machine may use together."""
    machine = BOOT_ID.read_text().strip()
    by_rank = control.gather((machine, frozenset(os.sched_getaffinity(0))))
    usable = [cores for name, cores in by_rank if name == machine]
    return len(frozenset().union(*usable)) / len(usable)
