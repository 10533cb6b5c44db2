"""AdamW on flat ranges by torch's class, apex's and Triton's, and the norm of gradients."""

from __future__ import annotations

import math
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from paro.optim.adamw import AdamW, TorchAdamW, Update, choose_adamw
from paro.optim.finite import ROW, square_sum
from paro.spec.optim_config import OptimConfig
from tests.helpers.refusals import refused
from tests.helpers.triton_kernels import interpreter

pytestmark = pytest.mark.bits

STEPS = ((0.01, 0.1), (0.02, 0.0), (0.005, 0.3))  # learning rate, weight decay
CPU = torch.device("cpu")
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


@pytest.fixture(params=["apex", "torch"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    optimizers = ModuleType("apex.optimizers")
    vars(optimizers)["FusedAdam"] = FusedAdam
    for module in (ModuleType("amp_C"), ModuleType("apex"), optimizers):
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    choose_adamw.cache_clear()
    return str(request.param)


def gradients(numel: int = 37) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(numel, generator=generator) for _ in STEPS]


def expected(param: Tensor) -> Tensor:
    param = param.clone()
    optimizer = torch.optim.AdamW([param], betas=BETAS, eps=EPS, fused=True)
    for grad, (lr, weight_decay) in zip(gradients(), STEPS, strict=True):
        param.grad = grad
        optimizer.param_groups[0].update(lr=lr, weight_decay=weight_decay)
        optimizer.step()
    return param


def make(implementation: str, *tensors: Tensor) -> AdamW:
    return choose_adamw(implementation, CPU).make(*tensors, betas=BETAS, eps=EPS)


@pytest.mark.parametrize("begins_anew", [False, True])
def test_updates_have_the_bits_of_the_class(implementation: str, *, begins_anew: bool) -> None:
    """Also of an object that goes on from moments and their number of steps."""
    param = torch.linspace(-1, 1, 37)
    wanted, states = expected(param), (param, torch.zeros(37), torch.zeros(37))
    ours = make(implementation, *states)
    for index, (grad, (lr, weight_decay)) in enumerate(zip(gradients(), STEPS, strict=True)):
        if begins_anew:
            ours = make(implementation, *states)
            ours.set_num_steps(index)
        ours.step(grad, Update(lr, weight_decay))
    assert torch.equal(param, wanted)


def test_without_apex_its_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    chosen = partial(OptimConfig, adam_implementation="apex")
    refused(chosen, "--adam-implementation apex needs NVIDIA's apex")


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("copies", [False, True])
def test_one_pass_is_scaling_updating_and_casting(kind: torch.dtype, copies: bool) -> None:
    """Over several blocks of a kernel, and going on from a number of steps."""
    found = []
    with interpreter():
        for name in ("torch", "triton"):
            states = [torch.linspace(-1, 1, 2500), torch.zeros(2500), torch.zeros(2500)]
            copy = torch.zeros(2500, dtype=torch.bfloat16) if copies else None
            ours = make(name, *states)
            for step, grad in enumerate(gradients(2500)):
                if step == 1:
                    ours = make(name, *states)
                    ours.set_num_steps(1)
                ours.step(grad.to(kind), Update(0.1, 0.2, factor=0.3, copy=copy))
            found.append((*states, *([] if copy is None else [copy.float()])))
    for torchs, tritons in zip(*found, strict=True):
        rounding = 2.0**-7 if copies and torchs is found[0][-1] else 1e-5
        assert torch.allclose(tritons, torchs, rtol=rounding, atol=1e-6)
    if copies:  # the interpreter casts to bf16 without rounding to nearest
        assert torch.allclose(found[1][-1], found[1][0], rtol=2.0**-7)


def test_what_runs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_adamw("auto", CPU) == (TorchAdamW, None), "a CPU has no choice but torch"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "paro.optim.kernels", None)
        told = "--adam-implementation triton does not work here"
        refused(lambda: choose_adamw("triton", CPU), told)
    with interpreter():
        found = choose_adamw("auto", CPU)
        assert found.make.__name__ == "TritonAdamW"
        assert str(found.line).startswith("AdamW: Triton 3.")
        from paro.optim import kernels

        monkeypatch.setattr(kernels, "TritonAdamW", TwiceAsFar)
        choose_adamw.cache_clear()
        found = choose_adamw("auto", CPU)
        assert found.make is TorchAdamW
        assert "because Triton fails: RuntimeError: updates differ by" in str(found.line)


class TwiceAsFar(TorchAdamW):
    """A kernel that is wrong."""

    def step(self, grad: Tensor, update: Update) -> None:
        super().step(grad, update._replace(lr=2 * update.lr))


def run_on_gpu() -> None:
    found = choose_adamw("auto", torch.device("cuda"))
    assert found.make.__name__ == "TritonAdamW", found.line


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_every_element_counts_once(kind: torch.dtype) -> None:
    sizes = (0, 1, ROW - 1, ROW, 3 * ROW + 5)
    ranges = [torch.linspace(-1.0, 2.0, size).to(kind) for size in sizes]
    expected = sum(float(values.double().square().sum()) for values in ranges)
    assert float(square_sum(ranges, CPU)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("at", [0, ROW, 2 * ROW + 4])  # in rows and behind them
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_is_seen(at: int, bad: float) -> None:
    values = torch.zeros(2 * ROW + 5)
    values[at] = bad
    assert not math.isfinite(square_sum([values], CPU))
