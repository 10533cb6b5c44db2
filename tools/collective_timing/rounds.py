"""Rounds of a benchmark of collectives in which algorithms alternate, on checked random data."""

# A shared machine's speed drifts, so in every round each algorithm has its run, in an order that
# rotates, and a figure is the median over rounds of the slowest rank.
#
# The data are random integers, drawn identically on every rank, and bounded so that sums over all
# ranks are just exact in their type. So a result is right to the last bit or wrong, in whatever
# order it was summed, and one that was communicated in a smaller type is wrong. (bf16 holds
# integers up to 256: for more ranks than that each draws from -1, 0, 1, whose sum stays far below.)

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from paro.collectives.schedule import Op
from paro.measuring.benchmark import (
    CheckedInput,
    CollectiveBenchmark,
    CollectiveResult,
    TimedCollective,
    TimedRun,
    count_repeats,
    over_ranks,
    result_of,
)

SEED = 1234
BUSY_ROUNDS = 1  # the last one: next to computing even small messages take a tenth of a second


def run_rounds(
    benchmark: CollectiveBenchmark, timed: Sequence[TimedCollective]
) -> list[CollectiveResult]:
    """Time every algorithm on collectives of one axis span; all ranks return equal results.

    A first round is not counted: it determines how often to repeat short collectives.
    """
    control, names = benchmark.control, benchmark.algorithms
    rank, device = control.world.rank, control.device
    members = benchmark.topology.members
    checked = [random_input(each, members(each.span, rank), rank, device) for each in timed]
    rounds: dict[str, list[list[TimedRun]]] = {name: [] for name in names}
    repeats = {name: [1] * len(timed) for name in names}
    for number in range(1 + benchmark.rounds):
        first = number % len(names)
        busy_too = benchmark.while_computing and number > max(0, benchmark.rounds - BUSY_ROUNDS)
        for name in (*names[first:], *names[:first]):
            runs = run_algorithm(benchmark, name, checked, repeats[name], busy_too=busy_too)
            rounds[name].append(runs)
            if number == 0:
                repeats[name] = [
                    count_repeats(each, run.seconds, device.type)
                    for each, run in zip(timed, runs, strict=True)
                ]
    return [
        result_of(each, name, [runs[index] for runs in rounds[name]], repeats[name][index])
        for index, each in enumerate(timed)
        for name in names
    ]


def run_algorithm(
    benchmark: CollectiveBenchmark,
    name: str,
    checked: Sequence[CheckedInput],
    repeats: Sequence[int],
    *,
    busy_too: bool,
) -> list[TimedRun]:
    """Time a run of each collective by one algorithm; its process groups exist only meanwhile."""
    spans = frozenset(check.collective.span for check in checked)
    with benchmark.collectives(name, spans) as collectives:
        # Starts threads and opens connections that are made lazily. The time is not used: a
        # rank that has just used its core is scheduled later in the run that counts.
        benchmark.run(collectives, checked[0], 1)
        pairs = [*zip(checked, repeats, strict=True)]
        runs = [benchmark.run(collectives, check, times) for check, times in pairs]
        if busy_too:
            busy = [benchmark.run_and_compute(collectives, check, times) for check, times in pairs]
            runs = [run._replace(busy_seconds=s) for run, s in zip(runs, busy, strict=True)]
        by_rank: list[list[TimedRun]] = benchmark.control.gather(runs)
    return [over_ranks(of_ranks) for of_ranks in zip(*by_rank, strict=True)]


def random_input(
    timed: TimedCollective, members: Sequence[int], rank: int, device: torch.device
) -> CheckedInput:
    """Draw the input of one rank among the `members` of an axis span, and the expected result."""
    whole = torch.empty(timed.numel, dtype=timed.dtype)
    if timed.op is Op.ALL_GATHER:
        values = draw(timed, members, rank, rank)
        for member in members:
            whole[timed.shard_of(member)] = draw(timed, members, member, member)
        expected = whole
    else:
        values = torch.empty_like(whole)
        for owner in members:
            values[timed.shard_of(owner)] = draw(timed, members, rank, owner)
            if timed.op is Op.ALL_REDUCE or owner == rank:
                drawn = [draw(timed, members, member, owner).double() for member in members]
                whole[timed.shard_of(owner)] = torch.stack(drawn).sum(0)
        expected = whole if timed.op is Op.ALL_REDUCE else whole[timed.shard_of(rank)].clone()
    return CheckedInput(
        collective=timed,
        shard=timed.shard_of(rank),
        values=values.to(device),
        expected=expected.to(device),
    )


def draw(timed: TimedCollective, members: Sequence[int], rank: int, owner: int) -> Tensor:
    """Draw the data of `rank` at the position of the shard of rank `owner`."""
    key = f"{SEED}/{timed.op.value}/{timed.numel}/{timed.dtype}/{rank}/{owner}"
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    most = max(1, int(2 / torch.finfo(timed.dtype).eps) // len(members))
    size = (timed.numel // len(members),)
    return torch.randint(-most, most + 1, size, generator=generator, dtype=timed.dtype)
