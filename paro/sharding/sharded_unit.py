"""All-gathers a unit's parameters, releases them after use, and reduce-scatters gradients."""

# [Note: buffer lifetime]
# A `ShardedUnit` is FSDP2's FSDPParamGroup; hooks of `DistributedModel` call its methods. Buffers
# `_U` are unsharded; the optimizer's ranges are views of this rank's `param_shard`, `grad_shard`.
#
#   buffer       allocated                  dtype          size (1: unsharded)
#   param_shard  always                     compute*       1 / params degree
#   param_U      gather..release            compute*       1; at params degree 1: param_shard
#   grad_U       first gradient..reduced    communication  1; at grads degree 1: no buffer
#   grad_shard   always                     accumulation   1 / grads degree
#
# * frozen parameters: --lora-base-dtype. Only the training thread allocates and frees buffers; it
# frees a buffer only after waiting for the last job that uses the buffer.

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from model.fp8 import Fp8WeightCache
from model.matmul import store_grad
from paro.distributed.comm_stream import DONE, Event
from paro.distributed.timers import profile_range
from paro.layout import in_buckets
from paro.sharding.buffers import TORCH_TYPES, ElasticBuffer, param_views
from paro.sharding.shards import ShardingContext, UnitShards
from paro.spec.sharding_spec import Collective, ShardingSpec
from paro.step.actions import ActionKind
from paro.topology import WaitKind


class ShardedUnit(UnitShards):
    """The flat buffers of either the trainable or the frozen parameters of a unit.

    `bind` makes parameters views of `param_U`, to be read between `wait` and `release`. Backward
    writes gradients into `grad_view`; `reduce` then queues their reduction into `grad_shard`. After
    the last micro-batch `grad_sync` queues the reduction over all ranks, and `wait_reduced` waits
    for it. After an exception a unit is unusable.
    """

    def __init__(self, spec: ShardingSpec, context: ShardingContext) -> None:
        super().__init__(spec, context)
        self._gathered: Event = DONE
        self._grad_U_read: Event = DONE
        counters, resize = context.counters, context.collectives.groups.registered.resize
        self._param_U: ElasticBuffer | None = None
        for gather in spec.collectives[ActionKind.GATHER]:
            of_kind = partial(resize, trains=spec.buffer.trains)
            self._param_U = self._whole(gather, tally=counters.whole_params, resize=of_kind)
        self._grad_U: ElasticBuffer | None = None
        for reduction in spec.collectives.get(ActionKind.REDUCE, ()):
            self._grad_U = self._whole(reduction, tally=counters.whole_grads)
        self._fp8_caches = [Fp8WeightCache() for _ in spec.layout.chunks]
        self._grad_views: dict[str, Tensor] = {}

    def _whole(self, collective: Collective, **settings: Any) -> ElasticBuffer:
        """Return the unsharded buffer that a collective fills or reads."""
        dtype, device = TORCH_TYPES[collective.dtype], self.context.device
        return ElasticBuffer(
            collective.numel, layout=self.layout, dtype=dtype, device=device, **settings
        )

    # Binding #

    def bind(self, parameters: dict[str, nn.Parameter]) -> None:
        """Make each parameter and gradient a permanent view, and give it an `Fp8WeightCache`."""
        views = self._views(self.param_shard, self._param_U)
        for (name, view), cache in zip(views.items(), self._fp8_caches, strict=True):
            parameters[name].fp8_cache = cache  # type: ignore[attr-defined]
            # Not nn.Parameter(view): that shares the buffer's version counter, so autograd would
            # treat a later gather as an in-place change of a saved tensor.
            parameters[name].data = view
        if self.trainable:
            self._grad_views = self._views(self.grad_shard, self._grad_U)

    def _views(self, shard: Tensor, buffer_U: ElasticBuffer | None) -> dict[str, Tensor]:
        return param_views(shard, self.layout) if buffer_U is None else buffer_U.views

    # Parameters #

    def gather(self) -> None:
        """Queue the all-gather of unsharded parameters, after the step's all-gather of updates."""
        assert self._param_U is not None, f"{self.name} is whole"
        exposed_timer = self.context.exposed_timer
        with profile_range(f"gather:{self.name}"), exposed_timer.submitting(WaitKind.GATHER):
            self._param_U.alloc()
            _, self._gathered = self.queue(
                self.spec.collectives[ActionKind.GATHER],
                self._param_U.values,
                shard=self.param_shard,
                after=self._updated,
            )

    def wait(self) -> None:
        """Wait until the parameters may be read."""
        assert self._param_U is None or self._param_U.alive, f"{self.name} is not gathered"
        self.wait_for_updated_params()
        self.context.exposed_timer.wait(WaitKind.GATHER, self._gathered)
        self._gathered = DONE

    def cache_fp8(self) -> None:
        """Cache fp8 casts of weights from now on, for forward and backward."""
        for cache in self._fp8_caches:
            cache.is_on = True

    def drop_fp8(self) -> None:
        """Free the cached fp8 casts, because the values of the parameters may change."""
        for cache in self._fp8_caches:
            cache.is_on, cache.cast = False, None

    def release(self) -> None:
        """Free the unsharded parameters."""
        assert self._param_U is not None, f"{self.name} stays whole"
        self.wait()  # an unused gather may still be writing the buffer
        self.drop_fp8()
        self._param_U.free()

    # Gradients #

    def allocate(self) -> None:
        assert self._grad_U is not None
        self._grad_U.alloc()
        for begin, end in self.layout.gaps():
            self._grad_U.values[begin:end].zero_()

    def grad_view(self, name: str) -> tuple[Tensor, bool]:
        """Return (the view for a parameter's gradient, whether to add to the view's values)."""
        return self._grad_views[name], self._grad_U is None and not self._fresh

    def reduce(self) -> None:
        """Queue the reduction of this micro-batch's gradients and the addition to `grad_shard`."""
        with profile_range(f"reduce:{self.name}"):
            if self._grad_U is not None:
                sent = self.spec.collectives[ActionKind.REDUCE]
                run_after = self.context.collectives.run_after
                with self.context.exposed_timer.submitting(WaitKind.REDUCE):
                    shard, event = self.queue(sent, self._grad_U.values)
                    accumulate = partial(store_grad, shard, self.grad_shard, adds=not self._fresh)
                    self._grad_U_read = run_after(sent[-1].span, accumulate, after=event)
                    self._reduced = self._grad_U_read
            self._fresh = False

    def free(self) -> None:
        """Free the unsharded gradients after waiting for their reduction."""
        assert self._grad_U is not None
        self.context.exposed_timer.wait(WaitKind.REDUCE, self._grad_U_read)
        self._grad_U.free()


