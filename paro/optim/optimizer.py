"""The sharded optimizer: gradient norm, clipping, AdamW, all-gather of updated parameters."""

# [Note: gradient scaling]
# Collectives only sum. The training loop puts every factor into the weights of the loss, before
# backward, so that sums stay in the range of fp16 at every stage:
#
#     weight of a token's loss   loss_scale / (ranks x micro-batches x tokens of the micro-batch)
#     accumulated gradient       loss_scale x gradient
#     `step` multiplies by       unscale x clipping factor: once, only in the optimizer's range

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from paro.distributed.control import Control
from paro.distributed.timers import profile_range
from paro.optim.adamw import AdamW, AdamWUpdate, StepUpdate, choose_adamw
from paro.optim.finite import square_sum
from paro.optim.muon import MuonRange, MuonStep, choose_muon_kernels
from paro.optim.offload import Offload
from paro.optim.outer import OuterOptimizer
from paro.optim.rounding import Rounding
from paro.sharding.buffers import TORCH_TYPES, swap
from paro.sharding.distributed_model import DistributedModel
from paro.sharding.shards import Initializer, UnitShards
from paro.spec.muon_rounds import muon_chunks, muon_rounds
from paro.spec.optim_config import OptimConfig
from paro.spec.param_groups import BY_SHAPE, GroupFactors, ParamGroups
from paro.spec.run_spec import RunSpec
from paro.spec.states import EMA, MOMENTS, MOMENTUM, PARAM, SENT, FlatShard, adamw_states


