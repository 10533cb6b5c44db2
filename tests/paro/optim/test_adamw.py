"""AdamW on flat ranges by torch's class, apex's and Triton's, the norm, and moments in bf16."""

from __future__ import annotations

import math
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from itertools import product
from math import prod
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from paro.layout import (
    ChunkRange,
    make_sliced_layout,
    make_whole_layout,
    parameter_runs,
    whole_chunk,
)
from paro.optim.adamw import _CHUNK, AdamW, AdamWUpdate, TorchAdamW, choose_adamw
from paro.optim.finite import ROW, square_sum
from paro.optim.rounding import Rounding, round_into
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
    param = torch.linspace(-1, 1, 37)
    wanted, states = expected(param), (param, torch.zeros(37), torch.zeros(37))
    average, averaged = torch.zeros(37), torch.zeros(37)
    ours = make(implementation, *states)
    for step, (grad, (lr, weight_decay)) in enumerate(zip(gradients(), STEPS, strict=True), 1):
        if begins_anew:
            ours = make(implementation, *states)
        by = AdamWUpdate(step, lr, weight_decay, average=average, average_weight=0.3)
        ours.step(grad, by)
        averaged.lerp_(param, 0.3)
    assert torch.equal(param, wanted)
    assert torch.equal(average, averaged)


def test_without_apex_its_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    chosen = partial(OptimConfig, adam_implementation="apex")
    refused(chosen, "--adam-implementation apex needs NVIDIA's apex")


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("copies", [False, True])
def test_one_pass_is_scaling_updating_averaging_and_casting(
    kind: torch.dtype, copies: bool
) -> None:
    found = []
    with interpreter():
        for name in ("torch", "triton"):
            states = [torch.linspace(-1, 1, 2500), torch.zeros(2500), torch.zeros(2500)]
            copy = torch.zeros(2500, dtype=torch.bfloat16) if copies else None
            average = None if copies else states[0].clone()
            ours = make(name, *states)
            for step, grad in enumerate(gradients(2500), 1):
                if step == 2:
                    ours = make(name, *states)
                ours.step(grad.to(kind), AdamWUpdate(step, 0.1, 0.2, 0.3, copy, average, 0.3))
            written = (whole.float() for whole in (copy, average) if whole is not None)
            found.append((*states, *written))
    for torchs, tritons in zip(*found, strict=True):
        rounding = 2.0**-7 if copies and torchs is found[0][-1] else 1e-5
        assert torch.allclose(tritons, torchs, rtol=rounding, atol=1e-6)
    if copies:  # the interpreter casts to bf16 without rounding to nearest
        assert torch.allclose(found[1][-1], found[1][0], rtol=2.0**-7)


def test_what_runs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_adamw("auto", CPU) == (TorchAdamW, None), "a CPU has no choice but torch"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "paro.optim.kernels", None)
        message = "--adam-implementation triton does not work here"
        refused(lambda: choose_adamw("triton", CPU), message)
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

    def step(self, grad: Tensor, update: AdamWUpdate) -> None:
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
    for at, bad in product((0, ROW, 2 * ROW + 4), (math.inf, math.nan)):  # in rows and behind them
        values = torch.zeros(2 * ROW + 5, dtype=kind)
        values[at] = bad
        assert not math.isfinite(square_sum([values], CPU))


SHAPES = {"wq": (12, 7), "w_down": (7, 24), "norm": (7,)}
CUTS = {"wq": 0, "w_down": 1, "norm": 0}
WHOLE = ChunkRange(whole_chunk("w", (1000, 100)), 0, 10**5, 0)


def bits_by_parameter(world_size: int, *, slices: bool) -> dict[str, Tensor]:
    """The bits of every element at its place in its parameter, put together from all shards."""
    layout = make_whole_layout(SHAPES, world_size=world_size)
    if slices:
        layout = make_sliced_layout(SHAPES, cuts=CUTS, number=world_size, world_size=world_size)
    found = {name: torch.zeros(prod(shape), dtype=torch.int32) for name, shape in SHAPES.items()}
    size = layout.numel // world_size
    for start in range(0, layout.numel, size):
        for part in layout.chunk_ranges(start, start + size):
            bits = Rounding.of(part, seed=3).bits(0, part.high - part.low, 5, CPU)
            for begin, end in parameter_runs(part.chunk, part.low, part.high):
                found[part.chunk.name][begin:end], bits = bits[: end - begin], bits[end - begin :]
    return found


@pytest.mark.parametrize(("world_size", "slices"), [(6, False), (3, True), (4, True)])
def test_bits_belong_to_an_element_and_not_to_a_shard(world_size: int, slices: bool) -> None:
    whole = bits_by_parameter(1, slices=False)
    for name, bits in bits_by_parameter(world_size, slices=slices).items():
        assert torch.equal(bits, whole[name]), name
    rounding = Rounding.of(WHOLE, seed=1)
    assert torch.equal(rounding.bits(123, 456, 1, CPU), rounding.bits(0, 1000, 1, CPU)[123:456])


