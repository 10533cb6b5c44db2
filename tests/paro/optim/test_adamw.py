"""AdamW on flat ranges: torch's class and apex's as the references."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from paro.errors import UserError
from paro.optim import adamw
from paro.optim.adamw import IMPLEMENTATIONS, AdamW

STEPS = ((0.01, 0.1), (0.02, 0.0), (0.005, 0.3))  # learning rate, weight decay
BETAS, EPS = (0.8, 0.95), 1e-6


class FusedAdam(torch.optim.Optimizer):
    """As apex's: moments that exist are used, steps are counted in the param group."""

    def __init__(self, params: Any, **options: Any) -> None:
        assert options.pop("adam_w_mode")
        super().__init__(params, options)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                state = self.state[param]
                step = torch.tensor(float(group["step"] - 1))
                own = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
                inner = torch.optim.AdamW([param], **own, fused=True)
                inner.state[param] = {"step": step, **state}
                inner.step()


@pytest.fixture(params=sorted(IMPLEMENTATIONS))
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    optimizers = ModuleType("apex.optimizers")
    vars(optimizers)["FusedAdam"] = FusedAdam
    for module in (ModuleType("amp_C"), ModuleType("apex"), optimizers):
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return str(request.param)


def gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(37, generator=generator) for _ in STEPS]


def expected(param: Tensor) -> Tensor:
    param = param.clone()
    optimizer = torch.optim.AdamW([param], betas=BETAS, eps=EPS, fused=True)
    for grad, (lr, weight_decay) in zip(gradients(), STEPS, strict=True):
        param.grad = grad
        optimizer.param_groups[0].update(lr=lr, weight_decay=weight_decay)
        optimizer.step()
    return param


def make(implementation: str, *tensors: Tensor) -> AdamW:
    return IMPLEMENTATIONS[implementation](*tensors, betas=BETAS, eps=EPS)


def test_an_update_has_the_bits_of_the_class(implementation: str) -> None:
    param = torch.linspace(-1, 1, 37)
    wanted = expected(param)
    ours = make(implementation, param, torch.zeros(37), torch.zeros(37))
    for grad, (lr, weight_decay) in zip(gradients(), STEPS, strict=True):
        ours.step(grad, lr=lr, weight_decay=weight_decay)
    assert torch.equal(param, wanted)


def test_it_continues_from_moments_and_their_number_of_steps(implementation: str) -> None:
    param = torch.linspace(-1, 1, 37)
    wanted = expected(param)
    moments = torch.zeros(37), torch.zeros(37)
    for index, (grad, (lr, weight_decay)) in enumerate(zip(gradients(), STEPS, strict=True)):
        ours = make(implementation, param, *moments)
        ours.set_num_steps(index)
        ours.step(grad, lr=lr, weight_decay=weight_decay)
    assert torch.equal(param, wanted)


def test_without_apex_its_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^--adam-implementation apex needs NVIDIA's apex"):
        adamw.find_apex()