class UnitOptimizer:
    """The optimizer states of this rank's range of one unit, and the AdamW step on them.

    With fp32 parameters and equal params and optim degrees, the parameter shard is the master.
    States in host memory (`offload`) are on the device only during an update.
    """

    def __init__(
        self,
        unit: UnitShards,
        config: OptimConfig,
        seed: int,
        groups: ParamGroups,
        offload: Offload,
    ) -> None:
        self.unit = unit
        grad, spec = unit.optim_grad, unit.spec
        numel = grad.numel()
        self.master_is_param = spec.master_is_param
        self.muon_chunks = muon_chunks(unit.layout) if spec.muon_stop else ()
        self.states, self._updated = offload.states_of(unit)
        if self.master_is_param:
            self.states[PARAM] = self._updated[PARAM] = unit.param_shard
        self.master = self.states[PARAM]
        self.average = self.states.get(EMA)  # of the masters; None: nothing is averaged
        self.num_muon = max(0, min(numel, spec.muon_stop - unit.optim_start))
        moments = [self._updated[state.name] for state in adamw_states(spec.precision)[1:]]
        rounds, begin = spec.precision.rounds_moments, self.num_muon
        chosen = choose_adamw(config.adam_implementation, grad.device, rounds=rounds)
        master = self._updated[PARAM].detach()
        self._adamws: list[tuple[slice, GroupFactors, AdamW]] = [
            (
                part,
                factors,
                chosen.make(
                    master[part],
                    *(moment[part.start - begin : part.stop - begin] for moment in moments),
                    betas=(config.adam_beta1, config.adam_beta2),
                    eps=config.adam_eps * factors.eps,
                    rounding=rounding,
                ),
            )
            for part, factors, rounding in self._ranges(groups, seed if rounds else None)
        ]

    def _ranges(
        self, groups: ParamGroups, seed: int | None
    ) -> Iterator[tuple[slice, GroupFactors, Rounding | None]]:
        """Yield (part with an AdamW of its own, factors of its parameters, rounding of the part).

        With a `seed` moments are rounded, and every parameter is a part.
        """
        layout, start = self.unit.layout, self.unit.optim_start
        first, stop = start + self.num_muon, start + self.master.numel()
        if seed is None:
            for begin, end, factors in groups.runs(layout, first, stop):
                yield slice(begin - start, end - start), factors, None
            return
        for at in layout.chunk_ranges(first, stop):
            part = slice(at.offset - start, at.stop - start)
            yield part, groups.of(at.chunk.name, at.chunk.shape), Rounding.of(at, seed)

    def update(self, update: StepUpdate) -> None:
        """Do an AdamW step, write the parameters to all-gather, and average the masters if due.

        Muon's step on the first part of the range comes before.
        """
        unit, first = self.unit, self.num_muon
        grad, in_full = unit.optim_grad, unit.step_spec.update_format is None
        copy = unit.optim_param if in_full and not self.master_is_param else None
        master = self._updated[PARAM]
        average = self._updated.get(EMA) if update.average_weight else None
        for part, factors, adamw in self._adamws:
            adamw.step(grad[part], update.of(factors).into(part, copy, average))
        by_muon = AdamWUpdate(update.step, 0.0, 0.0, average_weight=update.average_weight)
        by_muon.into(slice(first), copy, average).write(master[:first])
        if not in_full:
            unit.quantize_update(master)

    def forget_wrong_moments(self) -> None:
        """Set the moments to 0 if any of them is infinite or NaN."""
        moments = [values for name, values in self.states.items() if name != PARAM]
        if not all(values.isfinite().all() for values in moments):
            for values in moments:
                values.zero_()

    def write_params(self) -> None:
        """Copy the master to the parameter shard, ready for the all-gather."""
        if not self.master_is_param:
            self.unit.optim_param.copy_(self.master)

    def flat_shards(self) -> Iterator[FlatShard]:
        """Yield this rank's range of each state of the unit that checkpoints have.

        Where updates are quantized, parameters differ from masters and are a state of their own.
        """
        unit, start, first = self.unit, self.unit.optim_start, self.num_muon
        shard = partial(unit.flat_shard, degree=unit.spec.strategy.optim)
        yield shard(PARAM, start, self.master)
        of_muon = self.muon_chunks
        others = tuple(placed for placed in unit.layout.chunks if placed not in of_muon)
        for name in MOMENTS if others else ():
            layout = replace(unit.layout, chunks=others)
            values = self.states[name][: self.master.numel() - first]
            yield shard(name, start + first, values, layout=layout)
        if self.average is not None:
            yield shard(EMA, start, self.average)
        if of_muon:
            layout = replace(unit.layout, chunks=of_muon)
            yield shard(MOMENTUM, start, self.states[MOMENTUM][:first], layout=layout)
        if unit.quantized_update is not None:
            # The parameters of this rank's own range, which are written before the all-gather.
            yield shard(SENT, start, unit.optim_param)
        if unit.grad_errors is not None:
            yield unit.shard_of_errors(unit.grad_errors)

    @property
    def num_bytes(self) -> int:
        """The bytes of the states in the device's memory that are no parameters."""
        param = self.unit.param_shard
        held = (each for each in self.states.values() if each.device.type == param.device.type)
        return sum(each.nbytes for each in held if each is not param)


