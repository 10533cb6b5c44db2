"""The adapters' part of a projection, and a dropout that does not depend on the number of ranks."""

# Letters as in model/llama.py; R is the adapters' rank.

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.config import LlamaConfig
from model.layers import rms_norm
from model.lora_config import down_name, up_name

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_MIX = (-4658895280553007687, -7723592293110705685)  # of SplitMix64
_BITS = 24
_AT_ONCE = 2**22  # elements


class Drops(NamedTuple):
    """What decides which elements are dropped: the same numbers on any number of ranks."""

    seed: int
    step: int
    samples: tuple[int, ...]  # the number of each sample of the micro-batch in the global batch


def drops_of(
    config: object, seed: int, step: int, rank: int, num_ranks: int
) -> Callable[[int, int], dict[str, Any]]:
    """What the model's dropout depends on in a micro-batch of a size; nothing without dropout.

    A sample's number in the global batch is the same for any number of ranks.
    """
    if not (isinstance(config, LlamaConfig) and config.lora and config.lora.dropout):
        return lambda _index, _size: {}

    def drops(index: int, size: int) -> dict[str, Any]:
        first = (index * num_ranks + rank) * size
        return {"drops": Drops(seed, step, tuple(range(first, first + size)))}

    return drops


class Columns(NamedTuple):
    """Where a slice of a weight's columns begins, and how many the weight has."""

    first: int
    number: int


class AdaptedBlock(nn.Module):
    """A block whose projections may have adapters."""

    def __init__(self, config: LlamaConfig, *, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.starts: dict[str, int] = {}  # of weights that are slices: the first row or column

    def make_adapters(self) -> None:
        """Adds the adapters' parameters; call it after those of the projections."""
        if self.config.lora is None:
            return
        shapes = {name: tuple(weight.shape) for name, weight in self.named_parameters()}
        for name, shape in self.config.lora.shapes(shapes).items():
            setattr(self, name, nn.Parameter(torch.empty(shape)))

    def adapted(
        self,
        outputs: dict[str, Tensor],
        make_input: Callable[..., Tensor],
        sources: tuple[Tensor, ...],
        drops: Drops | None,
    ) -> tuple[Tensor, ...]:
        """The outputs of projections, by their weights' names, with those of their adapters added.

        Backward makes the projections' input again with `make_input` from `sources`, which are kept
        anyway. Without `drops` nothing is dropped.
        """
        lora = self.config.lora
        names = [name for name in outputs if lora is not None and name in lora.targets]
        if not names:
            return tuple(outputs.values())
        run = checkpointed if torch.is_grad_enabled() else _called
        slices = {name: (self.starts.get(name, 0), outputs[name].shape[-1]) for name in names}
        added = run(partial(self._low_rank, slices, make_input, drops), *sources)
        for name, low in zip(names, added, strict=True):
            outputs[name] = low.add_(outputs[name])  # which frees the other
        return tuple(outputs.values())

    def _low_rank(
        self,
        slices: Mapping[str, tuple[int, int]],
        make_input: Callable[..., Tensor],
        drops: Drops | None,
        *sources: Tensor,
    ) -> tuple[Tensor, ...]:
        """`scaling * up @ down @ dropout(input)` for each of the weights.

        `slices` are the first row or column of each, and its number of rows. Of a slice of rows
        this is the part of the output, of one of columns a partial sum.
        """
        lora, x_BSD = self.config.lora, make_input(*sources)
        assert lora is not None, "no adapters"
        made = []
        for name, (first, rows) in slices.items():
            in_BSD, columns = x_BSD, x_BSD.shape[-1]
            down_RD, up_ER = getattr(self, down_name(name)), getattr(self, up_name(name))
            if columns < down_RD.shape[1]:
                down_RD = down_RD[:, first : first + columns]
            elif rows < up_ER.shape[0]:
                up_ER = up_ER[first : first + rows]
            if drops is not None and lora.dropout > 0.0:
                full = f"blocks.{self.layer}.{name}"
                whole = getattr(self, down_name(name)).shape[1]
                of = Columns(first, whole) if columns < whole else None
                dropped = ~keep_mask(x_BSD.shape, lora.dropout, drops, full, x_BSD.device, of)
                in_BSD = x_BSD.masked_fill(dropped, 0.0).mul_(1.0 / (1.0 - lora.dropout))
            made.append(F.linear(F.linear(in_BSD, down_RD), up_ER).mul_(lora.scaling))
        return tuple(made)

    def normed(self, scale: str, x_BSD: Tensor) -> Tensor:
        """The input of the projections that read the norm with this scale."""
        return rms_norm(x_BSD, getattr(self, scale), self.config.norm_epsilon)


def same(x_BSD: Tensor) -> Tensor:
    return x_BSD


def gated(gate_BSF: Tensor, up_BSF: Tensor) -> Tensor:
    """The input of SwiGLU's last projection."""
    return F.silu(gate_BSF) * up_BSF


def keep_mask(
    shape: torch.Size,
    dropout: float,
    drops: Drops,
    name: str,
    device: torch.device,
    columns: Columns | None = None,
) -> Tensor:
    """Which elements are kept: a hash of seed, parameter name, step, sample and element.

    If the last dim is only some of the `columns`, elements have their numbers in all of them.
    """
    assert len(drops.samples) == shape[0], f"{len(drops.samples)} sample numbers for {shape}"
    numel, threshold = shape[1:].numel(), round(dropout * 2**_BITS)
    kept = torch.empty(shape[0], numel, dtype=torch.bool, device=device)
    for row, sample in enumerate(drops.samples):
        key = _key(drops, name, sample)
        for first in range(0, numel, _AT_ONCE):  # 64 bits an element are too many for all at once
            last = min(first + _AT_ONCE, numel)
            mixed = torch.arange(first, last, device=device)
            if columns is not None:
                line, column = mixed // shape[-1], mixed % shape[-1]
                mixed = line.mul_(columns.number).add_(column).add_(columns.first)
            mixed.add_(1).mul_(_GOLDEN).add_(key)
            for shift, factor in zip((30, 27), _MIX, strict=True):
                mixed = mixed.bitwise_xor_(_shifted(mixed, shift)).mul_(factor)
            mixed.bitwise_xor_(_shifted(mixed, 31))
            kept[row, first:last] = _shifted(mixed, 64 - _BITS) >= threshold
    return kept.view(shape)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """A logical shift to the right of signed numbers."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _key(drops: Drops, name: str, sample: int) -> int:
    text = f"{drops.seed}/{name}/{drops.step}/{sample}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _called(function: Callable[..., Any], *args: object) -> Any:
    return function(*args)


def checkpointed(function: Callable[..., Any], *args: object) -> Any:
    """The function's result; backward calls it again instead of keeping what it computes."""
    # Dropout is a hash of numbers, so there is no state of a random generator to save.
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
