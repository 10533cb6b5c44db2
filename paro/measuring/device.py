"""A rank's compute rates, timed while every rank trains a model alone, all at the same time."""

# All at once, because ranks that share cores, memory or a power budget slow each other down.
# There is no communication: a step is as long as its computing. FLOP/s follow from the time of an
# additional micro-batch, less that of attention, which is timed alone (attention.py); the speed of
# what only reads and writes memory follows from the time of an update alone; the rest of a step is
# counted separately. These are the rates in
# paro/planning/computing.py, so a device is right for models like the one it was timed with.
# The cost of cutting a part of a model into slices follows from a model that is one such slice.

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import torch

from data.loader import Batch
from model.config import LlamaConfig
from model.fusion import usable_kernels
from model.trainable import Trainable
from paro.config.run import RunConfig
from paro.distributed.comm_stream import CommStreams, make_comm_streams
from paro.distributed.control import Control
from paro.distributed.timers import Took, synchronize, time_of
from paro.distributed.world import World
from paro.machine.machine import Device
from paro.machine.rules import Slowed
from paro.measuring.attention import attention_rates
from paro.planning.comm_costs import CODING_BYTES
from paro.planning.computing import Computing
from paro.planning.passes import StepCounts
from paro.precision import BYTES_OF
from paro.quantization.blocks import decode, encode
from paro.quantization.formats import BlockFormat
from paro.quantization.ranges import GRADIENT_BLOCK
from paro.report.memory import anonymous_bytes
from paro.schedule.batch_schedule import BatchSchedule
from paro.sharding.buffers import TORCH_TYPES
from paro.spec.run_spec import MicroBatch
from paro.spec.units import shape_of, units_of
from paro.training.assembly import build_training, start_state
from paro.training.step import Training, train_step

_PRODUCT = 1024  # size of a square matrix, in the search for the peak
_CODED = 1 << 20  # elements that are encoded and decoded
_JOBS = 100  # each waited for
_TILE = 1 << 16  # values of weights
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # identifies this machine, in any container
_PAGES = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long a device is timed; the first steps of a process take longer, and do not count."""

    warmup: int = 4
    steps: int = 5  # at most, that count
    micro_batches: int = 4  # in addition, whose time is that of one
    seconds: float = math.inf  # of the steps that count: at least one does
    num_layers: int | None = None  # times a model of so many and of one, and infers the model's
    slices: bool = True  # times what cutting into slices costs


THOROUGH = Effort()


def measure_device(
    config: RunConfig,
    control: Control,
    *,
    group_size: int,
    sequence: int | None = None,
    effort: Effort = THOROUGH,
) -> Device:
    """Return the device of a rank, the slowest where they differ; collective over all ranks.

    `sequence` is the length to plan for; None: that of the configuration's samples. Slices are cut
    as for a ring of a group, or of as many of its ranks as divide the heads.
    """
    reserved = _bytes_in_use(control.device) if control.device.type == "cpu" else 0
    cores = min(control.gather(_cores(control))) if control.device.type == "cpu" else None
    clock = _Clock(control=control, cores=cores, effort=effort)
    timed = with_layers(config, min(config.model.num_layers, effort.num_layers or math.inf))
    bytes_by_second = _bytes_by_second(timed, clock)
    one, micro_batch = _seconds_of(timed, clock)
    updating = _computed(timed, math.inf, bytes_by_second).update
    whole = _whole(config, timed, micro_batch, clock)
    sequence = sequence or config.data.seq_length
    attention = attention_rates(timed, sequence, control, clock.median)
    sustained = _sustained_flops(*whole, bytes_by_second, attention.of_micro_batch)
    slices = math.gcd(config.model.num_query_groups, group_size) if effort.slices else 1
    piece = _piece_seconds(timed, clock, slices, micro_batch, bytes_by_second)
    if control.device.type == "cuda":  # now that the kernels of a training step are loaded
        reserved = _bytes_in_use(control.device)
    products = 2.0 * _PRODUCT**3 / clock.median(_product(config, control.device))
    coding = _CODED * CODING_BYTES / clock.median(_coding(control.device))
    streams = make_comm_streams(
        control.device, overlap=True, backend=config.runtime.distributed_backend
    )
    job = clock.median(_jobs(streams, control.device)) / _JOBS
    streams.close()
    memory = min(control.gather(memory_of_rank(control)))
    return Device(
        name=_name(control.device),
        memory_bytes=memory,
        reserved_bytes=min(max(control.gather(reserved)), memory - 1),
        peak_flops=max(products, sustained),
        sustained_flops=sustained,
        memory_bytes_per_second=bytes_by_second,
        coding_bytes_per_second=coding,
        step_seconds=max(0.0, one - micro_batch - updating),
        piece_seconds=piece,
        job_seconds=job,
        attention_flops=attention.of_sequence,
        parts_flops=attention.of_parts,
        documents_flops=attention.of_documents,
        cores=cores,
        slowed=_slowed(config, control.device),
    )


def _slowed(config: RunConfig, device: torch.device) -> Slowed | None:
    """Return the curve of this rank's GPU; None on a CPU, and where Triton computes nothing."""
    kind = TORCH_TYPES[config.precision.compute]
    kernels = usable_kernels(config.model, config.fusions, kind, device)
    if device.type != "cuda" or not kernels.config.fuses_loss:
        return None
    from paro.measuring.slowdown import slowed_matmuls

    return slowed_matmuls(device)