class ParoOptimizer:
    """The optimizer of a distributed model.

    A step is `model.finish_grad_sync`, then `local_square_sum`, which the caller sums over ranks to
    decide whether to skip the step, then `step`. The model all-gathers updated parameters in the
    background; the next use of each unit waits for them.
    """

    def __init__(
        self,
        model: DistributedModel,
        run: RunSpec,
        config: OptimConfig,
        seed: int,
        groups: ParamGroups = BY_SHAPE,
    ) -> None:
        self.model = model
        self.config = config
        self.num_steps = 0
        self.num_averaged = 0  # number of times that the parameters were averaged
        self._offload = Offload(model.units, model.context)
        self._parts = {
            unit: UnitOptimizer(unit, config, seed, groups, self._offload)
            for unit in model.trainable_units
        }
        self._offload.free_slots()
        masters = {unit: part.master for unit, part in self._parts.items()}
        # The rounds of groups that train alone.
        self.outer = OuterOptimizer(model, masters, run.outer)
        # {first unit of a bucket: range of the bucket's unit that this rank updates}
        ranges = {
            number: MuonRange(member, part.master.detach(), part.states[MOMENTUM], seed)
            for number, unit in enumerate(model.units)
            if unit.spec.muon_stop and unit.spec.unit.bucket_size
            for member in unit.bucket
            if (part := self._parts[member]).master.numel()
        }
        self.muons = [
            MuonStep(
                model.context.collectives.groups,
                rounds=rounds,
                ranges=ranges,
                config=run.muon,
                param_groups=groups,
                wire=TORCH_TYPES[run.precision.matrix_wire],
                kernels=choose_muon_kernels(config.adam_implementation, model.context.device),
            )
            for rounds in muon_rounds(model.specs)
        ]

    @torch.no_grad()
    def initialize(self, initializer: Initializer, *, frozen: bool = True) -> None:
        """Initialize parameters, also `frozen` ones; a rank makes only the values it holds."""
        for unit in self.model.units:
            if not (frozen or unit.trainable):
                continue
            values = unit.initial_values(initializer)
            unit.param_shard.copy_(values)
            part = self._parts.get(unit)
            if part is not None and not part.master_is_param:
                offset = unit.optim_start - unit.param_start
                part.master.copy_(values[offset : offset + part.master.numel()])
        for outer_unit in self.outer.units:
            outer_unit.restart(outer_unit.master)

    @property
    def _counted(self) -> Sequence[UnitShards]:
        """The units whose ranges on this rank count in sums over the ranks that sum gradients."""
        context = self.model.context
        counts = context.rank % self.model.units[0].step_spec.sum_degree < context.strategy.optim
        return self.model.trainable_units if counts else ()

    def local_square_sum(self) -> Tensor:
        """Compute this rank's term of the squared norm of the scaled gradients, an fp64 scalar.

        In the sum over all ranks every element counts once: of several replicas of a range, only
        one rank's counts. The term is not finite if any gradient of the range is not finite.
        """
        grads = (unit.optim_grad for unit in self._counted)
        return square_sum(grads, self.model.context.device)

    def local_num_zeros(self) -> Tensor:
        """Count this rank's gradient elements that are zero, without padding, in fp64.

        In the sum over all ranks every element counts once.
        """
        zeros = torch.zeros((), dtype=torch.float64, device=self.model.context.device)
        for unit in self._counted:
            grad, start = unit.optim_grad, unit.optim_start
            ranges = unit.layout.chunk_ranges(start, start + grad.numel())
            zeros += sum(part.high - part.low for part in ranges) - torch.count_nonzero(grad)
        return zeros

    def local_params_square_sum(self) -> float:
        """Compute this rank's term of the squared norm of all parameters, including frozen ones.

        In the sum over the ranks that train synchronously every element counts once, as fp32 master
        if there is one.
        """
        rank, device = self.model.context.rank, self.model.context.device
        masters = (self._parts[unit].master.detach() for unit in self._counted)
        frozen = (
            unit.param_shard
            for unit in self.model.units
            if not unit.trainable and rank % unit.step_spec.sum_degree < unit.spec.strategy.params
        )
        return float(square_sum([*masters, *frozen], device))

    @torch.no_grad()
    def step(
        self,
        *,
        lr: float,
        weight_decay: float,
        grad_norm: float,
        unscale: float,
        decoupled_lr: float | None = None,
        averages: bool = False,
        held: Container[UnitShards] = (),
    ) -> None:
        """Clip, update and, if `averages`, put the updated parameters into their average.

        `grad_norm` is the global norm of gradients times `unscale`, `decoupled_lr` the rate of
        embedding and output layer, by default `lr`. `end_step` sends units that are `held`.
        """
        assert math.isfinite(grad_norm), f"a step with gradient norm {grad_norm} must be skipped"
        factor = unscale
        if self.config.clip_grad > 0.0:
            factor *= min(1.0, self.config.clip_grad / (grad_norm + 1e-6))  # Megatron's clipping
        self.num_steps += 1
        decoupled_lr = lr if decoupled_lr is None else decoupled_lr
        self.num_averaged += averages
        weight = self.config.average_weight(self.num_averaged) if averages else 0.0
        update = StepUpdate(self.num_steps, lr, decoupled_lr, weight_decay, factor, weight)
        with profile_range("update"):
            for part in self._offload.during_update(self._in_order(update)):
                part.update(update)
                if part.unit not in held:
                    self.model.updated(part.unit)

    def end_step(self, iteration: int, control: Control) -> None:
        """Begin and end the outer rounds that are due after the step that ends `iteration`.

        A group that was left out keeps finite moments: with moments of 0 AdamW's next steps are
        several times as long, so that the group would be an outlier again.
        """
        ended = [*self.outer.after_update(iteration, control)]
        for unit in () if self.outer.takes_part else ended:
            self._parts[unit].forget_wrong_moments()
        self.write_moved(ended)

    def write_moved(
        self, moved: Iterable[UnitShards], sent: Mapping[UnitShards, Tensor] | None = None
    ) -> None:
        """Write and send parameters of units whose masters moved: the masters', or those `sent`."""
        for unit in moved:
            if sent and unit in sent:
                unit.optim_param.copy_(sent[unit])
            else:
                self._parts[unit].write_params()
            self.model.updated(unit)

    @torch.no_grad()
    def exchange_averages(self) -> Iterator[UnitShards]:
        """Exchange masters and averages; yield the units whose masters have changed."""
        for unit, part in self._parts.items():
            assert part.average is not None, "nothing is averaged"
            swap(part.master, part.average)
            yield unit

    def _in_order(self, update: StepUpdate) -> Iterator[UnitOptimizer]:
        """Yield the units of each bucket, once Muon has updated this rank's matrices in it."""
        yield from (part for part in self._parts.values() if not part.muon_chunks)
        for muon in self.muons:
            for number in muon.update(update):
                yield from (self._parts[unit] for unit in self.model.units[number].bucket)

    # Saving and loading #

    def flat_shards(self, *, frozen: bool = True) -> Iterator[FlatShard]:
        """Yield this rank's shards of all checkpointed state, maybe without `frozen` parameters."""
        for part in self._parts.values():
            yield from map(self.outer.of_group, part.flat_shards())
        for outer_unit in self.outer.units:
            yield from outer_unit.flat_shards()
        for unit in self.model.units:
            if frozen and not unit.trainable:
                degree = unit.spec.strategy.params
                yield unit.flat_shard(PARAM, unit.param_start, unit.param_shard, degree=degree)

    @torch.no_grad()
    def loaded(self, *, num_steps: int = 0, num_averaged: int = 0) -> None:
        """Set the counts and all-gather parameters, after loading into `flat_shards`."""
        self.num_steps = num_steps
        self.num_averaged = 0 if self.config.ema_decay is None else num_averaged
        for unit, part in self._parts.items():
            if unit.quantized_update is None:  # else loaded as they were sent
                part.write_params()
            self.model.updated(unit)
        self.model.wait_for_updated_params()

    # Memory #

    def model_state_bytes(self) -> int:
        """Count bytes of this rank's parameters, gradients and optimizer states."""
        return sum(self.state_bytes().values())

    def state_bytes(self) -> dict[str, int]:
        """Count bytes of this rank's states by kind: parameters, gradients and optimizer."""
        units = self.model.units
        return {
            "parameters": sum(unit.param_shard.nbytes for unit in units),
            "gradients": sum(unit.grad_shard.nbytes for unit in units),
            "optimizer": sum(part.num_bytes for part in self._parts.values())
            + sum(outer_unit.num_bytes for outer_unit in self.outer.units),
        }
