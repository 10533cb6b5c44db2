"""Optimizer states in host memory, which are on the device only while they are updated."""

# [Note: offload]
# The states of the last units are in one block of host memory, page-locked for a GPU. In an update
# they pass through two device buffers, the slots, on two comm streams of their own:
#
#     in                a    b         c         d              host to device
#     training thread        update a  update b  update c       the device's kernel
#     out                              a         b       c      device to host
#
# c comes into the slot of a, once a is back. After the last update the host waits until all are
# back: outside an update the host's memory is valid, for checkpoints and norms.

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paro.checkpoint.background import cut_up
from paro.distributed.comm_stream import DONE, Event
from paro.sharding.buffers import TORCH_TYPES, BufferTally, ElasticBuffer
from paro.sharding.shards import ShardingContext, UnitShards
from paro.spec.offload import offloaded

if TYPE_CHECKING:
    from paro.optim.optimizer import UnitOptimizer

STREAMS = "offload in", "offload out"  # to the device, and back


@dataclass(slots=True, eq=False)
class HostStates:
    """The optimizer states of one unit by name, in host memory and in the slot for its update."""

    at_rest: dict[str, Tensor]
    in_slot: dict[str, Tensor]
    fetched: Event = DONE
    returned: Event = DONE


class Offload:
    """The optimizer states of a rank that are in host memory; maybe none.

    The slots are allocated until `free_slots`, so that views of them can be made.
    """

    def __init__(self, units: Sequence[UnitShards], context: ShardingContext) -> None:
        self._device, self._streams = context.device, context.collectives.groups.resources.streams
        host_states = offloaded([unit.spec for unit in units])
        chosen = [units[number] for number in host_states.numbers]
        kinds = [_states(unit, torch.device("meta")) for unit in chosen]
        self._slots = [
            ElasticBuffer(size // 4, dtype=torch.float32, device=self._device, tally=BufferTally())
            for size in host_states.slots
        ]
        for slot in self._slots:
            slot.alloc()
        in_slots = [  # no padding: ranges, which are multiples of ALIGN, keep states aligned
            cut_up(slot.values.view(torch.uint8), [*kind.values()], align=1)
            for slot, kind in zip(cycle(self._slots), kinds, strict=False)
        ]
        where = "meta" if self._device.type == "meta" else "cpu"
        block = torch.zeros(host_states.host_bytes, dtype=torch.uint8, device=where)
        at_rest = iter(cut_up(block, [*chain.from_iterable(in_slots)], align=1))
        self.of_units = {
            unit: HostStates(
                dict(zip(kind, at_rest, strict=False)), dict(zip(kind, views, strict=True))
            )
            for unit, kind, views in zip(chosen, kinds, in_slots, strict=True)
        }

    def states_of(self, unit: UnitShards) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the optimizer states of a unit by name, at rest and as an update changes them."""
        if unit in self.of_units:
            return {**self.of_units[unit].at_rest}, {**self.of_units[unit].in_slot}
        states = _states(unit, self._device)
        return states, states

    def free_slots(self) -> None:
        """Free the device memory of the slots; their views stay valid for the next update."""
        for slot in self._slots:
            slot.free()

    def during_update(self, parts: Iterable[UnitOptimizer]) -> Iterator[UnitOptimizer]:
        """Yield the units to update, each while its states are on the device."""
        to_come = deque(self.of_units.values())
        for slot in self._slots:
            slot.alloc()
        for _ in self._slots:
            self._fetch(to_come.popleft())
        for part in parts:
            states = self.of_units.get(part.unit)
            if states is None:
                yield part
                continue
            states.fetched.wait()
            yield part
            copy = partial(_copy, [*states.in_slot.values()], [*states.at_rest.values()])
            states.returned = self._streams.submit(STREAMS[1], copy)
            if to_come:
                self._fetch(to_come.popleft(), states.returned)
        for states in self.of_units.values():
            states.returned.wait()
        if self.of_units and self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self.free_slots()

    def _fetch(self, states: HostStates, after: Event = DONE) -> None:
        copy = partial(_copy, [*states.at_rest.values()], [*states.in_slot.values()])
        states.fetched = self._streams.submit(STREAMS[0], copy, after=after)


def _states(unit: UnitShards, device: torch.device) -> dict[str, Tensor]:
    """Make the optimizer states of a unit, zeros, but for a master that is the parameters."""
    return {
        state.name: torch.zeros(length, dtype=TORCH_TYPES[state.dtype], device=device)
        for state, length in unit.spec.optimizer_numels(unit.optim_grad.numel()).items()
    }


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)
