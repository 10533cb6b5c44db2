"""The adapters' part of a projection, and a dropout that does not depend on the number of ranks."""

# Letters as in model/llama.py; R is the adapters' rank.

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from model.config import LlamaConfig
from model.lora_config import LoraConfig, down_name, up_name
from model.matmul import sink_of, weight_grad
from model.norm import SharedInput

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_MIX = (-4658895280553007687, -7723592293110705685)  # the multipliers of SplitMix64
_BITS = 24
_AT_ONCE = 2**22  # elements of a dropout mask that are hashed at a time


class DropKey(NamedTuple):
    """Numbers that decide which elements are dropped, equal on any number of ranks."""

    seed: int
    step: int
    samples: tuple[int, ...]  # index in the global batch of each sample of the micro-batch
    ranges: tuple[range, ...] | None = None  # positions of this rank's tokens; None: from 0 on


def drops_of(
    config: object, seed: int, step: int, data_parallel_rank: int, data_parallel_size: int
) -> Callable[[int, int, tuple[range, ...] | None], dict[str, Any]]:
    """Return a function that makes a micro-batch's `drops` argument; empty without dropout.

    A sample's number in the global batch is the same for any number of ranks.
    """
    if not (isinstance(config, LlamaConfig) and config.lora and config.lora.dropout):
        return lambda _index, _size, _ranges: {}

    def drops(index: int, size: int, ranges: tuple[range, ...] | None) -> dict[str, Any]:
        first = (index * data_parallel_size + data_parallel_rank) * size
        return {"drops": DropKey(seed, step, tuple(range(first, first + size)), ranges)}

    return drops


class Columns(NamedTuple):
    """The place of a column slice in a weight: first column, and columns of the whole weight."""

    first: int
    number: int


MakeMask = Callable[..., Tensor]  # (shape, device) -> mask of elements that dropout leaves


