"""Chooses an algorithm for every collective and size: the fastest measured one under auto."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

from paro.collectives.choice import AlgorithmChoice, ChunkCount
from paro.collectives.pipeline import default_num_chunks
from paro.collectives.schedule import COLLECTIVES, NCCL_COLLECTIVES, Op
from paro.machine.collective_time import fastest_num_chunks
from paro.machine.machine import Machine, fastest_algorithm
from paro.topology import Axes


def chunk_count_by(machine: Machine | None) -> ChunkCount:
    """Return a function that chooses the number of a pipeline's chunks, by link speeds if known."""
    if machine is None or machine.intra is None or machine.inter is None:
        return lambda _op, _span, num_bytes: default_num_chunks(num_bytes)
    return cache(partial(fastest_num_chunks, machine))


def choice_of(name: str, machine: Machine | None, *, by_nccl: bool) -> AlgorithmChoice:
    """Return the choice of --paro-collective: a named algorithm, or the fastest on `machine`.

    Raises `UserError` if the machine's measurements lack a collective on an axis.
    """
    num_chunks = chunk_count_by(machine) if by_nccl else None
    if machine is None or name != "auto":
        return AlgorithmChoice(names=(name,), num_chunks=num_chunks)
    allowed = NCCL_COLLECTIVES if by_nccl else COLLECTIVES
    rows = tuple(row for row in machine.measured if row.algorithm in allowed)
    machine = replace(machine, measured=rows)
    kinds = [Axes.INTRA] * (machine.group_size > 1) + [Axes.INTER] * (machine.num_groups > 1)
    for axes in [*kinds, Axes.BOTH] if len(kinds) == 2 else kinds:
        for op in Op:
            fastest_algorithm(machine, op, axes, 1)
    return AlgorithmChoice(
        names=tuple(dict.fromkeys(row.algorithm for row in rows)),
        best=cache(partial(fastest_algorithm, machine)),
        num_chunks=num_chunks,
    )
