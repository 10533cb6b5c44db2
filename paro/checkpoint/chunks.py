"""Maps flat shards to chunks of named parameters, which a checkpoint stores.

A state is one tensor of one parameter, with the parameter's shape. A checkpoint stores states in
chunks, without units, ranks or buffer offsets, so that any strategy and world size can load it:

    param.NAME, exp_avg.NAME, exp_avg_sq.NAME    the parameter (master) and its moments
    ema.NAME      with averaged weights: the average of the parameter
    sent.NAME     with quantized updates: the parameter in the compute dtype, as all ranks have it
    outer_anchor.NAME, outer_momentum.NAME    with outer steps, where `param` is the reference
    outer_master@GROUP.NAME, exp_avg@GROUP.NAME    of a group that trains alone; moments without a
                  group are of group 0
    grad_errors.UNIT@RANKSxRANKS_PER_GROUP@DEGREES    only for equal ranks and an equal strategy;
                  other runs begin without
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paro.layout import Shape, split_range
from paro.spec.states import BEGUN, EMA, GRAD_ERRORS, OUTER_MOMENTUM, PARAM, SENT, FlatShard

# Bytes of a chunk that is written or read at once, which takes twice as much additional memory.
MAX_ITEM_BYTES = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedState:
    """A state and this rank's chunks of it: {index of the first element: view of a shard}."""

    shape: Shape
    dtype: torch.dtype = torch.float32
    chunks: dict[Shape, Tensor] = field(default_factory=dict)


def chunked_states(
    shards: Iterable[FlatShard], *, writers: Collection[int] = ()
) -> dict[str, ChunkedState]:
    """Return every state of the shards' units, with the chunks this rank holds or must write.

    With `writers`, which include this rank, each replica of a shard among the writers writes a part
    of the shard, in chunks of about `MAX_ITEM_BYTES`, because each chunk is written at once.
    """
    states: dict[str, ChunkedState] = {}
    for shard in shards:
        assert shard.values.dim() == 1, f"a {shard.state} shard has shape {shard.values.shape}"
        for placed in shard.layout.chunks:
            state = ChunkedState(shape=placed.chunk.shape, dtype=shard.values.dtype)
            states.setdefault(f"{shard.state}.{placed.chunk.name}", state)
        low, high = shard.own_part(writers) if writers else (0, shard.values.numel())
        for part in shard.layout.chunk_ranges(shard.start + low, shard.start + high):
            mine = states[f"{shard.state}.{part.chunk.name}"].chunks
            base = part.offset - shard.start - part.low
            for begin, chunk in split_range(part.chunk, part.low, part.high):
                flat = shard.values.detach()[base + begin : base + begin + chunk.numel]
                for offsets, values in _items(chunk.offsets, flat.view(chunk.sizes), bool(writers)):
                    assert offsets not in mine, f"{part.chunk.name} is held twice at {offsets}"
                    mine[offsets] = values
    return states


def chunks_of(states: Mapping[str, ChunkedState]) -> dict[tuple[str, Shape], Tensor]:
    """Return the chunks of all states, by the name of the state and the offsets."""
    return {(name, o): v for name, state in states.items() for o, v in state.chunks.items()}


def may_be_missing(name: str) -> bool:
    """Return whether runs with other flags, ranks or strategies may lack the state `name`."""
    kinds = f"{SENT}.", f"{EMA}.", f"{GRAD_ERRORS}.", f"{OUTER_MOMENTUM}.", f"{BEGUN}@"
    return name.startswith(kinds)


def begin_without(states: Mapping[str, ChunkedState], missing: Collection[str]) -> None:
    """Fill the `missing` states, which no checkpoint held; missing parameters stay as they are.

    `sent` states and averages are copied from the parameters: a run without `sent` states computed
    with rounded masters. All other states begin at 0.
    """
    for name in missing:
        kind, _, parameter = name.partition(".")
        for offsets, values in states[name].chunks.items():
            if kind in (SENT, EMA):
                values.copy_(states[f"{PARAM}.{parameter}"].chunks[offsets])
            elif kind != PARAM:  # not 0 after a read from a damaged checkpoint
                values.zero_()


def _items(offsets: Shape, values: Tensor, to_write: bool) -> Iterator[tuple[Shape, Tensor]]:
    """Yield a chunk or, `to_write`, parts of about `MAX_ITEM_BYTES`, cut by rows."""
    if not to_write or values.nbytes <= MAX_ITEM_BYTES or not offsets:
        yield offsets, values
        return
    num_rows = max(1, MAX_ITEM_BYTES // (values.nbytes // values.shape[0]))
    for index, rows in enumerate(values.split(num_rows)):
        yield (offsets[0] + index * num_rows, *offsets[1:]), rows