def _bytes_by_second(config: RunConfig, clock: _Clock) -> float:
    """Return the rate with which the planner computes the time of an update of all parameters.

    An update of a few would take no longer than its calls.
    """
    whole = replace(config, trainable=Trainable(), model=replace(config.model, lora=None))
    device = clock.control.device
    training = alone(whole, device)
    train_step(training, start_state(whole), same_batches(whole, device))  # gradients to update by
    updating = clock.median(lambda: _update(training))
    training.close()
    return _computed(whole, math.inf, 1.0).update / updating


def _sustained_flops(
    config: RunConfig, micro_batch: float, bytes_by_second: float, attention_flops: float
) -> float:
    """Compute the FLOP/s of a micro-batch without attention, as the planner counts."""
    without_products = _computed(config, math.inf, bytes_by_second, attention_flops).micro_batch
    flops = _computed(config, 1.0, math.inf, math.inf).micro_batch
    return flops / max(micro_batch - without_products, micro_batch / 10)


def _piece_seconds(
    config: RunConfig, clock: _Clock, slices: int, micro_batch: float, bytes_by_second: float
) -> float:
    """Return seconds that a further slice of a part costs, not counting the sum of the slices'
    results."""
    if slices == 1:
        return 0.0
    cut = replace(config, model=slice_of(config.model, slices))
    _, of_slice = _seconds_of(cut, clock)
    num_parts = 2 + 2 * config.model.num_layers
    of_piece = (slices * of_slice - micro_batch) / ((slices - 1) * num_parts)
    residual = config.batches.micro_batch_size * config.data.seq_length * config.model.hidden_size
    num_bytes = 3 * residual * BYTES_OF[config.precision.compute]
    return max(0.0, of_piece - 2 * num_bytes / bytes_by_second)  # forward and backward


