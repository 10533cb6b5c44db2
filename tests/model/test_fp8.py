"""Casts to fp8: Triton's have the bits of torch's, and read and write few bytes; weights' stay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from model import fp8, layers
from model.config import Fp8Format, LlamaConfig, LoraConfig
from model.fp8 import Fp8, Operand, known_largest, operand, remember_largest
from model.llama import Llama, TokenInfo
from model.rotary import rotations
from tests.helpers.triton_kernels import bytes_by_kernel, interpreter
from tests.model.test_fusion import CONFIG
from tests.model.values import normal

pytestmark = pytest.mark.bits

SHAPES = [(1, 7), (3, 5, 37), (130, 200)]  # parts of a tile, and several
SPECIAL = [None, 0.0, float("nan"), -float("nan"), float("inf"), -float("inf")]


def assert_same_bits(found: Tensor, wanted: Tensor) -> None:
    """A NaN is as good as another."""
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    numbers = ~wanted.float().isnan()
    assert torch.equal(~found.float().isnan(), numbers)
    whole = torch.uint8 if found.element_size() == 1 else torch.int32
    assert torch.equal(found.view(whole)[numbers], wanted.view(whole)[numbers])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy: of infinities
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
def test_triton_casts_with_torchs_bits(form: Fp8Format, dtype: torch.dtype) -> None:
    with interpreter():
        for seed, (shape, special) in enumerate(product(SHAPES, SPECIAL)):
            spread = normal(*shape, seed=seed + 1).exp() ** 3  # some far below the largest
            tensor = (normal(*shape, seed=seed) * spread * 10.0 ** (seed % 5 - 2)).to(dtype)
            if special is not None:
                tensor = tensor * 0.0 if special == 0.0 else tensor
                tensor.view(-1)[5] = special
            plain, fused = (
                operand(tensor, Fp8(form, by), is_grad=True, transposed=True)
                for by in (False, True)
            )
            assert_same_bits(fused.scale, plain.scale)
            assert_same_bits(fused.values, plain.values)
            assert_same_bits(fused.values_t, plain.values_t)


@pytest.mark.parametrize("fused", [False, True])
def test_only_what_is_asked_for_is_made(*, fused: bool) -> None:
    tensor = normal(3, 16, 32, seed=1)
    with interpreter():
        for data, transposed in ((True, False), (False, True)):
            found = operand(tensor, Fp8("hybrid", fused), data=data, transposed=transposed)
            assert (found.data is not None, found.transposed is not None) == (data, transposed)


@dataclass
class Casts:
    """The bytes by kernel, and the elements, of a block's operands."""

    kernels: dict[str, int]
    elements: int = 0


@contextmanager
def counted(patch: pytest.MonkeyPatch) -> Iterator[Casts]:
    """Counts all casts; outside of them no operation but matmuls may touch a tensor in fp8."""
    original = fp8.operand
    with bytes_by_kernel() as kernels:
        casts = Casts(kernels)

        def cast(tensor: Tensor, how: Fp8 | None, **options: Any) -> Operand:
            casts.elements += tensor.numel()
            with _disable_current_modes():
                return original(tensor, how, **options)

        for module in (fp8, layers):
            patch.setattr(module, "operand", cast)
        yield casts


class OnlyMatmuls(TorchDispatchMode):
    """Fails where another operation than a matmul or a view reads a tensor in fp8."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name not in {"aten::_scaled_mm", "aten::view", "aten::t", "aten::flatten"}:
            kinds = {each.dtype for each in args if isinstance(each, Tensor)}
            assert not kinds & {torch.float8_e4m3fn, torch.float8_e5m2}, func
        return func(*args, **(kwargs or {}))


WIDE = replace(CONFIG, hidden_size=32, ffn_hidden_size=48, kv_channels=8, fp8_format="hybrid")


BY_TRITON = {f"fuses_{part}": True for part in ("fp8_casts", "norms", "swiglu", "rotary")}
TOKENS, HIDDEN, FFN, KEY = 16, 32, 48, 2 * 8
WEIGHTS = HIDDEN * (2 * HIDDEN + 2 * KEY + 3 * FFN)
INPUTS = TOKENS * (HIDDEN + HIDDEN + HIDDEN + FFN)  # of Q, K and V; of wo; gate and up; w_down
GRADS = TOKENS * (HIDDEN + 2 * KEY + HIDDEN + 2 * FFN + HIDDEN)
ELEMENTS = 2 * WEIGHTS + 2 * INPUTS + GRADS  # of a block's operands, each once a pass


def run_block(config: LlamaConfig) -> None:
    """Forward and backward of a block."""
    block = Llama(config).bfloat16().blocks[0]
    with torch.no_grad():
        for seed, parameter in enumerate(block.parameters()):
            parameter.copy_(0.3 * normal(*parameter.shape, seed=seed))
    x = normal(1, TOKENS, HIDDEN, seed=1, dtype=torch.bfloat16).requires_grad_()
    info = TokenInfo(*rotations(config, TOKENS, torch.bfloat16, x.device))
    block(x, info).float().sum().backward()


@pytest.mark.parametrize(
    ("more", "looked_for"),
    [
        # Weights twice, attention's output once, the gradients of V and of the block's output.
        ({}, 2 * WEIGHTS + TOKENS * (HIDDEN + KEY + HIDDEN)),
        # Frozen, they are cast as often; what the adapters' input is made of is not cast again.
        ({"qk_layernorm": True, "lora": LoraConfig(rank=4, targets=("wq", "w_gate"))}, None),
    ],
)
def test_a_blocks_casts_move_few_bytes(
    more: dict[str, Any], looked_for: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures of docs/gpu.md; and that what is known of an operand is what a search finds."""

    def checked(tensor: Tensor) -> Tensor | None:
        found = known_largest(tensor)
        if found is not None:
            with _disable_current_modes():
                assert_same_bits(
                    found.view(torch.float32), tensor.abs().amax().float().view_as(found)
                )
        return found

    monkeypatch.setattr("model.kernels.known_largest", checked)
    with interpreter(), counted(monkeypatch) as casts, OnlyMatmuls():
        run_block(replace(WIDE, **BY_TRITON, **more))
    if looked_for is None:
        return
    assert casts.elements == ELEMENTS, "each operand is cast once a pass"
    searched, cast = casts.kernels["_largest"], casts.kernels["_cast"]
    assert 0 <= searched - 2 * looked_for < 100, "and what the programs have found"
    assert 3 * ELEMENTS <= cast <= 4 * ELEMENTS


def test_a_largest_value_is_forgotten_with_the_values() -> None:
    tensor, largest = normal(4, 6, seed=1), torch.zeros(1)
    assert known_largest(tensor) is None
    remember_largest(tensor, largest)
    for whole in (tensor, tensor.view(24), tensor.detach().unflatten(0, (2, 2))):
        assert known_largest(whole) is largest
    assert known_largest(tensor[:2]) is None
    assert known_largest(tensor.clone()) is None
    tensor.view(24)[3] = 9.0
    assert known_largest(tensor) is None
    part = normal(4, 6, seed=1)[1:]
    remember_largest(part, largest)
    assert known_largest(part) is None
