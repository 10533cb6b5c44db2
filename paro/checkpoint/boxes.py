"""Maps flat shards to rectangles of named parameters, which a checkpoint stores.

A state is one tensor of one parameter, named `param.<name>`, `exp_avg.<name>` or
`exp_avg_sq.<name>`, with the parameter's shape; where updates are sent as codes also `sent.<name>`,
the parameter as all ranks compute with it, in the compute dtype. A checkpoint stores states and
rectangles of them; it has no units, ranks or buffer offsets, so that any strategy and world size
can load it. Only `grad_errors.<unit>@<ranks>x<ranks of a group>@<degrees>` belongs to certain ranks
and a strategy: others begin without it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paro.layout import Shape, rectangles
from paro.spec.states import GRAD_ERRORS, PARAM, SENT, FlatShard

# Writing or reading needs twice this much memory in addition to a rank's shards.
MAX_ITEM_BYTES = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxedState:
    """A state and this rank's rectangles of it, by corner (first index); views of its shards."""

    shape: Shape
    dtype: torch.dtype = torch.float32
    rectangles: dict[Shape, Tensor] = field(default_factory=dict)


def boxed_states(
    shards: Iterable[FlatShard], *, writers: Collection[int] = ()
) -> dict[str, BoxedState]:
    """Return every state of the shards' units, with the rectangles this rank holds or must write.

    With `writers`, which include this rank, the replicas of a shard among them each write a part of
    it, in rectangles of at most `MAX_ITEM_BYTES`, because each is written and read in one piece.
    """
    states: dict[str, BoxedState] = {}
    for shard in shards:
        assert shard.values.dim() == 1, f"a {shard.state} shard has shape {shard.values.shape}"
        for placed in shard.layout.boxes:
            name = f"{shard.state}.{placed.box.name}"
            state = states.setdefault(
                name, BoxedState(shape=placed.box.shape, dtype=shard.values.dtype)
            )
            assert state.shape == placed.box.shape, f"{name}: {state.shape} and {placed.box.shape}"
        low, high = shard.own_part(writers) if writers else (0, shard.values.numel())
        for piece in shard.layout.pieces(shard.start + low, shard.start + high):
            mine = states[f"{shard.state}.{piece.box.name}"].rectangles
            base = piece.offset - shard.start - piece.low
            for part in rectangles(piece.box, piece.low, piece.high):
                flat = shard.values.detach()[base + part.low : base + part.high]
                for corner, values in _items(part.start, flat.view(part.extent), bool(writers)):
                    assert corner not in mine, f"{piece.box.name} is held twice at {corner}"
                    mine[corner] = values
    return states


def rectangles_of(states: Mapping[str, BoxedState]) -> dict[tuple[str, Shape], Tensor]:
    """Return the rectangles of all states, by the name of the state and the corner."""
    return {
        (name, corner): values
        for name, state in states.items()
        for corner, values in state.rectangles.items()
    }


def may_be_missing(name: str) -> bool:
    """Return whether runs with other flags, ranks or strategies hold no state of this name."""
    return name.startswith((f"{SENT}.", f"{GRAD_ERRORS}."))


def begin_without(states: Mapping[str, BoxedState], missing: Collection[str]) -> None:
    """Fill states that were read nowhere, from those that were; parameters stay as they are.

    A run that held no parameters as sent computed with the rounded masters. All else begins at 0.
    """
    for name in missing:
        kind, _, parameter = name.partition(".")
        for corner, values in states[name].rectangles.items():
            if kind == SENT:
                values.copy_(states[f"{PARAM}.{parameter}"].rectangles[corner])
            elif kind != PARAM:  # maybe filled from a damaged checkpoint
                values.zero_()


def _items(corner: Shape, values: Tensor, to_write: bool) -> Iterator[tuple[Shape, Tensor]]:
    """Yield a rectangle, cut by rows into items of about `MAX_ITEM_BYTES` if it is to
    be written."""
    if not to_write or values.nbytes <= MAX_ITEM_BYTES or not corner:
        yield corner, values
        return
    num_rows = max(1, MAX_ITEM_BYTES // (values.nbytes // values.shape[0]))
    for index, rows in enumerate(values.split(num_rows)):
        yield (corner[0] + index * num_rows, *corner[1:]), rows
