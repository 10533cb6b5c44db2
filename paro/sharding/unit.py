"""One unit's life: gather, use, release, receive gradients, reduce, publish."""

# [Note: buffer lifetime]
# Names tell the redundancy: `_U` is whole, `param_shard` and `grad_shard` are this rank's shards
# at the degrees of params and grads, and the optimizer's range of each is a view inside them.
#
#   param_shard  always        compute type, params degree
#   param_U      gather..release   compute type, whole; at params degree 1 it is param_shard
#   grad_U       first gradient..reduced   wire type, whole; none at grads degree 1
#   grad_shard   always        accumulator type, grads degree
#
# Buffers are taken and dropped by the training thread alone, and dropped only after it waited for
# the last job that uses them.

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor, nn

from paro.collectives.interface import Collectives
from paro.collectives.wire import shard_in
from paro.exposure import Exposure, Kind
from paro.groups import Run, Use
from paro.lanes import DONE, Event
from paro.sharding.buffers import ElasticBuffer, Ledger, box_views
from paro.sharding.layout import UnitLayout
from paro.strategy import Strategy
from paro.topology import Topology


class UnitState(Enum):
    """What of a unit's parameters this rank holds."""

    SHARDED = "param_shard"
    GATHERING = "param_shard and param_U, which is being filled"
    WHOLE = "param_shard and param_U"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """The runs of axes that a strategy moves states along (design: levels and moves)."""

    gather: Run  # params: from their degree to 1, before every use
    reduce: Run  # grads: from 1 to their degree, every micro-batch
    finish: Run  # grads: on to the optimizer's degree, once a step
    replicas: Run  # what is left: ranks with the same optimizer range, summed once a step
    publish: Run  # params: from the optimizer's degree to theirs, once a step

    def runs(self) -> dict[Use, frozenset[Run]]:
        """The runs that need process groups."""
        return {
            Use.GATHER: frozenset({self.gather, self.publish}),
            Use.REDUCE: frozenset({self.reduce, self.finish, self.replicas}),
        }


