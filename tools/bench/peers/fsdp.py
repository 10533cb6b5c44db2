"""PyTorch's FSDP2: fully_shard over all ranks, or inside groups that replicate each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from data.loader import Batch
from model.units import unit_specs
from paro.distributed.control import Control
from paro.errors import UserError
from tools.bench.peers.task import (
    Contender,
    Outcome,
    Task,
    accumulate,
    empty_model,
    fused_adamw,
    trained_parameters,
)
from tools.bench.peers.torch_ring import torch_ring


class FullySharded(Contender):
    """FSDP2 with embedding, blocks and head as units; its fp32 shards are the master parameters.

    Parameters are all-gathered in the compute type before forward and before backward, gradients
    are reduce-scattered after every micro-batch; with hybrid, they are all-reduced across groups
    only after the last one. `kept` trades memory for communication: one all-gather and one
    reduction a step. Overlap relies on CUDA streams; without them, on gloo, every collective
    blocks, unless all-gathers are asynchronous and started `ahead`. Where ranks share samples, all
    of them shard the model, as without.
    """

    def __init__(
        self,
        task: Task,
        control: Control,
        *,
        hybrid: bool = False,
        kept: bool = False,
        ahead: bool = False,
    ) -> None:
        self.task, self.hybrid, self.kept = task, hybrid, kept
        mesh = _mesh(task, control, hybrid=hybrid)
        policy = MixedPrecisionPolicy()
        if task.compute_dtype != torch.float32:
            # The inputs have the right types already: ids, fp32 token weights, activations.
            policy = MixedPrecisionPolicy(
                param_dtype=task.compute_dtype,
                reduce_dtype=task.compute_dtype,
                cast_forward_inputs=False,
            )
        self.model = empty_model(task)
        context = task.run.context
        if context.context_parallel_size > 1:
            if control.device.type != "cpu":
                raise UserError("--contenders: on GPUs no peer shares samples here")
            shape = task.run.batches.data_parallel_size, context.context_parallel_size
            ranks = init_device_mesh(control.device.type, shape, mesh_dim_names=("data", "context"))
            self.model.core = torch_ring(ranks["context"].get_group(), context.cp_comm_type)
        units = [self.model.get_submodule(unit.name) for unit in unit_specs(self.model.config)]
        for module in units:
            # The last unit's backward follows its forward at once.
            fully_shard(
                module, mesh=mesh, mp_policy=policy, reshard_after_forward=module is not units[-1]
            )
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.root = cast(FSDPModule, self.model)
        self.model.to_empty(device=control.device)
        _fill(task, self.model)
        if kept:
            self.root.set_reshard_after_forward(False)
        if ahead:
            self.root._set_unshard_async_op(True)
            sharded = [cast(FSDPModule, unit) for unit in units]
            for unit, following in itertools.pairwise(sharded):
                unit.set_modules_to_forward_prefetch([following])
        self.parameters = trained_parameters(self.model)
        self.optimizer = fused_adamw(task, self.parameters)

    def step(self, batches: Iterator[Batch], observe: Callable[[], None]) -> Outcome:
        loss = accumulate(self.task, self.model, batches, observe, self._expecting)
        clip = self.task.run.optim.clip_grad
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        grad_norm = torch.nn.utils.get_total_norm(gradients)
        assert isinstance(grad_norm, DTensor), f"the norm is a {type(grad_norm)}"
        grad_norm = grad_norm.full_tensor()
        torch.nn.utils.clip_grads_with_norm_(self.parameters, clip, grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Outcome(loss, grad_norm)

    def _expecting(self, last: bool) -> AbstractContextManager[None]:
        self.root.set_is_last_backward(last)
        if self.hybrid:
            self.root.set_requires_all_reduce(last)
        if self.kept:
            self.root.set_requires_gradient_sync(last)
            self.root.set_reshard_after_backward(last)
        return nullcontext()

    def held(self) -> Iterable[Tensor]:
        # The optimizer has the shards; the modules have the whole parameters where they are kept.
        for parameter in (*self.parameters, *self.model.parameters()):
            for tensor in (parameter, parameter.grad):
                if tensor is not None:
                    yield _local(tensor)
        for state in self.optimizer.state.values():
            yield from map(_local, state.values())


FSDP2: dict[str, Callable[[Task, Control], Contender]] = {
    "fsdp2": FullySharded,
    "fsdp2-kept": partial(FullySharded, kept=True),
    "fsdp2-ahead": partial(FullySharded, ahead=True),
    "fsdp2-hybrid": partial(FullySharded, hybrid=True),
    "fsdp2-hybrid-kept": partial(FullySharded, hybrid=True, kept=True),
    "fsdp2-hybrid-ahead": partial(FullySharded, hybrid=True, ahead=True),
}


def _mesh(task: Task, control: Control, *, hybrid: bool) -> DeviceMesh:
    world_size, kind = control.world.size, control.device.type
    if not hybrid:
        return init_device_mesh(kind, (world_size,), mesh_dim_names=("shard",))
    shape = (world_size // task.group_size, task.group_size)
    return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))


@torch.no_grad()
def _fill(task: Task, model: nn.Module) -> None:
    """Write the initial weights of every shard; the whole model is never materialized."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        local = parameter.to_local()
        # Rows are split as torch.chunk does: equal parts, the last ranks get the remainder.
        num_shards = parameter.device_mesh["shard"].size()
        rows, row = parameter.shape[0], parameter[:1].numel()
        begin = min(parameter.device_mesh["shard"].get_local_rank() * -(-rows // num_shards), rows)
        values = task.first_weights(name, begin * row, (begin + local.shape[0]) * row)
        local.copy_(values.view(local.shape))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
