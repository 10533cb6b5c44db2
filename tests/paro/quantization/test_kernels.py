"""Triton's kernels for codes have the bits of torch's operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import product

import pytest
import torch
from torch import Tensor

from paro.quantization.blocks import BY_TORCH, choose_kernels
from paro.quantization.formats import BlockFormat, error_bytes
from tests.helpers.triton_kernels import interpreter
from tests.paro.quantization.test_blocks import FORMATS, values_of

pytestmark = pytest.mark.bits

CPU = torch.device("cpu")
SIZES = [1, 33, 2049, 5000]


@pytest.fixture
def interpreted() -> Iterator[None]:
    with interpreter():
        assert choose_kernels(CPU).quantize is not BY_TORCH.quantize
        yield


def room(form: BlockFormat, numel: int) -> Tensor:
    return torch.zeros(form.num_bytes(numel), dtype=torch.uint8)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_codes_values_and_feedback(form: BlockFormat) -> None:
    for numel in SIZES:
        values, params = values_of(numel), values_of(numel, 1).bfloat16()
        for minus, transforms in product((None, params), (False, True)):
            found, wanted = room(form, numel), room(form, numel)
            choose_kernels(CPU).quantize(values, form, found, minus=minus, transforms=transforms)
            BY_TORCH.quantize(values, form, wanted, minus=minus, transforms=transforms)
            assert torch.equal(found, wanted), numel
        for adds in (False, True):
            own, torchs = values.clone(), values.clone()
            choose_kernels(CPU).dequantize(found, form, own, adds=adds)
            BY_TORCH.dequantize(found, form, torchs, adds=adds)
            assert torch.equal(own, torchs), numel
        own, torchs = (torch.zeros(error_bytes(numel), dtype=torch.uint8) for _ in range(2))
        for seed in range(3):
            found, wanted = room(form, numel), room(form, numel)
            values = values_of(numel, seed)
            choose_kernels(CPU).quantize(values, form, found, transforms=True, error=own)
            BY_TORCH.quantize(values, form, wanted, transforms=True, error=torchs)
            assert torch.equal(found, wanted), (numel, seed)
            assert torch.equal(own, torchs), (numel, seed)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("runs_on", [interpreter, nullcontext])
def test_zeros_and_what_is_not_finite(
    form: BlockFormat, runs_on: Callable[[], AbstractContextManager[None]]
) -> None:
    """The scale carries it, so the norm of a sum is not finite and the step is skipped."""
    numel, begin = 2 * form.block + 44, form.block
    for value in (0.0, 1e-45, 3e38, math.inf, -math.inf, math.nan):
        values, back = torch.zeros(numel), torch.zeros(numel)
        values[begin + 22] = value
        out = room(form, numel)
        with runs_on():
            choose_kernels(CPU).quantize(values, form, out, transforms=True)
            choose_kernels(CPU).dequantize(out, form, back)
        assert back[:begin].isfinite().all()
        finite = back[begin : 2 * begin].isfinite()
        assert bool(finite.all() if abs(value) < 1e39 else not finite.any()), value


def test_what_runs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_kernels(CPU) == BY_TORCH
    with interpreter():
        assert choose_kernels(CPU).line.startswith("codes: Triton 3.")
        from paro.quantization import kernels

        monkeypatch.setattr(kernels, "dequantize", lambda *_, **options: None)
        choose_kernels.cache_clear()
        found = choose_kernels(CPU)
        assert found.quantize is BY_TORCH.quantize
        assert "because Triton fails: RuntimeError: results differ" in found.line


def run_on_gpu() -> None:
    found = choose_kernels(torch.device("cuda"))
    assert found.quantize is not BY_TORCH.quantize, found.line