def moves_of(strategy: Strategy, topology: Topology) -> Moves:
    """The moves of a strategy; a run is empty where its two degrees are equal."""
    return Moves(
        gather=topology.axes_between(1, strategy.params),
        reduce=topology.axes_between(1, strategy.grads),
        finish=topology.axes_between(strategy.grads, strategy.optim),
        replicas=topology.axes_between(strategy.optim, topology.world_size),
        publish=topology.axes_between(strategy.params, strategy.optim),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingContext:
    """What all units of a model share."""

    topology: Topology
    rank: int
    strategy: Strategy
    moves: Moves
    collectives: Collectives
    device: torch.device
    compute_type: torch.dtype
    wire_type: torch.dtype
    accumulate_type: torch.dtype
    ledger: Ledger
    exposure: Exposure = field(default_factory=Exposure)


class ShardedUnit:
    """The flat buffers of a unit's trainable, or of its frozen, parameters.

    The parameters given to `bind` are views of `param_U` for ever; they may be read between `use`
    and `release`. Gradients are handed in by `receive`; when all have arrived `reduce` queues
    their way to this rank's shard, and `wait_reduced` ends it. After an exception the unit is
    unusable.
    """

    def __init__(
        self, name: str, layout: UnitLayout, context: ShardingContext, *, trainable: bool
    ) -> None:
        self.name = name
        self.layout = layout
        self.context = context
        self.trainable = trainable
        self._gather_run = context.moves.gather
        self._published: Event = DONE
        self._gathered: Event = DONE
        self._reduced: Event = DONE
        self._grad_U_read: Event = DONE
        strategy, numel = context.strategy, layout.numel
        device = context.device
        self.param_shard = torch.zeros(
            numel // strategy.params, dtype=context.compute_type, device=device
        )
        self._param_U: ElasticBuffer | None = None
        if strategy.params > 1:
            self._param_U = ElasticBuffer(
                layout, dtype=context.compute_type, tally=context.ledger.whole_params, device=device
            )
        self.state = UnitState.SHARDED if self._param_U else UnitState.WHOLE
        self.grad_shard = torch.zeros(
            numel // strategy.grads if trainable else 0,
            dtype=context.accumulate_type,
            device=device,
        )
        self._grad_U: ElasticBuffer | None = None
        if strategy.grads > 1 and trainable:
            self._grad_U = ElasticBuffer(
                layout, dtype=context.wire_type, tally=context.ledger.whole_grads, device=device
            )
        self._fresh = True  # the next gradient starts a step: it replaces what is accumulated
        self._grad_boxes = self._boxes(self.grad_shard, self._grad_U) if trainable else {}
        self.num_arrived = 0

    # Binding #

    def bind(self, parameters: dict[str, nn.Parameter]) -> None:
        """Makes each parameter a view of the whole buffer, now and whenever it is gathered."""
        for name, box in self._boxes(self.param_shard, self._param_U).items():
            # Not nn.Parameter(box): that would share the buffer's version counter, and autograd
            # would take a later gather for a change of what it saved.
            parameters[name].data = box

    def _boxes(self, shard: Tensor, buffer_U: ElasticBuffer | None) -> dict[str, Tensor]:
        return box_views(shard, self.layout) if buffer_U is None else buffer_U.boxes

    # Ranges #

    @property
    def param_start(self) -> int:
        """The element of the unit that `param_shard` begins with."""
        return self._start_at(self.context.strategy.params)

    @property
    def grad_start(self) -> int:
        """The element of the unit that `grad_shard` begins with."""
        return self._start_at(self.context.strategy.grads)

    @property
    def optim_start(self) -> int:
        """The element of the unit that the optimizer's range begins with."""
        return self._start_at(self.context.strategy.optim)

    def _start_at(self, degree: int) -> int:
        context = self.context
        return context.topology.shard_start(context.rank, degree, self.layout.numel)

    @property
    def optim_param(self) -> Tensor:
        """The optimizer's range inside `param_shard`."""
        return shard_in(self.param_shard, self.context.moves.publish, self.context.rank)

    @property
    def optim_grad(self) -> Tensor:
        """The optimizer's range inside `grad_shard`."""
        return shard_in(self.grad_shard, self.context.moves.finish, self.context.rank)

    # Parameters #

    @property
    def held(self) -> bool:
        """Whether a whole copy is alive that `release` would give up."""
        return self._param_U is not None and self.state is not UnitState.SHARDED

    def gather(self) -> None:
        """Queues the gather of the whole parameters, behind their publishing."""
        if self._param_U is None:
            return
        assert self.state is UnitState.SHARDED, f"gather of {self.name}, which is {self.state}"
        self._param_U.take()
        with self.context.exposure.submitting(Kind.GATHER):
            self._gathered = self.context.collectives.all_gather(
                self._param_U.values,
                self._gather_run,
                shard=self.param_shard,
                after=self._published,
            )
        self.state = UnitState.GATHERING

    def use(self) -> None:
        """Waits until the parameters may be read."""
        if self._param_U is None:
            self.wait_published()
            return
        assert self.state is not UnitState.SHARDED, f"use of {self.name} without a gather"
        if self.state is UnitState.GATHERING:
            self.context.exposure.wait(Kind.PUBLISH, self._published)
            self.context.exposure.wait(Kind.GATHER, self._gathered)
            self._published = self._gathered = DONE
            self.state = UnitState.WHOLE

    def release(self) -> None:
        """Gives the whole parameters up."""
        if self._param_U is None:
            return
        self.use()  # a gather that nobody used still fills the buffer
        self._param_U.drop()
        self.state = UnitState.SHARDED

    def publish(self) -> None:
        """Queues the spreading of the optimizer's range of `param_shard` to the whole of it."""
        with self.context.exposure.submitting(Kind.PUBLISH):
            self._published = self.context.collectives.all_gather(
                self.param_shard, self.context.moves.publish
            )

    def wait_published(self) -> None:
        self.context.exposure.wait(Kind.PUBLISH, self._published)
        self._published = DONE

    # Gradients #

    @property
    def begins_whole_grad(self) -> bool:
        """Whether the next gradient is the first of a micro-batch that needs a whole buffer."""
        return self._grad_U is not None and self.num_arrived == 0

    def take_whole_grad(self) -> None:
        assert self._grad_U is not None
        self._grad_U.take()
        for begin, end in self.layout.gaps():
            self._grad_U.values[begin:end].zero_()

    def receive(self, name: str, gradient: Tensor) -> bool:
        """Takes one parameter's gradient; True when it was the last of this backward."""
        box = self._grad_boxes[name]
        if self._grad_U is not None or self._fresh:
            box.copy_(gradient)
        else:
            box.add_(gradient)
        self.num_arrived += 1
        return self.num_arrived == len(self._grad_boxes)

    def reduce(self, *, last: bool) -> None:
        """Queues the reduction of this micro-batch; of the whole step where it is the last."""
        with self.context.exposure.submitting(Kind.REDUCE):
            self._reduced = self._queue_reduction(last=last)
        self._fresh = last
        self.num_arrived = 0

    def _queue_reduction(self, *, last: bool) -> Event:
        context, moves = self.context, self.context.moves
        collectives, travel = context.collectives, context.wire_type
        event: Event = DONE
        if self._grad_U is not None:
            grad_U, grad_shard, fresh = self._grad_U.values, self.grad_shard, self._fresh
            event = collectives.reduce_scatter(grad_U, moves.reduce, travel)

            def accumulate() -> None:
                own = shard_in(grad_U, moves.reduce, context.rank)
                if fresh:
                    grad_shard.copy_(own)
                else:
                    grad_shard.add_(own)

            event = self._grad_U_read = collectives.follow(moves.reduce, accumulate, after=event)
        if last:
            event = collectives.reduce_scatter(self.grad_shard, moves.finish, travel, after=event)
            event = collectives.all_reduce(self.optim_grad, moves.replicas, travel, after=event)
        return event

    def drop_whole_grad(self) -> None:
        """Gives the whole gradient buffer up once it has been read."""
        assert self._grad_U is not None
        self.context.exposure.wait(Kind.REDUCE, self._grad_U_read)
        self._grad_U.drop()

    def wait_reduced(self) -> None:
        self.context.exposure.wait(Kind.REDUCE, self._reduced)
        self._reduced = DONE
