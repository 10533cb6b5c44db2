"""The DiLoCo outer optimizer: groups of ranks synchronize their parameters every H steps."""

# [Note: outer steps] in paro/spec/outer_steps.py has the formulas and the states. A round is the
# once-a-step communication of units whose gradients are movements, with the outer step between.

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from paro.distributed.comm_stream import DONE, Event, Job
from paro.distributed.control import Control
from paro.optim.finite import square_sum
from paro.schedule.movement import MovementStatistics
from paro.sharding.buffers import swap
from paro.sharding.distributed_model import DistributedModel
from paro.sharding.shards import UnitShards
from paro.spec.outer_steps import SYNCHRONOUS, OuterConfig
from paro.spec.states import (
    ANCHOR,
    BEGUN,
    MASTER_OF_GROUP,
    OUTER_MOMENTUM,
    PARAM,
    FlatShard,
    of_group,
)
from paro.step.actions import ActionKind
from paro.topology import WaitKind


class OuterRoundResult(NamedTuple):
    """The numbers of a round that has ended, for logs."""

    moved: float  # mean norm of the movements of the groups that took part
    num_left_out: int
    square: Tensor  # this rank's part of the outer gradient's squared norm


class OuterUnit(UnitShards):
    """The outer states of this rank's part of one unit, and the collectives of a round on it.

    The part is 1/m of the unit, for m ranks in a group: where an optimizer shard is replicated
    inside the group, its replicas split it evenly. Movements are the gradients of a round.
    """

    def __init__(self, unit: UnitShards, master: Tensor, config: OuterConfig) -> None:
        super().__init__(unit.spec.outer_round, unit.context)
        self.unit, self._whole_master, self._config = unit, master.detach(), config
        begin = self.param_start - unit.optim_start
        self.master = self._whole_master[begin : begin + self.param_shard.numel()]
        if self.param_shard.dtype != self.master.dtype:  # the anchor is fp32 if messages are bf16
            self.param_shard = self._params_of_bucket = torch.zeros_like(self.master)
        self.anchor = self.param_shard
        # This rank's shard of the outer optimizer's states: 1/n of the unit, a range of `master`.
        self._shard = self._to_update(self.anchor, self.spec.strategy.params)
        self.reference = torch.zeros_like(self.master[self._shard])
        self.momentum = torch.zeros_like(self.reference)
        # With a delay: a snapshot of the master at the beginning of the round in flight.
        self.begun = torch.zeros_like(self.master) if config.outer_delay else None
        self.gradient_norm = torch.zeros((), device=master.device)  # of the last outer gradient

    def restart(self, params: Tensor) -> None:
        """Start without outer momentum from parameters that are equal in all groups."""
        self.anchor.copy_(params)
        self.reference.copy_(self.anchor[self._shard])
        self.momentum.zero_()

    def moved(self) -> Tensor:
        """Compute how far the masters have moved since groups last agreed."""
        return self.anchor - self.master

    def begin(self, weight: float) -> None:
        """Queue the messages of a round, in which this group's movement has a weight.

        The outer step is between them, on a comm stream. With weight 0 the movement may be of any
        values, also infinity and NaN.
        """
        if self.begun is not None:
            self.begun.copy_(self.master)
        if weight:
            self.grad_shard.copy_(self.moved().mul_(weight))
        else:
            self.grad_shard.zero_()
        self.grad_sync()
        stepped = self._after(ActionKind.GRAD_SYNC, self._step, self._reduced)
        update, sent = self.quantized_update, self.spec.collectives[ActionKind.PARAM_ALL_GATHER]
        whole = self.grad_shard if update is None else update.quantized
        _, gathered = self.queue(sent, whole, after=stepped)
        self._reduced = self._after(ActionKind.PARAM_ALL_GATHER, self._move_anchor, gathered)

    def _after(self, kind: ActionKind, job: Job, after: Event) -> Event:
        """Queue `job` behind the collectives of an action, or run it now if there is one group."""
        if not (sent := self.spec.collectives[kind]):
            job()
            return DONE
        return self.context.collectives.run_after(sent[-1].span, job, after=after)

    def _step(self) -> None:
        """Do the outer step on this rank's range, and write the anchor's change to be sent."""
        config, gradient = self._config, self.optim_grad.float()
        self.gradient_norm = torch.linalg.vector_norm(gradient)
        self.momentum.mul_(config.outer_momentum).add_(gradient)
        step = self.momentum
        if config.outer_nesterov:
            step = gradient.add(self.momentum, alpha=config.outer_momentum)
        self.reference.sub_(step, alpha=config.outer_lr)
        if self.quantized_update is None:
            torch.sub(self.optim_param, self.reference, out=self.optim_grad)
        else:
            self.quantize_update(self.reference)

    def _move_anchor(self) -> None:
        if self.quantized_update is None:
            self.anchor.sub_(self.grad_shard)
        else:
            self.quantized_update.apply()

    def end(self, *, takes_part: bool) -> None:
        """Move the master after a round; a group that took no part loses its movement."""
        if self.begun is None or not takes_part:
            self.master.copy_(self.anchor)
        else:
            self.master.sub_(self.begun).add_(self.anchor)

    def spread(self) -> Event:
        """Queue the all-gather of masters among the ranks of a group with one optimizer shard."""
        collectives = self.unit.spec.collectives[ActionKind.OUTER_SPREAD]
        return self.queue(collectives, self._whole_master)[1]

    def flat_shards(self) -> Iterator[FlatShard]:
        """Yield this rank's range of every outer state, as checkpoints have them."""
        group, _, everywhere = self.spec.strategy.degrees
        yield self.flat_shard(PARAM, self.optim_start, self.reference, degree=everywhere)
        yield self.flat_shard(OUTER_MOMENTUM, self.optim_start, self.momentum, degree=everywhere)
        yield self.flat_shard(ANCHOR, self.param_start, self.anchor, degree=group)
        if self.begun is not None:  # without replicas: it is this rank's group's
            name = of_group(BEGUN, self.context.rank // group)
            yield self.flat_shard(name, self.param_start, self.begun, degree=everywhere)

    @property
    def num_bytes(self) -> int:
        quantized = [self.quantized_update.quantized] if self.quantized_update is not None else []
        states = (shard.values for shard in self.flat_shards())
        return sum(each.nbytes for each in (self.grad_shard, *quantized, *states))


class OuterOptimizer:
    """The outer optimizer of DiLoCo on this rank: begins and ends the rounds of a run, if any.

    In a step: `held` before the update of the inner optimizer, `after_update` after it.
    """

    def __init__(
        self,
        model: DistributedModel,
        masters: Mapping[UnitShards, Tensor],
        config: OuterConfig | None,
    ) -> None:
        """Prepare the rounds of units with these masters; none if `config` is None."""
        context, self.config = model.context, config if config and masters else SYNCHRONOUS
        topology, self._device = context.topology, context.device
        self.is_on = self.config is not SYNCHRONOUS  # False: there is one group, of all ranks
        size = topology.group_size if self.is_on else topology.world_size
        # This rank's group among those that train alone.
        self.group, self.num_groups = context.rank // size, topology.world_size // size
        self.ranks = range(self.group * size, (self.group + 1) * size)
        trained = masters.items() if self.is_on else ()
        self.units = [OuterUnit(unit, master, self.config) for unit, master in trained]
        self.fragments: defaultdict[int, list[OuterUnit]] = defaultdict(list)
        of_unit = partial(self.config.fragment_of, num_units=1 + model.specs[-1].buffer.unit_index)
        for each in self.units:
            self.fragments[of_unit(each.spec.buffer.unit_index)].append(each)
        # Whether each group takes part in the round in flight.
        self.taking_part: tuple[bool, ...] = (True,) * self.num_groups
        self.in_flight: int | None = None  # the fragment whose round has begun and not ended
        self.usual = [MovementStatistics()] * self.config.outer_fragments
        # Norms of every group's movement in the round that this run began last.
        self.norms: tuple[float, ...] | None = None
        self.ended: OuterRoundResult | None = None  # the round that ended in the last step

    def of_group(self, shard: FlatShard) -> FlatShard:
        """Return an inner optimizer's shard as a state of this group, if groups train alone."""
        if not self.is_on:
            return shard
        state = MASTER_OF_GROUP if shard.state == PARAM else shard.state
        inside = [rank for rank in shard.replicas if rank in self.ranks]
        return replace(shard, state=of_group(state, self.group), replicas=inside)

    def held(self, iteration: int) -> frozenset[UnitShards]:
        """Return the units whose parameters move at the end of the step that ends `iteration`."""
        fragment = self.config.merges(iteration)
        if fragment is None or (self.config.outer_delay and fragment != self.in_flight):
            return frozenset()
        return frozenset(each.unit for each in self.fragments[fragment])

    @property
    def takes_part(self) -> bool:
        """True if this rank's group takes part in the round in flight, or in the last one."""
        return self.taking_part[self.group]

    @torch.no_grad()
    def after_update(self, iteration: int, control: Control) -> Iterator[UnitShards]:
        """Begin and end the rounds that are due after the step that ends `iteration`.

        Yield the units of a round that has ended. Collective over all ranks, by `control`, where a
        round begins. A round that no rank of this run has begun does not end: the run may have been
        resumed with other settings.
        """
        if iteration <= self.config.outer_warmup:
            for each in self.units:
                each.restart(each.master)
        self.ended = None
        begins, merges = self.config.begins(iteration), self.config.merges(iteration)
        if begins is not None:
            self._begin(begins, control)
        if merges is None or merges != self.in_flight:
            return
        units, self.in_flight = self.fragments[merges], None
        if any(self.taking_part):
            yield from self._move(units, partial(OuterUnit.end, takes_part=self.takes_part))
            if self.norms is not None:  # those of gradients are there once messages have arrived
                moved = fmean(compress(self.norms, self.taking_part))
                square = torch.stack([each.gradient_norm for each in units]).square().sum()
                self.ended = OuterRoundResult(moved, self.taking_part.count(False), square)
        else:
            yield from (each.unit for each in units)

    def _begin(self, fragment: int, control: Control) -> None:
        """Begin a round without the groups whose movement is not finite, or an outlier."""
        units, self.in_flight = self.fragments[fragment], fragment
        squares = [0.0] * self.num_groups
        squares[self.group] = float(square_sum((each.moved() for each in units), self._device))
        self.norms = tuple(map(math.sqrt, control.sum(squares)))
        self.taking_part = self.usual[fragment].taking_part(self.norms)
        self.usual[fragment] = self.usual[fragment].after(self.norms)
        weight = self.takes_part / max(1, sum(self.taking_part))
        for each in units if any(self.taking_part) else ():
            each.begin(weight)

    @torch.no_grad()
    def exchange(self) -> Iterator[UnitShards]:
        """Swap masters and anchors, which groups agree on; yield the units with new masters."""
        yield from self._move(self.units, lambda each: swap(each.master, each.anchor))

    @torch.no_grad()
    def restore(self, *, masters: bool, reference: bool) -> None:
        """Copy the anchor to lost masters, of all ranks of this group, or to a lost reference."""
        for each in self.units if reference else ():
            each.restart(each.anchor)
        if masters:
            [*self._move(self.units, lambda each: each.master.copy_(each.anchor))]

    @staticmethod
    def _move(
        units: Sequence[OuterUnit], move: Callable[[OuterUnit], object]
    ) -> Iterator[UnitShards]:
        """Wait for the anchor of units, move and all-gather their masters; yield the units."""
        events = []
        for each in units:
            each.wait_reduced()
            move(each)
            events.append(each.spread())
        for each, event in zip(units, events, strict=True):
            each.context.exposed_timer.wait(WaitKind.REDUCE, event)
            yield each.unit

    def wait(self) -> None:
        """Wait for the messages in flight; masters move when their round ends."""
        for each in self.units:
            each.wait_reduced()
