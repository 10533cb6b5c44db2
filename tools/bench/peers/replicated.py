"""PyTorch's DistributedDataParallel, alone and with ZeroRedundancyOptimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from data.loader import Batch
from paro.distributed.control import Control
from tools.bench.peers.task import (
    Contender,
    Outcome,
    Task,
    accumulate,
    adamw_settings,
    decay_groups,
    trained_parameters,
    whole_model,
)

DEFAULT_BUCKET_MB = 25.0
MASTERS_AT_ONCE = 16  # how many parameters have fp32 gradients at the same time


class MasterAdamW(torch.optim.Optimizer):
    """AdamW over fp32 master weights of parameters of any type, as mixed precision needs.

    A parameter in fp32 is its own master.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, settings)
        self.masters: list[list[tuple[Tensor, Tensor]]] = []
        self.adamws: list[torch.optim.AdamW] = []
        for group in self.param_groups:
            for begin in range(0, len(group["params"]), MASTERS_AT_ONCE):
                part = group["params"][begin : begin + MASTERS_AT_ONCE]
                pairs = [(p, p if p.dtype == torch.float32 else p.detach().float()) for p in part]
                own = {name: group[name] for name in settings}
                adamw = torch.optim.AdamW([master for _, master in pairs], fused=True, **own)
                self.masters.append(pairs)
                self.adamws.append(adamw)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None, "the gradients are there already"
        for pairs, adamw in zip(self.masters, self.adamws, strict=True):
            for parameter, master in pairs:
                if master is not parameter and parameter.grad is not None:
                    master.grad = parameter.grad.float()
            adamw.step()
            for parameter, master in pairs:
                if master is not parameter:
                    master.grad = None
                    parameter.copy_(master)

    def held(self) -> Iterator[Tensor]:
        for pairs, adamw in zip(self.masters, self.adamws, strict=True):
            yield from (master for _, master in pairs)
            for state in adamw.state.values():
                yield from state.values()


class Replicated(Contender):
    """Whole parameters and gradients on every rank; optimizer state whole too, or by parameter.

    Gradients are views of the buckets and are all-reduced with the last micro-batch only. A bucket
    is no larger than a unit, so that a small model has several and their communication overlaps
    backward: this is as fast as larger and smaller buckets, or faster.
    """

    def __init__(self, task: Task, control: Control, *, zero_redundancy: bool) -> None:
        self.task, device = task, control.device
        model = whole_model(task, device)
        unit_mb = task.largest_unit * task.compute_dtype.itemsize / 2**20
        self.ddp = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            bucket_cap_mb=min(DEFAULT_BUCKET_MB, unit_mb),
        )
        self.parameters = trained_parameters(model)
        groups = decay_groups(task, self.parameters)
        settings = {**adamw_settings(task), "weight_decay": 0.0}
        if zero_redundancy:
            # Here, because torch compiles its functional optimizers meanwhile.
            from torch.distributed.optim import ZeroRedundancyOptimizer

            optimizer = ZeroRedundancyOptimizer(
                groups, MasterAdamW, parameters_as_bucket_view=True, **settings
            )
            self.optimizer: torch.optim.Optimizer = optimizer
            self.local: MasterAdamW = optimizer.optim
        else:
            self.optimizer = self.local = MasterAdamW(groups, **settings)

    def step(self, batches: Iterator[Batch], observe: Callable[[], None]) -> Outcome:
        loss = accumulate(
            *(self.task, self.ddp, batches, observe),
            lambda last: nullcontext() if last else self.ddp.no_sync(),
        )
        norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in self.parameters]
        grad_norm = torch.linalg.vector_norm(torch.stack(norms))
        torch.nn.utils.clip_grads_with_norm_(
            self.parameters, self.task.run.optim.clip_grad, grad_norm
        )
        self.optimizer.step()
        self.ddp.zero_grad(set_to_none=False)  # gradients stay views of the buckets
        return Outcome(loss, grad_norm)

    def held(self) -> Iterable[Tensor]:
        yield from self.ddp.module.parameters()
        yield from (p.grad for p in self.parameters if p.grad is not None)
        yield from self.local.held()
