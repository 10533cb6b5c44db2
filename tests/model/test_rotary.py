"""Rotary embedding: frequencies, invariants of rotation, gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model.config import LLAMA_PRESETS, LlamaConfig
from model.rotary import inverse_frequencies, rotate, rotations
from tests.model.values import SMALL

HEADS = replace(SMALL, kv_channels=8)


@pytest.mark.parametrize("preset", ["7B", "llama3.1-8B"])
def test_interpolated_positions_are_divided(preset: str) -> None:
    """As Megatron-LM does it: positions, whatever scales the frequencies."""
    plain = LLAMA_PRESETS[preset]
    stretched = replace(plain, rotary_seq_len_interpolation_factor=2.5)
    divided = torch.arange(9, dtype=torch.float32) / 2.5
    cos, sin = rotations(stretched, 9, torch.float32, torch.device("cpu"))

    angles = torch.outer(divided, inverse_frequencies(plain))[:, None, :]

    torch.testing.assert_close(cos, torch.cat((angles, angles), dim=-1).cos())
    torch.testing.assert_close(sin, angles.sin())


def _turned(x_BSNH: Tensor, config: LlamaConfig = HEADS) -> Tensor:
    return rotate(x_BSNH, *rotations(config, x_BSNH.shape[1], x_BSNH.dtype, x_BSNH.device))


def test_each_pair_turns_by_its_angle() -> None:
    x_BSNH = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    positions = torch.arange(5, dtype=torch.float64)
    angles = (positions[:, None] * inverse_frequencies(HEADS).double())[None, :, None, :]

    pairs = torch.complex(*x_BSNH.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat((pairs.real, pairs.imag), dim=-1)

    torch.testing.assert_close(_turned(x_BSNH), expected, rtol=0.0, atol=1e-6)


def test_gradient() -> None:
    x_BSNH = torch.randn(2, 4, 3, 8, dtype=torch.float64, requires_grad=True)

    assert torch.autograd.gradcheck(_turned, (x_BSNH,))


def test_input_of_any_layout() -> None:
    x_BNSH = torch.randn(2, 3, 5, 8)
    x_BSNH = x_BNSH.transpose(1, 2)

    assert torch.equal(_turned(x_BSNH), _turned(x_BSNH.contiguous()))
    assert torch.equal(x_BSNH, x_BNSH.transpose(1, 2)), "the input was changed"


def test_low_precision_angles_are_computed_in_fp32() -> None:
    """bf16 cannot represent both position 1000 and 1002: only cosines and sines may be rounded."""
    exact = rotations(HEADS, 2048, torch.float32, torch.device("cpu"))
    rounded = rotations(HEADS, 2048, torch.bfloat16, torch.device("cpu"))

    for fine, coarse in zip(exact, rounded, strict=True):
        assert torch.equal(fine.bfloat16(), coarse)


def test_tables_are_made_once() -> None:
    first, second = (rotations(HEADS, 17, torch.float32, torch.device("cpu")) for _ in range(2))

    assert all(a is b for a, b in zip(first, second, strict=True))
