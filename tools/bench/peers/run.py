"""One contender's run: in its own process it is built, warmed up and timed."""

# Every run has its own process, forked from one that has imported everything and started nothing:
# contenders share no process group, thread, allocator or global state of a library. A gloo group
# that merely exists was measured to take 0.13% of a core on every rank, so a dozen contenders kept
# on eight ranks would take half a core from the one being timed; memory that one freed would count
# as another's. Rebuilding each time costs seconds that are not timed.

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple, TypeVar

import torch
import torch._dynamo  # imported by optimizers when constructed: here once, not in every run
import torch.distributed as dist

from data.batch import BatchFetcher
from data.loader import Batch, MicroBatches, SplitCounts, build_datasets
from model.llama import Llama
from paro.config.run import RunConfig
from paro.distributed.control import Control
from paro.distributed.process_group import RuntimeConfig, device_for
from paro.distributed.timers import synchronize
from paro.distributed.world import World
from tools.bench.peers.figures import TimedRun
from tools.bench.peers.registry import build
from tools.bench.peers.task import Outcome, Task, state_bytes
from tools.shared.meters import (
    MemoryMeter,
    add_up_sent,
    sent_bytes,
    watched_interfaces,
)

Result = TypeVar("Result")


def in_own_process(function: Callable[[], Result]) -> Result:
    """Run a function, which can be pickled, in a fork of this process; raise its error."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(function).result()


def run_contender(task: Task, name: str, *, number: int) -> TimedRun:
    """Train with one contender on all ranks; every rank returns equal figures."""
    world = task.run.world
    device = device_for(task.run.runtime, world)
    with process_group(task.run.runtime, world, device, number):
        control = Control(world, device)
        batches = batches_of(task, device)
        if device.type == "cpu":
            rehearse(task.run, task.compute_dtype)
        memory = MemoryMeter(device)
        contender = build(task, name, control)
        memory.start()
        states = 0  # the most bytes after any micro-batch of the warm-up

        def count() -> None:
            nonlocal states
            states = max(states, state_bytes(contender.held()))

        outcomes = [contender.step(batches, count) for _ in range(task.warmup_steps)]
        memory.end_of_warmup()
        # The clock runs from the end of the last warm-up step to the end of the last step, without
        # a barrier: each step ends with a reduction of all ranks' gradients, and work that a
        # contender leaves to the next step (the all-gather of updated parameters under its forward)
        # is inherited at the start and left over at the end.
        begin = _now(device)
        outcomes += [contender.step(batches, lambda: None) for _ in range(task.steps)]
        measured = _per_step(begin, _now(device), task.steps)
        contender.finish()
        held = states, memory.peak()
        return _agree(control, name, outcomes, measured, held, task.warmup_steps)


@contextmanager
def process_group(
    runtime: RuntimeConfig, world: World, device: torch.device, number: int
) -> Iterator[None]:
    """Set up the default process group through the launcher's store, under a name."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = runtime.timeout
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
    dist.init_process_group(
        backends_on(device),
        store=dist.PrefixStore(f"turn-{number}", store),
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
    )
    yield  # groups end with the process: destroying gloo's waits for threads that need the GIL


def backends_on(device: torch.device) -> str:
    """Return the backends of the default group: `Control` sums what is on the host, on GPUs too."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def batches_of(task: Task, device: torch.device) -> Iterator[Batch]:
    """Return this rank's micro-batches of a run, on the device before the clock starts."""
    world, layout = task.run.world, task.run.context.layout
    ranges = layout.ranges(world.rank, task.run.data.seq_length)
    num_micro_batches = (task.warmup_steps + task.steps) * task.num_micro_batches
    num_samples = num_micro_batches * task.run.batches.samples_per_micro_batch
    counts = SplitCounts(train=num_samples)
    datasets = build_datasets(task.run.data, counts, task.run.vocab_size, None)
    source = MicroBatches(
        BatchFetcher(datasets.train, ranges=ranges if layout.size > 1 else None),
        micro_batch_size=task.run.batches.micro_batch_size,
        data_parallel_rank=world.rank // layout.size,
        data_parallel_size=task.run.batches.data_parallel_size,
    )
    return iter([batch.to(device) for batch in itertools.islice(source, num_micro_batches)])


def rehearse(run: RunConfig, compute_dtype: torch.dtype) -> None:
    """Train one block once, so that one-time allocations do not count as a contender's memory.

    Those are compiled kernels, scratch memory of threads and the like; on a GPU they do not count.
    """
    model = Llama(replace(run.model, num_layers=1)).to(compute_dtype)
    length = run.data.seq_length // run.context.context_parallel_size
    size = (run.batches.micro_batch_size, length)
    ids_BS = torch.zeros(size, dtype=torch.int64)
    model(ids_BS, ids_BS, torch.zeros(size)).backward()
    torch.optim.AdamW(model.parameters(), fused=True).step()


class _Meters(NamedTuple):
    """Figures that the meters of one rank show, or that they counted in a step."""

    seconds: float
    cpu_seconds: float
    sent: dict[str, int]  # by interface


def _now(device: torch.device) -> _Meters:
    synchronize(device)
    sent = sent_bytes(watched_interfaces(os.environ.get("GLOO_SOCKET_IFNAME")))
    return _Meters(time.perf_counter(), time.process_time(), sent)


def _per_step(begin: _Meters, end: _Meters, steps: int) -> _Meters:
    sent = {name: round((end.sent[name] - count) / steps) for name, count in begin.sent.items()}
    seconds, cpu_seconds = end.seconds - begin.seconds, end.cpu_seconds - begin.cpu_seconds
    return _Meters(seconds / steps, cpu_seconds / steps, sent)


def _agree(
    control: Control,
    name: str,
    outcomes: list[Outcome],
    measured: _Meters,
    held: tuple[int, int | None],
    warmup_steps: int,
) -> TimedRun:
    """Combine the figures of all ranks; the exchange is also the barrier before they exit."""
    ranks: list[_Meters] = control.gather(measured)
    nodes: list[str] = control.gather(os.environ.get("GROUP_RANK", "0"))  # torchrun's numbers
    bytes_held: list[tuple[int, int | None]] = control.gather(held)
    losses = control.sum([float(outcome.loss) for outcome in outcomes])
    peaks = [peak for _, peak in bytes_held if peak is not None]
    waits = [outcome.waited for outcome in outcomes[warmup_steps:] if outcome.waited is not None]
    return TimedRun(
        contender=name,
        seconds=max(rank.seconds for rank in ranks),
        cpu_seconds=sum(rank.cpu_seconds for rank in ranks),
        state_bytes=max(states for states, _ in bytes_held),
        peak_bytes=max(peaks) if peaks else None,
        nic_bytes=add_up_sent([(node, rank.sent) for node, rank in zip(nodes, ranks, strict=True)]),
        waited_seconds={kind: fmean(wait[kind] for wait in waits) for kind in waits[0]}
        if waits
        else None,
        losses=[loss / control.world.size for loss in losses],
        grad_norms=[float(outcome.grad_norm) for outcome in outcomes],
    )
