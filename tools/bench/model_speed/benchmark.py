"""Lets contenders of bench_model.py train in turns, or each in a process of its own."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch

from paro.distributed.timers import time_of
from paro.errors import describe
from paro.report.log import print_line
from paro.report.memory import peak_memory_bytes
from tools.bench.model_speed.contenders import CONTENDERS, Step, Task
from tools.bench.shared.clocks import Span
from tools.bench.shared.turns import median_ratio, order_of_round


@dataclass(slots=True, kw_only=True)
class Measured:
    """Figures of one contender."""

    tokens_per_turn: int
    first_loss: float
    seconds: list[float] = field(default_factory=list)  # of its turns, round by round
    turns: list[Span] = field(default_factory=list)
    peak_bytes: int | None = None  # None: others share its process

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_turn / median(self.seconds)

    def ratio(self, other: Measured) -> float:
        """Compute the speed relative to `other`: the median over rounds."""
        return median_ratio(other.seconds, self.seconds)


Results = dict[str, Measured | str]  # by contender; a text says why it failed
Benchmark = Generator[Results]  # what was measured so far, after each round
Start = Callable[[Sequence[str]], Benchmark]
_begun: list[Benchmark] = []  # in a contender's own process


def benchmark(task: Task, names: Sequence[str], *, steps: int, clock: str) -> Benchmark:
    """Let the contenders train in turns, in an order that rotates from round to round.

    `clock`: a field of `Took`.
    """
    contenders = {name: CONTENDERS[name](task) for name in names}
    tokens = steps * task.num_tokens
    measured = {
        name: Measured(tokens_per_turn=tokens, first_loss=float(step()))
        for name, step in contenders.items()
    }
    for step in contenders.values():
        step()  # may allocate what stays allocated

    def turn(step: Step) -> None:
        for _ in range(steps):
            step()

    for index in itertools.count():
        for name in order_of_round(names, index):
            begin = time.time()
            took = time_of(partial(turn, contenders[name]), task.device)
            measured[name].turns.append((begin, time.time()))
            measured[name].seconds.append(getattr(took, clock))
        if len(names) == 1:
            measured[names[0]].peak_bytes = peak_memory_bytes(task.device)
        yield {**measured}


def in_own_processes(
    start: Start, names: Sequence[str], device: torch.device, most_seconds: float | None
) -> list[list[Benchmark]]:
    """Group of benchmarks, each of one contender in a process of its own.

    One that fails, for example for want of memory, or is stopped after `most_seconds`, does not end
    the others. On a CPU all take turns; on a GPU one is there at a time.
    """
    each_alone = [_alone(start, name, most_seconds) for name in names]
    return [each_alone] if device.type == "cpu" else [[one] for one in each_alone]


def _alone(start: Start, name: str, most_seconds: float | None) -> Benchmark:
    context = multiprocessing.get_context("spawn")  # CUDA does not start after a fork
    end = math.inf if most_seconds is None else time.time() + most_seconds
    found: Results = {}
    with ProcessPoolExecutor(1, context) as pool:
        while not isinstance(found.get(name), str):
            try:
                found = pool.submit(_next_round, start, name, end).result()
            except BrokenProcessPool as error:
                is_over = time.time() >= end
                found = {name: f"stopped after {most_seconds:g} s" if is_over else describe(error)}
            yield found
    yield from itertools.repeat(found)


def _next_round(start: Start, name: str, end: float) -> Results:
    """Run a round in a contender's own process, which a timer stops at the time `end`."""
    try:
        if not _begun:
            if end < math.inf:
                signal.setitimer(signal.ITIMER_REAL, max(0.001, end - time.time()))
            _begun.append(start([name]))
        return next(_begun[0])
    except Exception as error:  # whatever a library raises: not all of them can be pickled
        return {name: describe(error)}


def results_of(groups: Sequence[Sequence[Benchmark]], rounds: int) -> Iterator[Results]:
    """Run group after group of contenders, and yield the results so far after each round."""
    results: Results = {}
    for group in groups:
        with ExitStack() as stack:
            for benchmark in group:
                stack.enter_context(closing(benchmark))
            for index in range(rounds):
                for benchmark in order_of_round(group, index):
                    latest = next(benchmark)
                    results |= latest
                    last = ", ".join(f"{name} {_last(result)}" for name, result in latest.items())
                    print_line(f"round {index + 1:3d}, seconds: {last}")
        yield results


def _last(result: Measured | str) -> str:
    return "failed" if isinstance(result, str) else f"{result.seconds[-1]:.3f}"
