"""The optimizer states that are in host memory (--optimizer-cpu-offload), and their bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from paro.spec.sharding_spec import ModelStateBytes, ShardingSpec

NUM_SLOTS = 2  # device buffers through which states pass: one is copied while another is updated


class OffloadedStates(NamedTuple):
    """The buffers whose optimizer states are in host memory, and bytes of a rank."""

    numbers: tuple[int, ...] = ()  # of the buffers, in order
    host_bytes: int = 0  # their states, which cross PCIe twice a step
    slots: tuple[int, ...] = ()  # of each device buffer in which they are updated, in turn


def offloaded(specs: Sequence[ShardingSpec]) -> OffloadedStates:
    """Return the last buffers that hold at least --optimizer-offload-fraction of the states."""
    fraction = specs[0].precision.offload_fraction
    if not fraction:
        return OffloadedStates()
    sizes = [spec.optimizer_bytes for spec in specs]
    wanted, held, numbers = fraction * sum(sizes), 0, list[int]()
    for number in reversed(range(len(sizes))):
        if held < wanted and sizes[number]:
            held += sizes[number]
            numbers.append(number)
    numbers.reverse()
    in_slots = (numbers[at::NUM_SLOTS] for at in range(NUM_SLOTS))
    slots = (max(sizes[number] for number in in_slot) for in_slot in in_slots if in_slot)
    return OffloadedStates(tuple(numbers), held, tuple(slots))


def state_bytes(specs: Sequence[ShardingSpec], device_type: str = "cpu") -> ModelStateBytes:
    """Count bytes of model state in a rank's device memory, which for a CPU rank is the host's.

    Several buffers may share a spec.
    """
    of_kinds = ([n * size for size in s.state_bytes] for s, n in Counter(specs).items())
    params, grads, optim = map(sum, zip(*of_kinds, strict=True))
    on_host = offloaded(specs).host_bytes if device_type == "cuda" else 0
    return ModelStateBytes(params, grads, optim - on_host)
