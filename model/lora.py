"""The adapters' part of a projection, and a dropout that does not depend on the number of ranks."""

# Letters as in model/llama.py; R is the adapters' rank.

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from model.config import LlamaConfig, LoraConfig, down_name, up_name
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
    config: object, seed: int, step: int, samples: range, ranges: tuple[range, ...] | None
) -> dict[str, Any]:
    """Return a micro-batch's `drops` argument; empty without dropout."""
    if not (isinstance(config, LlamaConfig) and config.lora and config.lora.dropout):
        return {}
    return {"drops": DropKey(seed, step, tuple(samples), ranges)}


MakeMask = Callable[..., Tensor]  # (shape, device) -> mask of elements that dropout leaves


class AdaptedBlock(nn.Module):
    """A block whose projections may have adapters."""

    def __init__(self, config: LlamaConfig, *, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.starts: dict[str, int] = {}  # name of a sliced weight: its first row or column

    def adapted(
        self,
        name: str,
        output: Tensor,
        shared: SharedInput,
        sources: Sequence[Tensor],
        drops: DropKey | None,
    ) -> Tensor:
        """Add the output of the adapter, if any, of the weight of this name to the weight's.

        Both read the `shared` input, which is made of `sources`. Without `drops` nothing is
        dropped.
        """
        lora = self.config.lora
        if lora is None or name not in lora.targets:
            return output
        down_RD, up_ER = getattr(self, down_name(name)), getattr(self, up_name(name))
        first, columns, rows = self.starts.get(name, 0), sources[0].shape[-1], output.shape[-1]
        part = (first, down_RD.shape[1]) if columns < down_RD.shape[1] else None
        mask: MakeMask | None = None
        if drops is not None and lora.dropout > 0.0:
            full = f"blocks.{self.layer}.{name}"
            mask = partial(keep_mask, dropout=lora.dropout, drops=drops, name=full, columns=part)
        if part is not None:
            down_RD = down_RD[:, first : first + columns]
        elif rows < up_ER.shape[0]:
            up_ER = up_ER[first : first + rows]
        return _LowRank.apply(shared, lora, mask, output, down_RD, up_ER, *sources)

    def adapted_alone(
        self,
        name: str,
        output: Tensor,
        make_input: Callable[..., Tensor],
        sources: Sequence[Tensor],
        drops: DropKey | None,
    ) -> Tensor:
        """Add an adapter's output to that of a weight which alone reads `make_input(*sources)`."""
        if self.config.lora is None or name not in self.config.lora.targets:
            return output
        shared = SharedInput(make_input, *sources)
        output = self.adapted(name, output, shared, sources, drops)
        shared.release()
        return output


class _LowRank(torch.autograd.Function):
    """`output + scaling * up @ down @ dropout(input)` of one weight.

    Saves no activation but what the input is made of.
    """

    @staticmethod
    def forward(
        ctx: Any,
        shared: SharedInput,
        lora: LoraConfig,
        make_mask: MakeMask | None,
        out_BSE: Tensor,
        down_RD: Tensor,
        up_ER: Tensor,
        *sources: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(down_RD, up_ER, *sources)
        ctx.shared, ctx.lora, ctx.make_mask = shared, lora, make_mask
        ctx.sinks = sink_of(down_RD), sink_of(up_ER)
        in_BSD = shared.in_forward(backward_follows=any(ctx.needs_input_grad))
        if make_mask is not None:
            in_BSD = _dropped(in_BSD, make_mask(in_BSD.shape, device=in_BSD.device), lora.dropout)
        low_TR = (in_BSD.flatten(0, -2) @ down_RD.t()).mul_(lora.scaling)
        sum_TE = torch.addmm(out_BSE.flatten(0, -2), low_TR, up_ER.t())
        return sum_TE.view(out_BSE.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shared, lora, (grad_BSE,) = ctx.shared, ctx.lora, grads
        down_RD, up_ER, *sources = ctx.saved_tensors
        needs_sources = ctx.needs_input_grad[6:]
        x_TD = in_TD = shared.in_backward(sources, needs_sources)
        mask: Tensor | None = None
        if ctx.make_mask is not None:
            shape = torch.Size((*grad_BSE.shape[:-1], x_TD.shape[-1]))
            mask = ctx.make_mask(shape, device=x_TD.device).flatten(0, -2)
            in_TD = _dropped(x_TD, mask, lora.dropout)
        grad_TE = grad_BSE.flatten(0, -2)
        grad_TR = (grad_TE @ up_ER).mul_(lora.scaling)
        low_TR = (in_TD @ down_RD.t()).mul_(lora.scaling)
        grad_up = weight_grad(grad_TE, low_TR, ctx.sinks[1])
        grad_down = weight_grad(grad_TR, in_TD, ctx.sinks[0])
        if mask is not None and any(needs_sources):
            shared.add(_dropped(grad_TR @ down_RD, mask, lora.dropout))
        elif any(needs_sources):
            shared.add_products([grad_TR], iter([down_RD]))
        return None, None, None, grad_BSE, grad_down, grad_up, *shared.source_grads()


def _dropped(x: Tensor, mask: Tensor, dropout: float) -> Tensor:
    """Zero the elements that are not kept, and scale the others so that the mean stays."""
    return x.masked_fill(~mask, 0.0).mul_(1.0 / (1.0 - dropout))


def keep_mask(
    shape: torch.Size,
    dropout: float,
    drops: DropKey,
    name: str,
    device: torch.device,
    columns: tuple[int, int] | None = None,
) -> Tensor:
    """Draw which elements stay: a hash of seed, parameter name, step, sample and element.

    An element's number counts all columns and all tokens of the sample, also if this rank has only
    ranges of tokens, or some columns: `columns` are the first one and the number of all. So the
    mask does not depend on the number of ranks.
    """
    batch, seq, width = shape
    assert len(drops.samples) == batch, f"{len(drops.samples)} sample numbers for {shape}"
    first, all_columns = columns or (0, width)
    columns_D = torch.arange(first, first + width, device=device)
    parts = [torch.arange(r.start, r.stop, device=device) for r in drops.ranges or (range(seq),)]
    first_S = torch.cat(parts).mul_(all_columns)  # the first element of every token
    threshold, mask = round(dropout * 2**_BITS), torch.empty(shape, dtype=torch.bool, device=device)
    for row, sample in enumerate(drops.samples):
        text = f"{drops.seed}/{name}/{drops.step}/{sample}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        key, stop = int.from_bytes(digest, "little", signed=True), 0
        for first_T in first_S.split(max(1, _AT_ONCE // width)):  # 64 bits per element
            start, stop = stop, stop + len(first_T)
            mixed = first_T[:, None] + columns_D
            mixed.add_(1).mul_(_GOLDEN).add_(key)
            for bits, factor in zip((30, 27), _MIX, strict=True):
                mixed = mixed.bitwise_xor_(_shifted(mixed, bits)).mul_(factor)
            mixed.bitwise_xor_(_shifted(mixed, 31))
            mask[row, start:stop] = _shifted(mixed, 64 - _BITS) >= threshold
    return mask


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Return a logical shift to the right of signed numbers."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