def slice_of(model: LlamaConfig, number: int) -> LlamaConfig:
    """Return a model as large as one of `number` slices of another."""
    return replace(
        model,
        num_attention_heads=model.num_attention_heads // number,
        num_query_groups=model.num_query_groups // number,
        ffn_hidden_size=-(-model.ffn_hidden_size // number),
        vocab_size=-(-model.vocab_size // number),
    )


def _computed(
    config: RunConfig, flops: float, bytes_by_second: float, attention_flops: float | None = None
) -> PartsOfStep:
    """What the planner computes that a rank alone would take with these rates."""
    fast = 1e30
    device = Device(
        name="",
        memory_bytes=1,
        reserved_bytes=0,
        peak_flops=min(flops, fast),
        sustained_flops=min(flops, fast),
        memory_bytes_per_second=min(bytes_by_second, fast),
        attention_flops=None if attention_flops is None else min(attention_flops, fast),
    )
    trains = config.trained.__contains__
    units = units_of(config.model, world_size=1, is_trained=trains)
    batch = MicroBatch(
        size=config.batches.micro_batch_size,
        seq_length=config.data.seq_length,
        compute_bytes=BYTES_OF[config.precision.compute],
        device_type="cpu",
    )
    shape = shape_of(config.model, units, gathers=False, reduces=False, prefetch_units=0)
    step = StepCounts(shape=shape, units=units)
    computing = Computing(model=config.model, step=step, batch=batch, device=device)
    given = config.strategy, config.precision, step.num_trained
    taking, updating = computing.collect_seconds(*given), computing.update_seconds(*given)
    return PartsOfStep(computing.seconds + taking, updating)


def with_layers(config: RunConfig, number: float) -> RunConfig:
    """Return the training of a model of so many layers."""
    return replace(config, model=replace(config.model, num_layers=int(number)))


def _seconds_of(config: RunConfig, clock: _Clock) -> tuple[float, float]:
    """Return seconds of a step of one micro-batch, and of a micro-batch."""
    training = alone(config, clock.control.device)
    one = _step_seconds(training, config, clock, 1)
    more = _step_seconds(training, config, clock, 1 + clock.effort.micro_batches)
    training.close()
    return one, max((more - one) / clock.effort.micro_batches, 1e-9)


def _whole(
    config: RunConfig, timed: RunConfig, micro_batch: float, clock: _Clock
) -> tuple[RunConfig, float]:
    """Return the model, and seconds of its micro-batch, from those of `timed`, its first layers.

    That is `timed` itself where one of its blocks cannot be told from the rest.
    """
    layers, missing = timed.model.num_layers, config.model.num_layers - timed.model.num_layers
    if not missing or layers == 1:
        return timed, micro_batch
    _, of_one = _seconds_of(with_layers(config, 1), clock)
    block = (micro_batch - of_one) / (layers - 1)
    return (config, micro_batch + missing * block) if block > 0 else (timed, micro_batch)


class PartsOfStep(NamedTuple):
    """Seconds of a step of one micro-batch: of the micro-batch, and of the update."""

    micro_batch: float
    update: float


def parts_of_step(config: RunConfig, control: Control) -> PartsOfStep:
    """About how long they take on the slowest rank, without care; collective."""
    clock = _Clock(control=control, cores=None, effort=Effort(warmup=1, steps=1))
    training = alone(config, control.device)
    step = _step_seconds(training, config, clock, 1)
    update = clock.median(lambda: _update(training))
    training.close()
    return PartsOfStep(micro_batch=max(step - update, 1e-9), update=update)


def alone(config: RunConfig, device: torch.device) -> Training:
    """Return a training of this rank alone, with values that are fast to draw: one random tile,
    again."""
    training = build_training(config, Control(World(), device), initialized=False)
    tile = torch.randn(_TILE, generator=torch.Generator().manual_seed(config.train.seed)) / 50
    training.optimizer.initialize(
        lambda _, begin, end: tile.repeat(-(-(end - begin) // _TILE))[: end - begin]
    )
    return training


def _step_seconds(training: Training, config: RunConfig, clock: _Clock, count: int) -> float:
    """Return seconds of a step of `count` micro-batches."""
    size = config.batches.micro_batch_size
    batches = BatchSchedule(
        micro_batch_size=size, global_batch_size=size * count, data_parallel_size=1
    )
    resized = replace(training, batches=batches)
    state, source = start_state(config), same_batches(config, training.device)
    return clock.median(lambda: train_step(resized, state, source))


def same_batches(config: RunConfig, device: torch.device) -> Iterator[Batch]:
    """Return one synthetic micro-batch, repeated forever."""
    size = config.batches.micro_batch_size, config.data.seq_length
    generator = torch.Generator().manual_seed(config.train.seed)
    tokens_BS = torch.randint(0, config.model.vocab_size, size, generator=generator)
    mask_BS = torch.ones(size)
    batch = Batch(tokens_BS, tokens_BS, mask_BS, mask_sum=mask_BS.numel())
    return repeat(batch.to(device))


def _update(training: Training) -> None:
    training.optimizer.step(lr=0.0, weight_decay=0.0, grad_norm=1.0, unscale=0.5)


def _product(config: RunConfig, device: torch.device) -> Callable[[], object]:
    kind = TORCH_TYPES[config.precision.compute]
    matrix = torch.ones(_PRODUCT, _PRODUCT, dtype=kind, device=device)
    return lambda: matrix @ matrix


def _coding(device: torch.device) -> Callable[[], object]:
    """Encode gradients in 4 bits and decodes them."""
    form = BlockFormat(bits=4, block=GRADIENT_BLOCK)
    values = torch.linspace(-1.0, 1.0, _CODED, device=device)
    encoded = torch.empty(form.num_bytes(_CODED), dtype=torch.uint8, device=device)
    decoded = torch.empty_like(values)

    def action() -> None:
        encode(values, form, encoded, transforms=True)
        decode(encoded, form, decoded)

    return action


def _jobs(streams: CommStreams, device: torch.device) -> Callable[[], object]:
    """Queue jobs that add a few gradients to others, as after a reduction; waits for each."""
    total, own = torch.zeros(16, device=device), torch.ones(16, device=device)

    def add() -> None:
        total.add_(own)

    def action() -> None:
        for _ in range(_JOBS):
            streams.submit("jobs", add).wait()

    return action


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clock:
    """Times an action that all ranks do at once."""

    control: Control
    cores: float | None
    effort: Effort = THOROUGH

    def median(self, action: Callable[[], object]) -> float:
        """Return seconds of an action, the median over steps.

        For ranks that share cores it is the processor time divided by a rank's share of the cores:
        in wall-clock time the last rank has waited for others, which in training wait for it.
        """
        effort = self.effort
        early = [self._time(action) for _ in range(effort.warmup)]
        slowest = max(self.control.gather(early[-1].wall))
        steps = max(1, int(min(effort.steps, effort.seconds / max(slowest, 1e-9))))
        by_rank = self.control.gather([self._time(action) for _ in range(steps)])
        each = list(zip(*by_rank, strict=True))
        if self.cores is not None and self.cores < torch.get_num_threads():
            return median(fmean(one.cpu for one in step) for step in each) / self.cores
        return median(max(one.wall for one in step) for step in each)

    def _time(self, action: Callable[[], object]) -> Took:
        synchronize(self.control.device)
        self.control.barrier()
        return time_of(action, self.control.device)


def _cores(control: Control) -> float:
    """Return an equal share of the cores that the ranks on this machine may use together."""
    machine = _BOOT.read_text().strip()
    everybody = control.gather((machine, frozenset(os.sched_getaffinity(0))))
    here = [usable for where, usable in everybody if where == machine]
    return len(frozenset().union(*here)) / len(here)


def memory_of_rank(control: Control) -> int:
    """Return a GPU's memory, or an equal share of the machine's for all ranks that run on it."""
    if control.device.type == "cuda":
        return int(torch.cuda.get_device_properties(control.device).total_memory)
    machine = _BOOT.read_text().strip()
    sharing = control.gather(machine).count(machine)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // sharing


def _bytes_in_use(device: torch.device) -> int:
    """Return bytes that a rank uses without a model: interpreter and libraries, or a
    GPU's context."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, total - free - torch.cuda.memory_reserved(device))
    return anonymous_bytes(_PAGES.read_text())


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU rank"
