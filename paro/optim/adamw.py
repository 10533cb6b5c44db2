"""AdamW on flat ranges: torch's fused kernel, Triton's one pass, or NVIDIA apex's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from paro.errors import UserError, describe
from paro.optim.rounding import Rounding, round_into
from paro.spec.param_groups import GroupFactors

_CHUNK = 2**16  # number of elements whose bf16 moments torch updates at a time, in fp32

TRITON_DEVICES = {"cuda"}  # device types with Triton; tests add "cpu" for Triton's interpreter


class AdamWUpdate(NamedTuple):
    """An update of a range by its gradient times `factor`; `copy` gets the cast parameters.

    `step` is the number of updates in the moments after it, for bias correction and rounding.
    `average` moves towards the parameters by `average_weight` of the difference.
    """

    step: int
    lr: float
    weight_decay: float
    factor: float = 1.0
    copy: Tensor | None = None
    average: Tensor | None = None
    average_weight: float = 0.0

    def into(self, part: slice, copy: Tensor | None, average: Tensor | None) -> AdamWUpdate:
        """Return the update of a part of a range, which has a copy and an average or lacks them."""
        copy, average = (None if whole is None else whole[part] for whole in (copy, average))
        return self._replace(copy=copy, average=average)

    def write(self, param: Tensor) -> None:
        """Write the updated parameters to `copy` and into the average."""
        if self.copy is not None:
            self.copy.copy_(param)
        if self.average is not None:
            self.average.lerp_(param, self.average_weight)


class StepUpdate(NamedTuple):
    """An update of all parameters by their gradients times `factor`."""

    step: int  # number of updates in the moments after it
    lr: float
    decoupled_lr: float  # the rate of embedding and output layer
    weight_decay: float
    factor: float
    average_weight: float = 0.0  # of the updated parameters in their average; 0: not averaged

    def of(self, factors: GroupFactors) -> AdamWUpdate:
        """Return the update of a range of parameters with these factors."""
        lr = (self.decoupled_lr if factors.is_decoupled else self.lr) * factors.lr
        decay, average_weight = self.weight_decay * factors.weight_decay, self.average_weight
        return AdamWUpdate(self.step, lr, decay, self.factor, average_weight=average_weight)


@dataclass(eq=False)
class AdamW(ABC):
    """An AdamW of one range of fp32 parameters, with one learning rate and weight decay.

    Moments in bf16 need a `rounding`: the position of the range in its parameter, and a seed.
    """

    param: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    _: KW_ONLY
    betas: tuple[float, float]
    eps: float
    rounding: Rounding | None = None

    @abstractmethod
    def step(self, grad: Tensor, update: AdamWUpdate) -> None:
        """Update the parameters and moments in place; the gradient is undefined afterwards."""


class TorchAdamW(AdamW):
    """The kernel of `torch.optim.AdamW(fused=True)`, without the class.

    The first use of the class imports torch.compile: over a second of every rank's start.
    """

    def step(self, grad: Tensor, update: AdamWUpdate) -> None:
        numel = self.param.numel()
        # Torch's kernel compares no lengths, and would write past the end.
        assert grad.numel() == self.exp_avg.numel() == self.exp_avg_sq.numel() == numel
        length = numel if self.rounding is None else _CHUNK
        for begin in range(0, numel, length):
            part = slice(begin, min(begin + length, numel))
            self._step_part(part, grad[part], update)
        update.write(self.param)

    def _step_part(self, part: slice, grad: Tensor, update: AdamWUpdate) -> None:
        beta1, beta2 = self.betas
        scale = None  # the kernel divides the gradient by the scale in the same pass
        if update.factor != 1.0:
            scale = torch.full((), 1.0 / update.factor, device=grad.device)
        kept = self.exp_avg[part], self.exp_avg_sq[part]
        moments = [moment.float() for moment in kept]
        adamw(
            [self.param[part]],
            [grad.float()],
            moments[:1],
            moments[1:],
            max_exp_avg_sqs=[],
            state_steps=[torch.full((), update.step - 1.0, device=grad.device)],
            fused=True,
            grad_scale=scale,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=update.lr,
            weight_decay=update.weight_decay,
            eps=self.eps,
            maximize=False,
        )
        if self.rounding is not None:
            bits = self.rounding.bits(part.start, part.stop, update.step, grad.device)
            for moment, values, half in zip(kept, moments, (bits, bits >> 16), strict=True):
                if values is not moment:
                    round_into(values, half, moment)


@dataclass(eq=False)
class ApexAdamW(AdamW):
    """The AdamW of NVIDIA apex, `FusedAdam`, which adds a step to the number in a param group."""

    def __post_init__(self) -> None:
        from apex.optimizers import FusedAdam

        self._fused_adam = FusedAdam(
            [self.param], lr=0.0, betas=self.betas, eps=self.eps, adam_w_mode=True
        )
        moments = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        self._fused_adam.state[self.param] = moments

    def step(self, grad: Tensor, update: AdamWUpdate) -> None:
        (group,) = self._fused_adam.param_groups
        group.update(step=update.step - 1, lr=update.lr, weight_decay=update.weight_decay)
        grad = grad.float()
        self.param.grad = grad if update.factor == 1.0 else grad.mul_(update.factor)
        self._fused_adam.step()
        self.param.grad = None
        update.write(self.param)


class ChosenAdamW(NamedTuple):
    """An implementation of AdamW, and a log line about the choice."""

    make: Callable[..., AdamW]
    line: str | None = None  # None: there is no choice


@cache
def choose_adamw(name: str, device: torch.device, *, rounds: bool = False) -> ChosenAdamW:
    """Return the implementation of --adam-implementation, or raise `UserError` if Triton fails.

    `auto` is Triton's on a GPU where a small update shows that it works, otherwise torch's.
    `rounds`: moments are bf16.
    """
    if name == "apex":
        return ChosenAdamW(ApexAdamW)
    only_planned = device.type == "meta"
    if name == "torch" or only_planned or (name == "auto" and device.type not in TRITON_DEVICES):
        return ChosenAdamW(TorchAdamW)
    try:
        from paro.optim.kernels import VERSION, TritonAdamW

        _compare(TritonAdamW, device, rounds)
    except Exception as error:  # any exception of Triton, the compiler or the device's driver
        reason = describe(error)
        if name == "triton":
            raise UserError(
                f"--adam-implementation triton does not work here: {reason}; leave it out"
            ) from error
        return ChosenAdamW(TorchAdamW, f"AdamW: torch's, because Triton fails: {reason}")
    return ChosenAdamW(TritonAdamW, f"AdamW: Triton {VERSION}, one pass")


def _compare(make: Callable[..., AdamW], device: torch.device, rounds: bool) -> None:
    """Raise `RuntimeError` unless two updates equal torch's up to rounding."""
    results = []
    kind = torch.bfloat16 if rounds else torch.float32
    rounding = Rounding(seed=0, name="", low=0, width=7, stride=9, start=2) if rounds else None
    for each in (TorchAdamW, make):
        param = torch.linspace(-1.0, 1.0, 99, device=device)
        copy = torch.zeros(99, dtype=torch.bfloat16, device=device)
        moments, average = torch.zeros(2, 99, dtype=kind, device=device), param.clone()
        adam = each(param, *moments, betas=(0.9, 0.95), eps=1e-8, rounding=rounding)
        for step in (1, 2):
            grad = torch.linspace(-step, 2.0, 99, device=device)
            adam.step(grad, AdamWUpdate(step, 0.1, 0.1, 0.5, copy, average, 0.3))
        results.append((param, average, copy.float()))
    errors = [float((a - b).abs().max()) for a, b in zip(*results, strict=True)]
    if not (max(errors[:2]) <= 1e-5 and errors[2] <= 2.0**-7):
        raise RuntimeError(f"updates differ by {max(errors):.2g} from torch's")
