"""What stands in for the Hadamard transform has its scale, and mixes nothing."""

from __future__ import annotations

import torch

from paro.quantization.blocks import hadamard
from tools.bench.bits.ablated import scaled


def test_applied_twice_it_gives_the_same_multiple() -> None:
    values = torch.randn(100, generator=torch.Generator().manual_seed(1))
    both = [transform(transform(values))[:100] for transform in (hadamard, scaled)]
    torch.testing.assert_close(both[0], 32 * values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(both[1], both[0], rtol=1e-5, atol=1e-5)
    assert scaled(values).numel() == hadamard(values).numel() == 128
    one = torch.zeros(32)
    one[3] = 1.0
    assert int(scaled(one).count_nonzero()) == 1
    assert int(hadamard(one).count_nonzero()) == 32
