"""The training job of all contenders, their interface, and their initial weights."""

# Every contender trains this project's own model with its own loss, with AdamW of the same
# hyperparameters, no weight decay on norms, clipped to the same norm, from the same weights on the
# same tokens. In bf16 the initial weights are representable in bf16, because some peers make their
# fp32 master weights from bf16 ones: so all master weights start equal too.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from data.loader import Batch
from model.config import LlamaConfig
from model.initialization import initial_values, parameter_initializers
from model.llama import Llama
from model.units import unit_specs
from paro.config.run import RunConfig
from paro.sharding.buffers import TORCH_TYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One training job, the same for all contenders but for how their ranks share it."""

    run: RunConfig  # as pretrain_llama.py would train it, with a contender's own flags
    group_size: int
    warmup_steps: int
    steps: int
    is_alone: ClassVar[bool] = False  # one rank without the others, as in one_rank.py

    @property
    def model(self) -> LlamaConfig:
        return self.run.model

    @property
    def num_micro_batches(self) -> int:
        return self.run.batches.num_micro_batches_at(0)

    @property
    def compute_dtype(self) -> torch.dtype:
        return TORCH_TYPES[self.run.precision.compute]

    @property
    def largest_unit(self) -> int:
        """Elements of the largest of embedding, block and head."""
        units = unit_specs(self.model)
        return max(sum(map(math.prod, unit.shapes.values())) for unit in units)

    def first_weights(self, name: str, begin: int, end: int) -> Tensor:
        """Return initial fp32 values of the elements [begin, end) of a flattened parameter."""
        spec = parameter_initializers(self.model)[name]
        values = initial_values(spec, self.run.train.seed, begin, end)
        return values.to(self.compute_dtype).float()


@dataclass(frozen=True, slots=True)
class Outcome:
    """A contender's results of one optimizer step; on a GPU both may still be in flight."""

    loss: float | Tensor  # mean over the micro-batches of this rank, or of all
    grad_norm: float | Tensor  # of all ranks, before clipping
    waited: Mapping[str, float] | None = None  # seconds by cause; None if not reported


class Contender(Protocol):
    """One way to train in parallel, built and ready on all ranks."""

    def step(self, batches: Iterator[Batch], observe: Callable[[], None]) -> Outcome:
        """Run one optimizer step; calls `observe` after each accumulation of gradients."""

    def held(self) -> Iterable[Tensor]:
        """Return the model state that this rank holds now, whose bytes `state_bytes` counts."""

    def finish(self) -> None:
        """Wait for work that a step leaves to the next one, before the process ends."""
        return  # most leave none


def state_bytes(tensors: Iterable[Tensor]) -> int:
    """Return bytes of the distinct storages of the tensors; views count their whole storage.

    The rule for all contenders: count parameters, gradients that outlive a micro-batch, master
    parameters and optimizer state, each as its own tensor or as a view. Do not count gathered
    copies, buckets used only for communicating gradients, and scalars such as step counts.
    """
    storages = {
        (tensor.device, storage.data_ptr()): storage.nbytes()
        for tensor in tensors
        if tensor.dim() > 0
        for storage in [tensor.untyped_storage()]
        if storage.nbytes() > 0
    }
    return sum(storages.values())


def empty_model(task: Task) -> Llama:
    """Return the model on the meta device, frozen where the job does not train it."""
    with torch.device("meta"):
        model = Llama(task.model)
    model.freeze(task.run.trained.__contains__)
    return model


def whole_model(task: Task, device: torch.device) -> Llama:
    """Return the model in the compute type with its initial weights, whole on this rank."""
    model = empty_model(task)
    model.to(task.compute_dtype).to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = task.first_weights(name, 0, parameter.numel())
            parameter.copy_(values.view(parameter.shape))
    return model


def decay_groups(task: Task, parameters: Iterable[nn.Parameter]) -> list[dict[str, object]]:
    """Return AdamW's parameter groups: norms, the only vectors, have no weight decay."""
    everything = list(parameters)
    groups: list[dict[str, object]] = []
    for decays in (True, False):
        params = [p for p in everything if (p.dim() > 1) == decays]
        if params:
            decay = task.run.schedule.start_weight_decay if decays else 0.0
            groups.append({"params": params, "weight_decay": decay})
    return groups


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def adamw_settings(task: Task) -> dict[str, Any]:
    """Return the arguments of every AdamW, whichever library provides it."""
    optim = task.run.optim
    betas = (optim.adam_beta1, optim.adam_beta2)
    return {"lr": task.run.schedule.lr, "betas": betas, "eps": optim.adam_eps}


def fused_adamw(task: Task, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """Make PyTorch's AdamW for parameters that are their own master weights."""
    groups = decay_groups(task, parameters)
    return torch.optim.AdamW(groups, fused=True, **adamw_settings(task))


def accumulate(
    task: Task,
    model: nn.Module,
    batches: Iterator[Batch],
    observe: Callable[[], None],
    around: Callable[[bool], AbstractContextManager[object]],
) -> Tensor:
    """Add up the gradients of a step, each micro-batch inside `around(is_last)`; the mean loss.

    Ranks that share a sample have shares of one mean, and means of ranks are averaged.
    """
    sharing, losses = task.run.context.context_parallel_size, []
    for number in range(1, task.num_micro_batches + 1):
        batch = next(batches)
        weights_BS = batch.loss_mask_BS * (sharing / (batch.mask_sum * task.num_micro_batches))
        with around(number == task.num_micro_batches):
            loss = model(batch.tokens_BS, batch.labels_BS, weights_BS, **batch.documents())
            loss.backward()
        losses.append(loss.detach())
        observe()
    return torch.stack(losses).sum()
