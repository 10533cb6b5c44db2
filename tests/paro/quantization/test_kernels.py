"""Triton's kernels for codes have the bits of torch's operations; they compile for GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from paro.quantization import blocks
from paro.quantization.blocks import choose_kernels, decode, encode, encode_with_feedback
from paro.quantization.formats import BlockFormat, error_bytes
from tests.helpers.triton_kernels import Signature, compile_kernel, interpreter

CPU = torch.device("cpu")
FORMATS = [BlockFormat(bits=bits, block=block) for bits in (4, 8) for block in (128, 2048)]
SIZES = [1, 33, 127, 2049, 5000]


@pytest.fixture
def interpreted() -> Iterator[None]:
    with interpreter():
        assert choose_kernels(CPU).module is not None
        yield


def values_of(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel + seed))


def room(form: BlockFormat, numel: int) -> Tensor:
    return torch.zeros(form.num_bytes(numel), dtype=torch.uint8)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_codes_and_values(form: BlockFormat) -> None:
    for numel in SIZES:
        values, params = values_of(numel), values_of(numel, 1).bfloat16()
        for minus, transforms in product((None, params), (False, True)):
            found, wanted = room(form, numel), room(form, numel)
            encode(values, form, found, minus=minus, transforms=transforms)
            blocks._encode(values, form, wanted, minus=minus, transforms=transforms)
            assert torch.equal(found, wanted), numel
        for adds in (False, True):
            own, torchs = values.clone(), values.clone()
            decode(found, form, own, adds=adds)
            blocks._decode(found, form, torchs, adds=adds)
            assert torch.equal(own, torchs), numel


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_feedback(form: BlockFormat) -> None:
    for numel in SIZES:
        own, torchs = (torch.zeros(error_bytes(numel), dtype=torch.uint8) for _ in range(2))
        for seed in range(3):
            found, wanted = room(form, numel), room(form, numel)
            encode_with_feedback(values_of(numel, seed), form, found, own)
            weight = blocks._ERROR_WEIGHT
            blocks._encode_with_feedback(values_of(numel, seed), form, wanted, torchs, weight)
            assert torch.equal(found, wanted), (numel, seed)
            assert torch.equal(own, torchs), (numel, seed)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.usefixtures("interpreted")
def test_zeros_and_what_is_not_finite() -> None:
    form = FORMATS[0]
    for value in (0.0, 1e-45, 3e38, float("inf"), float("nan")):
        values, back = torch.zeros(300), torch.zeros(300)
        values[150] = value
        out = room(form, 300)
        encode(values, form, out, transforms=True)
        decode(out, form, back)
        assert back[:128].isfinite().all()
        finite = back[128:256].isfinite()
        assert bool(finite.all() if value < 1e39 else not finite.any()), value


def test_what_runs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_kernels(CPU) == (None, None)
    with interpreter():
        assert str(choose_kernels(CPU).line).startswith("codes: Triton 3.")
        from paro.quantization import kernels

        monkeypatch.setattr(kernels, "decode", lambda *_, **options: None)
        choose_kernels.cache_clear()
        found = choose_kernels(CPU)
        assert found.module is None
        assert "because Triton fails: RuntimeError: results differ" in str(found.line)


def compile_all(*capabilities: int) -> None:
    codes = {"codes": "*u8", "scales": "*fp32"}
    errors = {"error_codes": "*u8", "error_scales": "*fp32"}
    sizes = dict.fromkeys(("numel", "num_codes", "num_blocks"), "i32")
    encoding = {"values": "*fp32", "minus": "*bf16", **codes, **errors, **sizes}
    encoding |= {"num_error_blocks": "i32", "weight": "fp32"}
    decoding = {**codes, "out": "*bf16", **sizes}
    for bits, block, size in ((4, 128, 1024), (8, 2048, 2048)):
        form = {"BITS": bits, "BLOCK": block, "SIZE": size}
        for capability in capabilities:
            flags = {"SUBTRACTS": bits == 8, "TRANSFORMS": bits == 4, "FEEDS_BACK": bits == 4}
            signature = Signature(types=encoding, constants={**flags, **form})
            compile_kernel("paro.quantization.kernels", "_encode", signature, capability)
            signature = Signature(types=decoding, constants={"ADDS": True, **form})
            compile_kernel("paro.quantization.kernels", "_decode", signature, capability)


def run_on_gpu() -> None:
    found = choose_kernels(torch.device("cuda"))
    assert found.module is not None, found.line