def make_sharded_units(
    model: nn.Module, specs: Sequence[ShardingSpec], context: ShardingContext
) -> list[ShardedUnit]:
    """Build the sharded units of a model on the meta device, and bind the model's parameters.

    Parameters keep their names and `requires_grad`; only the shards are allocated.
    """
    bound = bind_empty(model, specs, context)
    sharded = [ShardedUnit(spec, context) for spec in specs]
    trained = ((unit.spec.unit.bucket_size, unit) for unit in sharded if unit.trainable)
    for first, *others in in_buckets(trained):
        if others:
            first.form_bucket(others)
    for unit in sharded:
        unit.bind(bound)
    return sharded


def bind_empty(
    model: nn.Module, specs: Sequence[ShardingSpec], context: ShardingContext
) -> dict[str, nn.Parameter]:
    """Replace every parameter by an empty one that units can bind; return them by name."""
    placed = [(c.chunk, spec) for spec in specs for c in spec.layout.chunks]
    described = {chunk.name: (chunk.shape, spec.buffer.trains) for chunk, spec in placed}
    built = {name: (tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()}
    assert built == described, f"not as described: {built.items() ^ described.items()}"
    bound: dict[str, nn.Parameter] = {}
    for name, spec in {chunk.name: spec for chunk, spec in placed}.items():
        empty = torch.empty(0, dtype=TORCH_TYPES[spec.param_dtype], device=context.device)
        bound[name] = nn.Parameter(empty, requires_grad=spec.buffer.trains)
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, bound[name])
    return bound
