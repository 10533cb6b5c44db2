"""Codes of 4 and 8 bits: bytes, errors, the transform; Triton's kernels have torch's bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paro.quantization import blocks
from paro.quantization.blocks import (
    BY_TORCH,
    choose_kernels,
    dequantize_by_torch,
    hadamard,
    quantize_by_torch,
)
from paro.quantization.formats import BlockFormat, error_bytes, padded
from tests.helpers.triton_kernels import interpreter

pytestmark = pytest.mark.bits

FORMATS = [BlockFormat(bits=bits, block=block) for bits in (4, 8) for block in (128, 2048)]
# The interpreter takes seconds: short blocks of 8 bits and long ones of 4 without `verify`.
INTERPRETED = [
    pytest.param(form, marks=[pytest.mark.verify] * ((form.bits == 4) == (form.block == 128)))
    for form in FORMATS
]
SIZES = [1, 31, 32, 33, 127, 128, 2047, 2048, 2049, 5000]


def quantized(values: Tensor, form: BlockFormat) -> Tensor:
    out = torch.zeros(form.num_bytes(values.numel()), dtype=torch.uint8)
    quantize_by_torch(values, form, out)
    return out


def dequantized(payload: Tensor, form: BlockFormat, numel: int) -> Tensor:
    whole = torch.full((numel,), torch.nan)
    dequantize_by_torch(payload, form, whole)
    return whole


def values_of(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel + seed))


class DividesAsAGpu(TorchDispatchMode):
    """Divides by a number as torch does on a GPU: it multiplies with the rounded reciprocal."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.div.Tensor and not isinstance(args[1], Tensor):
            return args[0] * (1.0 / torch.tensor(args[1], dtype=torch.float32))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_gpu_or_threads_change_no_bit(form: BlockFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    values = values_of(9001)
    expected, threads = quantized(values, form), torch.get_num_threads()
    whole = dequantized(expected, form, values.numel())
    with DividesAsAGpu():
        assert torch.equal(quantized(values, form), expected)
    monkeypatch.setattr(blocks, "_CHUNK", 2048)
    torch.set_num_threads(1)
    try:
        assert torch.equal(quantized(values, form), expected)
        assert torch.equal(dequantized(expected, form, values.numel()), whole)
    finally:
        torch.set_num_threads(threads)
    rounded = values.bfloat16()  # coded in float32
    assert torch.equal(quantized(rounded, form), quantized(rounded.float(), form))


def test_bytes_are_scales_and_levels() -> None:
    num_bytes = {
        (4, 2048, 1): 4 + 16,  # padded to 32
        (4, 2048, 2048): 4 + 1024,
        (4, 2048, 2049): 8 + 1024 + 16,
        (8, 2048, 2049): 8 + 2048 + 32,
        (4, 128, 1280): 40 + 640,  # 4.25 bits an element
    }
    for (bits, block, numel), size in num_bytes.items():
        assert BlockFormat(bits=bits, block=block).num_bytes(numel) == size


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_the_error_is_at_most_half_a_level_of_the_block(form: BlockFormat) -> None:
    for numel in SIZES:
        values = values_of(numel)
        error = (dequantized(quantized(values, form), form, numel) - values).abs()
        for begin in range(0, numel, form.block):
            level = float(values[begin : begin + form.block].abs().max()) / form.top
            found = float(error[begin : begin + form.block].max())
            assert found <= 0.5 * level * (1 + 1e-5), f"{found} for levels of {level}"
            tail = numel - begin
            assert tail < 100 or found > 0.3 * level, "there are more levels than asked for"
    for value in (0.0, 1e-45, 1e-44, 3e38):
        values = torch.full((70,), value)
        back = dequantized(quantized(values, form), form, 70)
        assert back.isfinite().all()
        assert ((back - values).abs() <= values).all()
    levels = torch.arange(-form.top, form.top + 1, dtype=torch.float32) * 0.25
    for exact in (levels, -levels):
        assert torch.equal(dequantized(quantized(exact, form), form, exact.numel()), exact)


def test_the_transform_is_its_own_inverse_times_32_and_spreads_a_peak() -> None:
    values = values_of(100)
    twice = hadamard(hadamard(values))
    assert twice.numel() == 128
    assert torch.allclose(twice / 32, torch.nn.functional.pad(values, (0, 28)), atol=1e-6)
    signs = torch.stack([hadamard(row) for row in torch.eye(32)])
    assert torch.equal(signs.abs(), torch.ones(32, 32))
    assert torch.equal(signs @ signs.T, 32 * torch.eye(32))
    form, values = BlockFormat(bits=4, block=128), values_of(4096)
    values[::128] *= 30
    plain = dequantized(quantized(values, form), form, values.numel())
    spread = dequantized(quantized(hadamard(values), form), form, values.numel())
    errors = [float((back - values).norm()) for back in (plain, hadamard(spread) / 32)]
    assert errors[1] < 0.6 * errors[0], errors


def sent_with_feedback(values: Tensor, form: BlockFormat, times: int) -> tuple[Tensor, Tensor]:
    """The mean of what arrives if the same values are sent so often; and what is remembered."""
    numel = padded(values.numel())
    error = torch.zeros(error_bytes(values.numel()), dtype=torch.uint8)
    out = torch.zeros(form.num_bytes(values.numel()), dtype=torch.uint8)
    mean = torch.zeros(numel)
    for _ in range(times):
        quantize_by_torch(values, form, out, transforms=True, error=error)
        mean += dequantized(out, form, numel) / times
    return hadamard(mean)[: values.numel()] / 32, error


@pytest.mark.slow("quantizes hundreds of times")
@pytest.mark.parametrize("numel", [31, 2049])
def test_what_codes_lose_is_sent_later(numel: int) -> None:
    form, values = BlockFormat(bits=4, block=128), values_of(numel)
    once, often = (sent_with_feedback(values, form, times)[0] for times in (1, 400))
    losses = [float((found - values).norm() / values.norm()) for found in (once, often)]
    assert losses[0] > 0.03
    assert losses[1] < 0.05 * losses[0], losses


def test_feedback_begins_with_the_codes_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    form, values = BlockFormat(bits=4, block=128), values_of(9001)
    out, plain = (torch.zeros(form.num_bytes(9001), dtype=torch.uint8) for _ in range(2))
    error = torch.zeros(error_bytes(9001), dtype=torch.uint8)
    quantize_by_torch(values, form, out, transforms=True, error=error)
    quantize_by_torch(values, form, plain, transforms=True)
    assert torch.equal(out, plain)
    whole = [sent_with_feedback(values, form, 3)]
    monkeypatch.setattr(blocks, "_CHUNK", 2048)
    whole.append(sent_with_feedback(values, form, 3))
    assert all(map(torch.equal, *whole)), "chunks change what is sent or remembered"


CPU = torch.device("cpu")


@pytest.fixture
def interpreted() -> Iterator[None]:
    with interpreter():
        assert choose_kernels(CPU).quantize is not BY_TORCH.quantize
        yield


def room(form: BlockFormat, numel: int) -> Tensor:
    return torch.zeros(form.num_bytes(numel), dtype=torch.uint8)


@pytest.mark.slow("interprets kernels")
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("form", INTERPRETED, ids=str)
def test_codes_values_and_feedback(form: BlockFormat) -> None:
    for numel in (33, 2049):
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


@pytest.mark.slow("interprets kernels")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("form", INTERPRETED, ids=str)
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
