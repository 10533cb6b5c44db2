"""Models of groups that train alone, trained in turn in one process by the formulas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle

import torch
from torch import Tensor

from data.batch import Batch, BatchFetcher
from data.loader import MicroBatches
from paro.config.run import RunConfig
from paro.distributed.world import World
from paro.spec.outer_steps import OuterConfig
from paro.training.assembly import build_data
from paro.training.step import Training, train_step
from tests.helpers.training import begun, built, configured, whole_parameters


def train_in_turn(
    flags: str, batch: int, world: int, group: int, outer: OuterConfig
) -> list[dict[str, Tensor]]:
    """Masters of one model for each group, trained in turn in this process with outer steps."""
    num_groups = world // group
    config = configured(f"{flags} --global-batch-size {batch}", World(size=world))
    runs = [built(f"{flags} --global-batch-size {batch // num_groups}") for _ in range(num_groups)]
    states = [begun(config, training)[0] for config, training in runs]
    sources = [
        _batches(config, range(index * group, (index + 1) * group)) for index in range(num_groups)
    ]
    if outer.outer_warmup:
        whole, together = built(f"{flags} --global-batch-size {batch}")
        state, _ = begun(whole, together)
        every = (next(source) for source in cycle(sources) for _ in range(group))
        for _ in range(outer.outer_warmup):
            train_step(together, state, every)
        for index, (_, training) in enumerate(runs):
            _copy_states(together, training)
            states[index] = replace(state)
    models = [training for _, training in runs]
    loop = _OuterLoop(models, outer)
    for iteration in range(outer.outer_warmup, config.train.train_iters):
        for training, state, source in zip(models, states, sources, strict=True):
            train_step(training, state, source)
        loop.after_step(iteration + 1)
    return [whole_parameters(each) for each in models]


class _OuterLoop:
    """Outer steps by the formulas, on whole masters of every model."""

    def __init__(self, models: Sequence[Training], outer: OuterConfig) -> None:
        self.outer, self.models = outer, models
        self.masters = [[part.master for part in each.optimizer._parts.values()] for each in models]
        self.reference = [master.clone() for master in self.masters[0]]
        self.momentum = [torch.zeros_like(master) for master in self.masters[0]]
        self.begun: list[list[Tensor]] = []

    def after_step(self, iteration: int) -> None:
        outer = self.outer
        if outer.begins(iteration) is not None:
            self.begun = [[master.clone() for master in masters] for masters in self.masters]
        fragment = outer.merges(iteration)
        if fragment is None:
            return
        for index, reference in enumerate(self.reference):
            if outer.fragment_of(index, len(self.reference)) != fragment:
                continue
            gradient = torch.stack([reference - before[index] for before in self.begun]).mean(0)
            momentum = self.momentum[index]
            momentum.mul_(outer.outer_momentum).add_(gradient)
            step = gradient + outer.outer_momentum * momentum
            reference -= outer.outer_lr * (step if outer.outer_nesterov else momentum)
            for masters, before in zip(self.masters, self.begun, strict=True):
                masters[index].add_(reference - before[index])
        for training in self.models:
            for part in training.optimizer._parts.values():
                part.write_params()


def _copy_states(source: Training, target: Training) -> None:
    target.optimizer.num_steps = source.optimizer.num_steps
    for theirs, ours in zip(
        *(each.optimizer._parts.values() for each in (source, target)), strict=True
    ):
        for name, values in theirs.states.items():
            ours.states[name].copy_(values)
        ours.write_params()


def _batches(config: RunConfig, ranks: range) -> Iterator[Batch]:
    """Every micro-batch that some ranks of a run read, step by step."""
    samples = build_data(config).train
    readers = [
        MicroBatches(
            BatchFetcher(samples, config.data, config.eod),
            micro_batch_size=config.batches.micro_batch_size,
            data_parallel_rank=rank,
            data_parallel_size=config.world.size,
        )
        for rank in ranks
    ]
    while True:
        yield from (next(reader) for reader in readers)
