"""AdamW on flat fp32 ranges: torch's fused AdamW, or optionally NVIDIA apex's FusedAdam."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from paro.errors import UserError


def make_adamw(
    groups: list[dict[str, Any]],
    *,
    betas: tuple[float, float],
    eps: float,
    implementation: str,
) -> torch.optim.Optimizer:
    """An AdamW over param groups of fp32 tensors; each group has its own `weight_decay`.

    Call `attach_moments` to set the tensors that hold the moments.
    """
    if implementation == "apex":
        fused_adam = find_apex()
        return fused_adam(groups, lr=0.0, betas=betas, eps=eps, adam_w_mode=True)
    planned = any(param.is_meta for group in groups for param in group["params"])  # never stepped
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=not planned)


def attach_moments(
    optimizer: torch.optim.Optimizer, param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor
) -> None:
    """Makes the optimizer store the moments of `param` in the given tensors, from step 0."""
    step = torch.zeros((), dtype=torch.float32, device=param.device)
    optimizer.state[param] = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def set_num_steps(optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """Sets the number of updates in the moments, for bias correction."""
    for state in optimizer.state.values():
        state["step"].fill_(num_steps)
    for group in optimizer.param_groups:
        if "step" in group or not isinstance(optimizer, torch.optim.AdamW):
            group["step"] = num_steps  # apex counts steps per group


def find_apex() -> Any:
    """NVIDIA's FusedAdam, or `UserError`; PyPI's `apex` is another package without `amp_C`."""
    if importlib.util.find_spec("amp_C") is None or importlib.util.find_spec("apex") is None:
        raise UserError(
            "--adam-implementation apex needs NVIDIA's apex with its CUDA extensions "
            "(https://github.com/NVIDIA/apex); leave the flag away for torch's fused AdamW"
        )
    from apex.optimizers import FusedAdam

    return FusedAdam
