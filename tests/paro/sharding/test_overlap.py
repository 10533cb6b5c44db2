"""Communication overlaps with computation, or not at all with 0 prefetched units."""

# No clocks: the comm stream of a collective is blocked until the training thread has reached a
# computation after the call. With overlap it reaches it; without, it waits for the collective
# itself, and the block times out.

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paro.sharding.sharded_unit import ShardedUnit
from paro.step.actions import Verb
from paro.topology import AxisSpan, StreamKind
from paro.training.step import Training
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TINY, train

PATIENCE = 20.0  # seconds; with overlap the training thread needs milliseconds
GIVE_UP = 0.5


class Hold:
    """Blocks a comm stream before one call of `unit.method`, until `reached` is called."""

    def __init__(
        self, unit: ShardedUnit, method: str, kind: StreamKind, span: AxisSpan, patience: float
    ) -> None:
        self._reached = threading.Event()
        self._patience = patience
        self.overlapped: bool | None = None
        original: Callable[..., None] = getattr(unit, method)
        streams = unit.context.collectives.groups.links.streams

        def held(**arguments: object) -> None:
            if self.overlapped is None:
                self.overlapped = False
                streams.submit((kind, span[-1]), self._wait)
            original(**arguments)

        setattr(unit, method, held)

    def _wait(self) -> None:
        self.overlapped = self._reached.wait(self._patience)

    def reached(self) -> None:
        if self.overlapped is not None:  # the call has been made
            self._reached.set()


def watch(flags: str, prefetch: int) -> dict[str, bool | None]:
    """Which collectives were still in flight when a later computation began."""
    patience = PATIENCE if prefetch else GIVE_UP
    holds: dict[str, Hold] = {}

    def before(training: Training) -> None:
        units = {unit.name: unit for unit in training.model.units}
        modules = dict(training.model.model.named_modules())
        sent = units["head"].spec.collectives
        spans = {verb: found[0].span for verb, found in sent.items() if found}

        if Verb.GATHER in spans:
            gather = Hold(
                units["blocks.1"], "gather", StreamKind.GATHER, spans[Verb.GATHER], patience
            )
            holds["gather of block 1 under forward of block 0"] = gather
            modules["blocks.0"].register_forward_pre_hook(lambda *_: gather.reached())

        reducing = spans.get(Verb.REDUCE) or spans[Verb.GRAD_SYNC]
        reduce = Hold(units["blocks.2"], "reduce", StreamKind.REDUCE, reducing, patience)
        holds["reduction of block 2 under backward of block 1"] = reduce

        def in_backward(_module: object, _inputs: object, output: Tensor) -> None:
            output.register_hook(lambda _gradient: reduce.reached())

        modules["blocks.0"].register_forward_hook(in_backward)  # its output is block 1's input

        if Verb.PARAM_ALL_GATHER in spans:
            span = spans[Verb.PARAM_ALL_GATHER]
            started = Hold(units["head"], "param_all_gather", StreamKind.GATHER, span, patience)
            holds["all-gather of the updated head under the next forward"] = started
            modules["blocks.0"].register_forward_pre_hook(lambda *_: started.reached())

    train(f"{flags} --paro-prefetch-units {prefetch}", group_size=2, before=before)
    return {name: hold.overlapped for name, hold in holds.items()}


FLAGS = f"{TINY} --train-iters 2 --global-batch-size 4"


CASES = [("IIG", 1, 3), ("NIG", 1, 2), ("NNG", 1, 2), ("IIG", 0, 3)]  # the last without overlap


def watch_all() -> list[dict[str, bool | None]]:
    return [watch(f"{FLAGS} --paro-strategy {name}", prefetch) for name, prefetch, _ in CASES]


@pytest.mark.ranks
def test_collectives_run_beside_compute_unless_no_units_are_ahead() -> None:
    for of_rank in run_ranks(watch_all, 4):
        for case, seen in zip(CASES, of_rank, strict=True):
            assert len(seen) == case[2], case
            assert set(seen.values()) == {case[1] > 0}, (case, seen)


def repeat(flags: str, times: int) -> list[list[tuple[float, float]]]:
    runs = [train(flags, group_size=4) for _ in range(times)]
    return [[(step.loss, step.grad_norm) for step in run.steps] for run in runs]


@pytest.mark.verify
@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "steps"), [("2,4,8", 6), ("IIG", 1000), ("GGG", 1000)])
def test_busy_lanes_give_the_same_bits_twice(strategy: str, steps: int) -> None:
    flags = f"{TINY} --train-iters {steps} --global-batch-size 16 --paro-strategy {strategy}"
    first, second = run_ranks(repeat, 8, flags, 2, timeout=3000)[0]
    assert len(first) == steps
    assert first == second
    assert torch.tensor(first).isfinite().all()
