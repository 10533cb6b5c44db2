"""Rotary embedding: frequencies, invariants of rotation, gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from model.config import LLAMA_PRESETS
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


def test_input_of_any_layout() -> None:
    x_BNSH = torch.randn(2, 3, 5, 8)
    x_BSNH = x_BNSH.transpose(1, 2)
    tables = rotations(HEADS, 5, torch.float32, torch.device("cpu"))

    assert torch.equal(rotate(x_BSNH, *tables), rotate(x_BSNH.contiguous(), *tables))
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
