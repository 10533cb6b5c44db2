"""Initial parameter values, independent of world size and strategy; each rank makes its shard."""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from model.config import LlamaConfig, down_name, is_adapter
from model.mup import width_of
from model.units import parameter_shapes

BLOCK = 2**16  # elements of a flattened parameter that are drawn from one seed


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterInit:
    """Initial distribution: normal with `std`, uniform within `bound`, or constant without both."""

    name: str
    numel: int
    std: float | None
    bound: float | None = None
    constant: float = 1.0


def parameter_initializers(config: LlamaConfig) -> dict[str, ParameterInit]:
    """Return Megatron's initialization: normal, std / sqrt(2 layers) for residual outputs.

    With muP matrices of blocks have a std that is divided by the square root of the width.
    Residual outputs are the weights whose product is added to the residual stream. Norms start as
    ones, biases as zeros. Adapters are peft's: Kaiming-uniform with a = sqrt(5), which is uniform
    within 1 / sqrt(columns), before those of zeros.
    """
    hidden = config.init_method_std / math.sqrt(width_of(config))
    narrow = hidden / math.sqrt(2.0 * config.num_layers)
    specs = {}
    for name, shape in parameter_shapes(config).items():
        part, numel = name.rpartition(".")[2], math.prod(shape)
        std = bound = None
        if part.endswith(down_name("")):
            bound = shape[1] ** -0.5
        elif len(shape) == 2 and not is_adapter(part):
            std = hidden if name.startswith("blocks.") else config.init_method_std
            std = narrow if part in ("wo", "w_down") else std
        constant = 0.0 if part in ("bq", "bk", "bv") or is_adapter(part) else 1.0
        specs[name] = ParameterInit(name=name, numel=numel, std=std, bound=bound, constant=constant)
    return specs


def initial_values(
    spec: ParameterInit, seed: int, start: int, stop: int, *, num_threads: int = 1
) -> Tensor:
    """Return elements [start, stop) of the flattened parameter, in fp32 on the CPU.

    The values do not depend on the number of threads that draw them.
    """
    assert 0 <= start <= stop <= spec.numel, f"[{start}, {stop}) of {spec.numel} in {spec.name}"
    if spec.std is None and spec.bound is None:
        return torch.full((stop - start,), spec.constant, dtype=torch.float32, device="cpu")
    values = torch.empty(stop - start, dtype=torch.float32, device="cpu")

    def fill(blocks: range) -> None:
        for block in blocks:
            begin, end = block * BLOCK, min((block + 1) * BLOCK, spec.numel)
            low, high = max(start, begin), min(stop, end)
            part = values[low - start : high - start]
            if high - low == end - begin:
                _draw(part, seed, spec, block)
            else:
                part.copy_(_whole_block(seed, spec, block, end - begin)[low - begin : high - begin])
            if spec.bound is not None:
                part.mul_(2 * spec.bound).sub_(spec.bound)
            elif spec.std is not None:
                part.mul_(spec.std)

    blocks = range(start // BLOCK, -(-stop // BLOCK))
    parts = [blocks[first::num_threads] for first in range(min(num_threads, len(blocks)))]
    if len(parts) > 1:
        with ThreadPoolExecutor(len(parts)) as pool:  # torch draws without holding the GIL
            list(pool.map(fill, parts))
    else:
        fill(blocks)
    return values


@torch.no_grad()
def initialize_whole(
    model: nn.Module, config: LlamaConfig, seed: int, *, num_threads: int = 1
) -> None:
    """Initialize an unsharded model in place."""
    specs = parameter_initializers(config)
    for name, parameter in model.named_parameters():
        spec = specs[name]
        values = initial_values(spec, seed, 0, spec.numel, num_threads=num_threads)
        parameter.copy_(values.view(parameter.shape))


@lru_cache(maxsize=1)  # a rank with a column shard requests the same block row by row
def _whole_block(seed: int, spec: ParameterInit, block: int, numel: int) -> Tensor:
    """Return all of a block, since a generator's n-th number may depend on how many are drawn."""
    values = torch.empty(numel, dtype=torch.float32, device="cpu")
    _draw(values, seed, spec, block)
    return values


def _draw(values: Tensor, seed: int, spec: ParameterInit, block: int) -> None:
    """Fill `values` with standard normal numbers, or with uniform ones of [0, 1)."""
    digest = hashlib.blake2b(f"{seed}/{spec.name}/{block}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    generator = torch.Generator(device="cpu").manual_seed(number)
    if spec.bound is None:
        values.normal_(generator=generator)
    else:
        values.uniform_(generator=generator)
