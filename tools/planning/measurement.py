"""Measures steps of this project's trainer beside what the planner says of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median
from typing import Any

import torch

from data.loader import Batch
from model.config import flops_per_token, num_parameters
from paro.arguments import parse_args
from paro.assembly import build_training, start_state
from paro.config import RunConfig
from paro.planning.machine import Device, Machine
from paro.planning.planner import Case, Estimator, Freedom, plan
from paro.runtime import Control, World, device_for
from paro.training import train_step
from tools.peers.task import Task

# Of a rank, beside what the planner adds up: gloo's buffers and threads, and what torch keeps.
CONSTANT_BYTES = 32_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """A rank that trains without the others, while all do."""

    seconds: float  # of a step
    micro_batch_seconds: float  # of one more micro-batch


def train_alone(task: Task, *, steps: int) -> Alone:
    """Times this rank's training of its own part, in no group; call it on all ranks at once."""
    times = {count: _alone(task, count, steps) for count in (1, task.num_micro_batches + 1)}
    one, more = times.values()
    return Alone(seconds=one, micro_batch_seconds=(more - one) / task.num_micro_batches)


def _alone(task: Task, num_micro_batches: int, steps: int) -> float:
    world = World()
    flags = [*task.flags, *task.own_flags, "--paro-strategy", "NNN"]
    size = task.run.batches.micro_batch_size
    at = flags.index("--global-batch-size") + 1
    flags[at] = str(size * num_micro_batches)
    config = RunConfig.from_args(parse_args(flags), world)
    control = Control(world, device_for(config.runtime, world))
    training = build_training(config, control)
    state = start_state(config)
    tokens_BS = torch.zeros(size, config.data.seq_length, dtype=torch.int64)
    batch = Batch(
        tokens_BS=tokens_BS, labels_BS=tokens_BS, loss_mask_BS=torch.ones(tokens_BS.shape)
    )
    times = []
    for _ in range(1 + steps):
        begin = time.perf_counter()
        train_step(training, state, iter([batch] * num_micro_batches))
        times.append(time.perf_counter() - begin)
    training.close()
    return median(times[1:])


def machine_for(machine: Machine, task: Task, alone: Alone, *, cores: float) -> Machine:
    """The measured machine with a device as fast as this model trains alone.

    One more micro-batch tells the FLOP/s; what else a step takes is the same under any strategy as
    far as it is no update, which is by bytes.
    """
    tokens = task.run.batches.micro_batch_size * task.run.data.seq_length
    flops = flops_per_token(task.model, task.run.data.seq_length, causal=False) * tokens
    sustained = flops / alone.micro_batch_seconds
    device = Device(
        name="a CPU rank, measured while it trained alone",
        memory_bytes=1 << 40,
        reserved_bytes=CONSTANT_BYTES,
        peak_flops=sustained,
        sustained_flops=sustained,
        memory_bytes_per_second=_memory_speed(task, alone),
        cores=cores,
    )
    return replace(machine, device=device)


def _memory_speed(task: Task, alone: Alone) -> float:
    """By the update, which is what a step takes beside its micro-batch."""
    numel = num_parameters(task.model)
    update = max(alone.seconds - alone.micro_batch_seconds, 1e-4)
    return numel * 30 / update


def case_of(task: Task, machine: Machine, collective: str) -> Case:
    """The measured run as the planner sees it."""
    run = task.run
    return Case(
        model=run.model,
        machine=machine,
        group_size=task.group_size,
        seq_length=run.data.seq_length,
        micro_batch_size=run.batches.micro_batch_size,
        global_batch_size=run.batches.global_batch_size,
        precision=replace(run.precision, grad_reduce_in_bf16="--grad-reduce-in-bf16" in
                          task.own_flags),
        collective=collective,
        device_type="cpu",
    )  # fmt: skip


def compare(case: Case, measured: dict[str, tuple[float, int | None]]) -> dict[str, Any]:
    """Predicted beside measured seconds and bytes of strategies, their order, and auto."""
    estimator = Estimator(case)
    rows: list[dict[str, Any]] = []
    for name, (seconds, peak) in measured.items():
        estimate = estimator.estimate(case.setting(case.strategy(name)))
        rows.append(
            {
                "strategy": name,
                "measured_seconds": seconds,
                "predicted_seconds": estimate.seconds,
                "error": estimate.seconds / seconds - 1,
                "measured_bytes": peak,
                "predicted_bytes": estimate.memory_bytes,
                "exposed_seconds": estimate.timeline.exposed,
            }
        )
    errors = [abs(row["error"]) for row in rows]
    return {
        "rows": rows,
        "median_error": median(errors),
        "worst_error": max(errors),
        **_ordering(rows),
        "auto": _auto(case, rows),
    }


def _ordering(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Pairs that differ by more than a tenth, and those of them that are ordered wrongly."""
    wrong, told = [], 0
    for one, other in combinations(rows, 2):
        fast, slow = sorted((one, other), key=lambda row: row["measured_seconds"])
        if slow["measured_seconds"] <= 1.1 * fast["measured_seconds"]:
            continue
        told += 1
        if slow["predicted_seconds"] <= fast["predicted_seconds"]:
            wrong.append([fast["strategy"], slow["strategy"]])
    return {"pairs": told, "pairs_wrong": wrong}


def _auto(case: Case, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Under limits that let in one strategy, a few, and all: auto's choice, of those measured."""
    sizes = sorted({row["predicted_bytes"] for row in rows})
    count = min(6, len(sizes))
    limits = [sizes[round(i * (len(sizes) - 1) / max(1, count - 1))] for i in range(count)]
    found = []
    for limit in dict.fromkeys(limits):
        freedom = Freedom(
            strategies=tuple(case.strategy(row["strategy"]) for row in rows),
            micro_batch_sizes=(case.micro_batch_size,),
            collectives=(case.collective,),
            recomputes=(case.model.recompute,),
        )
        best = plan(replace(case, memory_bytes=limit), freedom).best
        assert best is not None, f"nothing fits {limit} bytes"
        times = {row["strategy"]: row["measured_seconds"] for row in rows}
        fitting = [r["measured_seconds"] for r in rows if r["predicted_bytes"] <= limit]
        chosen = best.setting.strategy.name
        found.append(
            {
                "limit_bytes": limit,
                "chosen": chosen,
                "beside_best": times[chosen] / min(fitting),
            }
        )
    return found
