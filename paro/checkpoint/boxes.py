"""Maps flat shards to rectangles of named parameters; DCP planners that save and load them.

A state is one tensor of one parameter, named `param.<name>`, `exp_avg.<name>` or
`exp_avg_sq.<name>`, with the parameter's shape. A checkpoint stores states and rectangles of them;
it has no units, ranks or buffer offsets, so that any strategy and world size can load it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlan,
    Metadata,
    ReadItem,
    SavePlan,
    TensorStorageMetadata,
    WriteItem,
)
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from paro.checkpoint.manifest import DamagedError
from paro.errors import UserError
from paro.layout import Shape, rectangles
from paro.sharding.buffers import FlatShard

PARAM = "param"

# Writing or reading needs twice this much memory in addition to a rank's shards.
MAX_ITEM_BYTES = 2**24
MISMATCH = "the checkpoint does not match the model"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxedState:
    """A state and this rank's rectangles of it, by corner (first index); views of its shards."""

    shape: Shape
    dtype: torch.dtype = torch.float32
    rectangles: dict[Shape, Tensor] = field(default_factory=dict)

    def chunks(self) -> list[ChunkStorageMetadata]:
        """The rectangles as DCP's chunks."""
        return [_chunk(corner, values) for corner, values in self.rectangles.items()]


def boxed_states(
    shards: Iterable[FlatShard], *, writers: Collection[int] = ()
) -> dict[str, BoxedState]:
    """Every state of the shards' units, with the rectangles this rank holds or must write.

    With `writers`, which include this rank, the replicas of a shard among them each write a part of
    it, in rectangles of at most `MAX_ITEM_BYTES`, because each is written and read in one piece.
    """
    states: dict[str, BoxedState] = {}
    for shard in shards:
        assert shard.values.dim() == 1, f"a {shard.state} shard has shape {shard.values.shape}"
        for span in shard.layout.spans:
            name = f"{shard.state}.{span.box.name}"
            state = states.setdefault(
                name, BoxedState(shape=span.box.shape, dtype=shard.values.dtype)
            )
            assert state.shape == span.box.shape, f"{name}: {state.shape} and {span.box.shape}"
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


def _items(corner: Shape, values: Tensor, to_write: bool) -> Iterator[tuple[Shape, Tensor]]:
    """A rectangle, cut by rows into items of about `MAX_ITEM_BYTES` if it is to be written."""
    if not to_write or values.nbytes <= MAX_ITEM_BYTES or not corner:
        yield corner, values
        return
    num_rows = max(1, MAX_ITEM_BYTES // (values.nbytes // values.shape[0]))
    for index, rows in enumerate(values.split(num_rows)):
        yield (corner[0] + index * num_rows, *corner[1:]), rows


class BoxSavePlanner(DefaultSavePlanner):
    """Plans to write every rectangle of a dict of boxed states.

    With `whole` the ranks that save together must hold every state completely.
    """

    def __init__(self, *, whole: bool = True) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.whole = whole

    def create_local_plan(self) -> SavePlan:
        states: dict[str, BoxedState] = self.state_dict
        self.plan = SavePlan(
            [
                _write_item(name, state.shape, corner, values)
                for name, state in states.items()
                for corner, values in state.rectangles.items()
            ]
        )
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """As the base class, which rejects overlaps; this one also rejects holes."""
        if not self.whole:
            plans, metadata = create_default_global_save_plan(all_plans)
            for name, state in self.state_dict.items():
                metadata.state_dict_metadata.setdefault(
                    name,  # held by other nodes alone
                    TensorStorageMetadata(
                        properties=TensorProperties(dtype=state.dtype),
                        size=torch.Size(state.shape),
                        chunks=[],
                    ),
                )
            return plans, metadata
        plans, metadata = super().create_global_plan(all_plans)
        for name, state in self.state_dict.items():
            saved = metadata.state_dict_metadata.get(name)
            chunks = saved.chunks if isinstance(saved, TensorStorageMetadata) else []
            num_elements = sum(chunk.sizes.numel() for chunk in chunks)
            assert num_elements == prod(state.shape), f"{name}: {num_elements} of {state.shape}"
        return plans, metadata

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return _rectangle(self.state_dict, write_item.index)


class BoxLoadPlanner(DefaultLoadPlanner):
    """Plans to fill every rectangle of a dict of boxed states from any saved rectangles."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """As the base class, which would reject values that are not tensors."""
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None, "no metadata"
        items: list[ReadItem] = []
        for name, state in self.state_dict.items():
            saved = self.metadata.state_dict_metadata.get(name)
            assert isinstance(saved, TensorStorageMetadata), f"{name} is a {type(saved)}"
            reads = create_read_items_for_chunk_list(name, saved, state.chunks())
            found = sum(item.lengths.numel() for item in reads)
            wanted = sum(values.numel() for values in state.rectangles.values())
            if found != wanted:
                raise DamagedError(
                    f"{name} has a hole: {found} of {wanted} elements found; nodes without a "
                    "shared file system have the rest if other nodes saved it: load with the same "
                    "ranks on the same nodes, under the same strategy"
                )
            items += reads
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _rectangle(self.state_dict, index)


def check_states(states: dict[str, BoxedState], metadata: Metadata) -> None:
    """Raises `UserError` unless a checkpoint has exactly our parameters, and these states."""
    saved = metadata.state_dict_metadata
    for name, state in states.items():
        kind, _, parameter = name.partition(".")
        if name not in saved:
            what = parameter if kind == PARAM else f"{kind} of {parameter}"
            raise UserError(f"{MISMATCH}: only the model has {what}")
        there = getattr(saved[name], "size", None)
        if there is None or tuple(there) != state.shape:
            raise UserError(
                f"{MISMATCH}: {name} is {_text(there)} there and {_text(state.shape)} here"
            )
    for name in saved:
        kind, _, parameter = name.partition(".")
        if kind == PARAM and name not in states:
            raise UserError(f"{MISMATCH}: only the checkpoint has {parameter}")


def _text(shape: Iterable[int] | None) -> str:
    return "x".join(map(str, shape)) or "a scalar" if shape is not None else "no tensor"


def _chunk(corner: Shape, values: Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(corner), sizes=values.shape)


def _write_item(name: str, shape: Shape, corner: Shape, values: Tensor) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, corner),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(corner, values),
            properties=TensorProperties(dtype=values.dtype),
            size=torch.Size(shape),
        ),
    )


def _rectangle(states: dict[str, BoxedState], index: MetadataIndex) -> Tensor:
    assert index.offset is not None, f"{index.fqn} without a corner"
    return states[index.fqn].rectangles[tuple(index.offset)]
