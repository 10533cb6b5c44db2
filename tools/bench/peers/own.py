"""This project as a contender: the training step of pretrain_llama.py under a given strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

from data.loader import Batch
from paro.distributed.control import Control
from paro.errors import UserError
from paro.launch.placement import check_placement
from paro.topology import WaitKind
from paro.training.assembly import build_training
from paro.training.step import TrainState, train_step
from tools.bench.peers.task import Outcome, Task

PREFIX = "paro:"
_ROTATES = ["--paro-materialize", "rotate"]
_FOUR_BITS = ["--paro-inter-grad-bits", "4", "--paro-inter-param-bits", "4"]
_AT_ONCE = ["--paro-updated-ahead", "all"]
_IN_ORDER = ["--paro-nccl-launch-order", "implicit"]
WAYS = {
    "rotate": _ROTATES,
    "in-place": [*_ROTATES, "--paro-rotate-in-place"],
    "4-bit": [*_FOUR_BITS, "--paro-inter-bits-warmup-iters", "0"],
    "ahead": ["--paro-updated-ahead", "2"],
    "at-once": _AT_ONCE,
    "copy-engine": ["--paro-nccl-copy-engine"],
    "in-order": _IN_ORDER,
    "in-order-at-once": [*_IN_ORDER, *_AT_ONCE],
    "muon": ["--optimizer", "muon", "--muon-extra-scale-factor", "0.2"],
}


class OwnSetting(NamedTuple):
    """The parts of STRATEGY[@COLLECTIVE][+WAY], of `WAYS`; those not given are empty."""

    strategy: str
    collective: str
    way: str

    @property
    def rotates(self) -> bool:
        return self.way in ("rotate", "in-place")

    @property
    def flags(self) -> list[str]:
        flags = ["--paro-strategy", self.strategy, *WAYS.get(self.way, [])]
        return [*flags, "--paro-collective", self.collective] if self.collective else flags


def parse_setting(text: str) -> OwnSetting:
    """Parse a candidate; `UserError` for an unknown way to train it.

    A comma separates candidates on the command line, so degrees are joined by /.
    """
    named, plus, way = text.partition("+")
    if plus and way not in WAYS:
        raise UserError(f"{text}: +{way} is none of +{', +'.join(WAYS)}")
    strategy, _, collective = named.partition("@")
    return OwnSetting(strategy.replace("/", ","), collective, way)


class Own:
    """A whole trainer without data loading, logging and checkpoints."""

    def __init__(self, task: Task, control: Control) -> None:
        config = task.run
        self.training = build_training(config, control)
        self.training.optimizer.initialize(task.first_weights)
        if not task.is_alone:
            check_placement(self.training)
        self.state = TrainState.at_start(config.loss_scale)

    def step(self, batches: Iterator[Batch], observe: Callable[[], None]) -> Outcome:
        result = train_step(self.training, self.state, batches)
        if result.skipped:
            raise RuntimeError(f"step {self.state.iteration} was skipped: a gradient overflowed")
        observe()  # the accumulators stay allocated, whether in use or not
        waited = {kind.value: getattr(result.exposed, kind.value) for kind in WaitKind}
        return Outcome(result.loss, result.grad_norm, waited)

    def held(self) -> Iterable[Tensor]:
        for unit in self.training.model.units:
            yield from (unit.param_shard, unit.grad_shard)
        for shard in self.training.optimizer.flat_shards():
            yield shard.values

    def finish(self) -> None:
        self.training.model.wait_for_updated_params()