class AdaptedBlock(nn.Module):
    """A block whose projections may have adapters."""

    def __init__(self, config: LlamaConfig, *, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.starts: dict[str, int] = {}  # name of a sliced weight: its first row or column

    def adapts(self, name: str) -> bool:
        """Return whether the weight of this name has an adapter."""
        lora = self.config.lora
        return lora is not None and name in lora.targets

    def adapted(
        self,
        names: Sequence[str],
        outputs: Sequence[Tensor],
        shared: SharedInput,
        sources: Sequence[Tensor],
        drops: DropKey | None,
    ) -> tuple[Tensor, ...]:
        """Add the outputs of adapters to those of the weights of these names.

        All of them read the `shared` input, which is made of `sources`. Without `drops` nothing is
        dropped.
        """
        lora, found = self.config.lora, dict(zip(names, outputs, strict=True))
        targets = [name for name in names if self.adapts(name)]
        if lora is None or not targets:
            return tuple(outputs)
        columns = shared.num_columns
        pairs = [self._pair(name, columns, found[name].shape[-1]) for name in targets]
        masks = tuple(self._mask_of(name, columns, drops) for name in targets)
        added = _LowRank.apply(
            shared,
            lora,
            masks,
            *sources,
            *(found[name] for name in targets),
            *(down for down, _ in pairs),
            *(up for _, up in pairs),
        )
        found.update(zip(targets, added, strict=True))
        return tuple(found.values())

    def adapted_alone(
        self,
        name: str,
        output: Tensor,
        make_input: Callable[..., Tensor],
        sources: Sequence[Tensor],
        drops: DropKey | None,
    ) -> Tensor:
        """Add an adapter's output to that of a weight which alone reads `make_input(*sources)`."""
        shared = SharedInput(make_input, *sources)
        (found,) = self.adapted((name,), (output,), shared, sources, drops)
        shared.release()
        return found

    def _pair(self, name: str, columns: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return an adapter's matrices, or their slices if the weight is a slice."""
        down_RD, up_ER = getattr(self, down_name(name)), getattr(self, up_name(name))
        first = self.starts.get(name, 0)
        if columns < down_RD.shape[1]:
            return down_RD[:, first : first + columns], up_ER
        if rows < up_ER.shape[0]:
            return down_RD, up_ER[first : first + rows]
        return down_RD, up_ER

    def _mask_of(self, name: str, columns: int, drops: DropKey | None) -> MakeMask | None:
        """Make the mask of a weight's input; None if nothing is dropped."""
        lora = self.config.lora
        if lora is None or drops is None or lora.dropout == 0.0:
            return None
        whole = getattr(self, down_name(name)).shape[1]
        part = Columns(self.starts.get(name, 0), whole) if columns < whole else None
        full = f"blocks.{self.layer}.{name}"
        return partial(keep_mask, dropout=lora.dropout, drops=drops, name=full, columns=part)


class _LowRank(torch.autograd.Function):
    """`output + scaling * up @ down @ dropout(input)` of the weights that share an input.

    Saves no activation but what the input is made of.
    """

    @staticmethod
    def forward(
        ctx: Any,
        shared: SharedInput,
        lora: LoraConfig,
        masks: Sequence[MakeMask | None],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        outputs, downs, ups = _thirds(tensors, len(masks))
        sources = tensors[: -3 * len(masks)]
        ctx.save_for_backward(*sources, *downs, *ups)
        ctx.shared, ctx.lora, ctx.masks = shared, lora, masks
        ctx.sinks = [*map(sink_of, downs)], [*map(sink_of, ups)]
        x_BSD = shared.in_forward(backward_follows=any(ctx.needs_input_grad))
        made = []
        for out_BSE, down_RD, up_ER, make_mask in zip(outputs, downs, ups, masks, strict=True):
            in_BSD = x_BSD
            if make_mask is not None:
                kept = make_mask(x_BSD.shape, device=x_BSD.device)
                in_BSD = _dropped(x_BSD, kept, lora.dropout)
            low_TR = (in_BSD.flatten(0, -2) @ down_RD.t()).mul_(lora.scaling)
            sum_TE = torch.addmm(out_BSE.flatten(0, -2), low_TR, up_ER.t())
            made.append(sum_TE.view(out_BSE.shape))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shared, lora, count = ctx.shared, ctx.lora, len(grads)
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[3:]
        sources, downs, ups = saved[: -2 * count], saved[-2 * count : -count], saved[-count:]
        needs_sources = needed[: len(sources)]
        x_TD = shared.in_backward(sources, needs_sources)
        grad_downs, grad_ups = [], []
        for index, (grad, down_RD, up_ER) in enumerate(zip(grads, downs, ups, strict=True)):
            in_TD, make_mask, kept = x_TD, ctx.masks[index], None
            if make_mask is not None:
                shape = (*grad.shape[:-1], x_TD.shape[-1])
                kept = make_mask(torch.Size(shape), device=x_TD.device).flatten(0, -2)
                in_TD = _dropped(x_TD, kept, lora.dropout)
            grad_TE = grad.flatten(0, -2)
            grad_TR = (grad_TE @ up_ER).mul_(lora.scaling)
            low_TR = (in_TD @ down_RD.t()).mul_(lora.scaling)
            grad_ups.append(weight_grad(grad_TE, low_TR, ctx.sinks[1][index]))
            grad_downs.append(weight_grad(grad_TR, in_TD, ctx.sinks[0][index]))
            if kept is not None and any(needs_sources):
                shared.add(_dropped(grad_TR @ down_RD, kept, lora.dropout))
            elif any(needs_sources):
                shared.add_products([grad_TR], iter([down_RD]))
        return None, None, None, *shared.source_grads(), *grads, *grad_downs, *grad_ups


def _thirds(tensors: Sequence[Tensor], count: int) -> Iterator[Sequence[Tensor]]:
    """Return the last three runs of `count` tensors."""
    last = tensors[len(tensors) - 3 * count :]
    return (last[first : first + count] for first in range(0, 3 * count, count))


def _dropped(x: Tensor, kept: Tensor, dropout: float) -> Tensor:
    """Zero the elements that are not kept, and scale the others so that the mean stays."""
    return x.masked_fill(~kept, 0.0).mul_(1.0 / (1.0 - dropout))


def keep_mask(
    shape: torch.Size,
    dropout: float,
    drops: DropKey,
    name: str,
    device: torch.device,
    columns: Columns | None = None,
) -> Tensor:
    """Draw which elements stay: a hash of seed, parameter name, step, sample and element.

    An element's number counts all columns and all tokens of the sample, also if this rank has only
    some `columns` or ranges of tokens. So the mask does not depend on the number of ranks.
    """
    assert len(drops.samples) == shape[0], f"{len(drops.samples)} sample numbers for {shape}"
    numel, threshold = shape[1:].numel(), round(dropout * 2**_BITS)
    kept = torch.empty(shape[0], numel, dtype=torch.bool, device=device)
    for row, sample in enumerate(drops.samples):
        key = _key(drops, name, sample)
        for first, last, shift in _runs(drops.ranges or (range(shape[1]),), shape[2]):
            mixed = torch.arange(first + shift, last + shift, device=device)
            if columns is not None:
                line, column = mixed // shape[-1], mixed % shape[-1]
                mixed = line.mul_(columns.number).add_(column).add_(columns.first)
            mixed.add_(1).mul_(_GOLDEN).add_(key)
            for bits, factor in zip((30, 27), _MIX, strict=True):
                mixed = mixed.bitwise_xor_(_shifted(mixed, bits)).mul_(factor)
            mixed.bitwise_xor_(_shifted(mixed, 31))
            kept[row, first:last] = _shifted(mixed, 64 - _BITS) >= threshold
    return kept.view(shape)


def _runs(ranges: Sequence[range], width: int) -> Iterator[tuple[int, int, int]]:
    """Yield runs of elements, with the offset from their place in `ranges` to the whole sample.

    Runs are short, since hashing takes 64 bits per element.
    """
    begin = 0
    for each in ranges:
        end = begin + len(each) * width
        for first in range(begin, end, _AT_ONCE):
            yield first, min(first + _AT_ONCE, end), each.start * width - begin
        begin = end


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Return a logical shift to the right of signed numbers."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _key(drops: DropKey, name: str, sample: int) -> int:
    text = f"{drops.seed}/{name}/{drops.step}/{sample}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
