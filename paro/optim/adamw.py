"""AdamW on flat fp32 ranges: torch's fused kernel, or optionally NVIDIA apex's FusedAdam."""

from __future__ import annotations

import importlib.util
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from paro.errors import UserError


class AdamW(Protocol):
    """Updates one range of parameters, whose weights all decay or none; on one device, fp32."""

    def step(self, grad: Tensor, *, lr: float, weight_decay: float) -> None:
        """Updates the parameters and their moments in place."""

    def set_num_steps(self, num_steps: int) -> None:
        """Sets the number of updates in the moments, for bias correction; it starts at 0."""


class TorchAdamW:
    """`torch.optim.AdamW(fused=True)`, without its class, whose first use imports torch.compile.

    That import would take over a second of every rank's start.
    """

    def __init__(
        self,
        param: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        *,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self._state = ([param], [exp_avg], [exp_avg_sq])
        self._num_steps = torch.zeros((), dtype=torch.float32, device=param.device)
        self._betas = betas
        self._eps = eps

    def step(self, grad: Tensor, *, lr: float, weight_decay: float) -> None:
        params, exp_avgs, exp_avg_sqs = self._state
        beta1, beta2 = self._betas
        adamw(
            params,
            [grad],
            exp_avgs,
            exp_avg_sqs,
            max_exp_avg_sqs=[],
            state_steps=[self._num_steps],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=self._eps,
            maximize=False,
        )

    def set_num_steps(self, num_steps: int) -> None:
        self._num_steps.fill_(num_steps)


class ApexAdamW:
    """NVIDIA's `FusedAdam`, which counts the steps in its param group."""

    def __init__(
        self,
        param: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        *,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self._param = param
        self._fused_adam = find_apex()([param], lr=0.0, betas=betas, eps=eps, adam_w_mode=True)
        self._fused_adam.state[param] = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

    def step(self, grad: Tensor, *, lr: float, weight_decay: float) -> None:
        (group,) = self._fused_adam.param_groups
        group.update(lr=lr, weight_decay=weight_decay)
        self._param.grad = grad
        self._fused_adam.step()
        self._param.grad = None

    def set_num_steps(self, num_steps: int) -> None:
        (group,) = self._fused_adam.param_groups
        group["step"] = num_steps


IMPLEMENTATIONS: dict[str, type[TorchAdamW] | type[ApexAdamW]] = {
    "torch": TorchAdamW,
    "apex": ApexAdamW,
}


def find_apex() -> Any:
    """NVIDIA's FusedAdam, or `UserError`; PyPI's `apex` is another package without `amp_C`."""
    if importlib.util.find_spec("amp_C") is None or importlib.util.find_spec("apex") is None:
        raise UserError(
            "--adam-implementation apex needs NVIDIA's apex with its CUDA extensions "
            "(https://github.com/NVIDIA/apex); leave the flag away for torch's fused AdamW"
        )
    from apex.optimizers import FusedAdam

    return FusedAdam