def test_bits_look_independent() -> None:
    """The correlation of 100,000 pairs has a standard deviation of 0.003."""
    of_v = ChunkRange(whole_chunk("v", (1000, 100)), 0, 10**5, 0)
    bits = Rounding.of(WHOLE, seed=1).bits(0, 10**5, 1, CPU)
    others = {
        "seed": Rounding.of(WHOLE, seed=2).bits(0, 10**5, 1, CPU),
        "step": Rounding.of(WHOLE, seed=1).bits(0, 10**5, 2, CPU),
        "parameter": Rounding.of(of_v, seed=1).bits(0, 10**5, 1, CPU),
        "half": bits >> 16,
    }
    for name, other in others.items():
        pair = torch.stack([bits & 0xFFFF, other & 0xFFFF]).double()
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.015, name
    assert float(pair[0].mean()) == pytest.approx(0x7FFF, rel=0.01)
    counts = torch.bincount((bits & 0xFFFF) >> 8, minlength=256)
    assert 250 < int(counts.min()) <= int(counts.max()) < 550


@pytest.mark.parametrize("value", [1.0, 1.0 + 2.0**-9, -1.003, 3.1e-30, 6.02e23])
def test_rounding_has_the_value_as_its_mean(value: float) -> None:
    rounded = torch.empty(10**5, dtype=torch.bfloat16)
    exact = torch.full((10**5,), value)
    round_into(exact.clone(), Rounding.of(WHOLE, seed=1).bits(0, 10**5, 1, CPU), rounded)
    # One step of bf16 is at most 2**-7 of the value; the mean's deviation is 1 / 632 of half of it.
    assert float(rounded.double().mean()) == pytest.approx(value, rel=4 * 2.0**-8 / 316)
    assert int(rounded.unique().numel()) == 1 + (float(exact[0].bfloat16()) != float(exact[0]))


def test_what_bf16_has_stays() -> None:
    exact = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan]).repeat(20)
    rounded = torch.empty(100, dtype=torch.bfloat16)
    round_into(exact.clone(), Rounding.of(WHOLE, seed=1).bits(0, 100, 1, CPU), rounded)
    assert torch.equal(rounded.float().nan_to_num(7.0), exact.nan_to_num(7.0))


def updated(
    name: str, numel: int, kinds: tuple[torch.dtype, torch.dtype], *, stride: int = 9
) -> list[Tensor]:
    """Parameters and moments after two updates, the second by an object that goes on.

    Rows are 7 wide: with another `stride` they are of a matrix that is cut in its columns.
    """
    param = torch.linspace(-1, 1, numel)
    states = [param, *(torch.zeros(numel, dtype=kind) for kind in kinds)]
    rounding = Rounding(seed=4, name="w", low=5, width=7, stride=stride, start=2)
    for step in (1, 2):
        ours = choose_adamw(name, CPU, rounds=True).make(
            *states, betas=(0.8, 0.95), eps=1e-6, rounding=rounding
        )
        grad = torch.linspace(-1.0, step - 1, numel)
        ours.step(grad, AdamWUpdate(step, lr=0.1, weight_decay=0.2, factor=0.3))
    return states


BF16, FP32 = torch.bfloat16, torch.float32
KINDS = [(BF16, BF16), (FP32, BF16), (BF16, FP32)]


@pytest.mark.parametrize("kinds", KINDS)
def test_the_first_update_is_that_of_fp32(kinds: tuple[torch.dtype, torch.dtype]) -> None:
    """Only what later updates read is rounded; chunks change nothing."""
    numel = _CHUNK + 100
    exact = updated("torch", numel, (torch.float32, torch.float32))
    rounded = updated("torch", numel, kinds)
    for kind, wanted, found in zip(kinds, exact[1:], rounded[1:], strict=True):
        limit = 0.02 if torch.bfloat16 in kinds else 0.0
        assert found.dtype == kind
        assert torch.allclose(found.float(), wanted, rtol=limit, atol=1e-4)
    assert torch.allclose(rounded[0], exact[0], rtol=0, atol=2e-3)
    assert not torch.equal(rounded[0], exact[0])


@pytest.mark.slow("interprets kernels")
@pytest.mark.parametrize("stride", [7, 9])
@pytest.mark.parametrize("kinds", KINDS)
def test_the_kernel_rounds_by_the_same_bits(
    kinds: tuple[torch.dtype, torch.dtype], stride: int
) -> None:
    """A value apart by rounding in fp32 is now and then rounded to the other side."""
    with interpreter():
        torchs, tritons = (
            updated(name, 2500, kinds, stride=stride) for name in ("torch", "triton")
        )
    for wanted, found in zip(torchs, tritons, strict=True):
        assert found.dtype == wanted.dtype
        differ = ~torch.isclose(found.float(), wanted.float(), rtol=1e-5, atol=1e-6)
        assert int(differ.sum()) <= 5
