"""Plans how DCP saves chunked states, and which saved chunks fill the states of a model."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    DefaultSavePlanner,
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

from paro.checkpoint.chunks import ChunkedState
from paro.checkpoint.manifest import DamagedError
from paro.errors import UserError
from paro.layout import Shape, shape_text
from paro.spec.states import PARAM

MISMATCH = "the checkpoint does not match the model"


class ChunkSavePlanner(DefaultSavePlanner):
    """A planner that writes every chunk of a dict of chunked states.

    With `whole` the ranks that save together must hold every state completely.
    """

    def __init__(self, *, whole: bool = True) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.whole = whole

    def create_local_plan(self) -> SavePlan:
        states: dict[str, ChunkedState] = self.state_dict
        items = [
            WriteItem(
                index=MetadataIndex(name, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(offsets, values),
                    properties=TensorProperties(dtype=values.dtype),
                    size=torch.Size(state.shape),
                ),
            )
            for name, state in states.items()
            for offsets, values in state.chunks.items()
        ]
        self.plan = SavePlan(items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Join the plans; with `whole` reject overlaps, as the base class does, and holes."""
        join = super().create_global_plan if self.whole else create_default_global_save_plan
        plans, metadata = join(all_plans)
        for name, state in self.state_dict.items():
            properties, size = TensorProperties(dtype=state.dtype), torch.Size(state.shape)
            held_elsewhere = TensorStorageMetadata(properties=properties, size=size, chunks=[])
            saved: Any = metadata.state_dict_metadata.setdefault(name, held_elsewhere)
            num_elements = sum(chunk.sizes.numel() for chunk in saved.chunks)
            is_whole = num_elements == prod(state.shape)
            assert is_whole or not self.whole, f"{name}: {num_elements} of {state.shape}"
        return plans, metadata

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return _values_at(self.state_dict[write_item.index.fqn], write_item.index)


def items_to_read(
    name: str, state: ChunkedState, metadata: Metadata
) -> list[tuple[ReadItem, Tensor]]:
    """List the reads that fill every chunk of a state from saved chunks of any shape."""
    saved = metadata.state_dict_metadata.get(name)
    assert isinstance(saved, TensorStorageMetadata), f"{name} is a {type(saved)}"
    chunks = [_chunk(offsets, values) for offsets, values in state.chunks.items()]
    items = create_read_items_for_chunk_list(name, saved, chunks)
    num_found = sum(item.lengths.numel() for item in items)
    num_wanted = sum(values.numel() for values in state.chunks.values())
    if num_found != num_wanted:
        raise DamagedError(
            f"{name} has a hole: {num_found} of {num_wanted} elements found; nodes without a "
            "shared file system have the rest if other nodes saved it: load with the same ranks on "
            "the same nodes, under the same strategy"
        )
    return [(item, _values_at(state, item.dest_index)) for item in items]


def check_states(states: dict[str, ChunkedState], saved: Mapping[str, object]) -> None:
    """Raise `UserError` unless a checkpoint has exactly the model's parameters and `states`."""
    for name, state in states.items():
        kind, _, parameter = name.partition(".")
        if name not in saved:
            if kind != PARAM and f"{PARAM}.{parameter}" in saved:
                raise UserError(
                    f"the checkpoint has no {kind} of {parameter}: it did not train there, or by "
                    "another --optimizer: give the --trainable and --optimizer of that run, or "
                    "--no-load-optim or --finetune"
                )
            what = parameter if kind == PARAM else f"{kind} of {parameter}"
            raise UserError(f"{MISMATCH}: only the model has {what}")
        there = getattr(saved[name], "size", None)
        if there is None or tuple(there) != state.shape:
            found = "no tensor" if there is None else shape_text(there)
            raise UserError(
                f"{MISMATCH}: {name} is {found} there and {shape_text(state.shape)} here"
            )
    for name in saved:
        kind, _, parameter = name.partition(".")
        if kind == PARAM and name not in states:
            raise UserError(f"{MISMATCH}: only the checkpoint has {parameter}")


def _chunk(offsets: Shape, values: Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=values.shape)


def _values_at(state: ChunkedState, index: MetadataIndex) -> Tensor:
    assert index.offset is not None, f"{index.fqn} without offsets"
    return state.chunks[tuple(index.offset)]
