"""Measures a rank's memory: of the device, in use without a model, and of NCCL's communicators."""

# A communicator is measured as training makes it: created with its process group and used once,
# since NCCL allocates some buffers only at the first use. The first communicator of a process also
# loads NCCL's kernels for good; these bytes count as context of the process.

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from paro.collectives.api import make_collectives
from paro.collectives.choice import AlgorithmChoice
from paro.collectives.interface import CollectiveRequest, Collectives
from paro.collectives.schedule import Op
from paro.distributed.control import Control
from paro.distributed.groups import make_groups, make_resources
from paro.distributed.process_group import RuntimeConfig
from paro.machine.machine import Device
from paro.report.memory import anonymous_bytes
from paro.topology import COLLECTIVE_STREAMS, AxisSpan, StreamKind, Topology

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # identifies this machine, in any container
_NUM_BYTES = 32 << 20  # size of a collective for which NCCL's protocol has the largest buffers


def memory_of_rank(control: Control) -> int:
    """Return a GPU's memory, or an equal share of the machine's memory for each rank on it."""
    if control.device.type == "cuda":
        return int(torch.cuda.get_device_properties(control.device).total_memory)
    machine = BOOT_ID.read_text().strip()
    sharing = control.gather(machine).count(machine)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // sharing


def bytes_in_use(device: torch.device) -> int:
    """Return the bytes that a rank uses without a model: libraries, or a GPU's context."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        return max(0, total - free - torch.cuda.memory_reserved(device))
    return anonymous_bytes()


def with_communicators(
    device: Device, control: Control, topology: Topology, config: RuntimeConfig
) -> Device:
    """Add the memory of NCCL's communicators; collective. CPU ranks have none."""
    if control.device.type != "cuda":
        return device
    communicator, loaded = measure_communicators(control, topology, config)
    reserved = min(device.reserved_bytes + loaded, device.memory_bytes - 1)
    return replace(device, reserved_bytes=reserved, communicator_bytes=communicator)


def measure_communicators(
    control: Control, topology: Topology, config: RuntimeConfig
) -> tuple[int, int]:
    """Make and use groups along each axis and along all axes, for gathers and reductions.

    Return the most bytes of one group's communicator, and the bytes that the first communicator of
    a process takes in addition.
    """
    axes = topology.axes
    spans: list[AxisSpan] = [(axis,) for axis in axes]
    spans += [axes] * (len(axes) > 1)
    made: list[Collectives] = []
    sizes: list[int] = []
    for kind, span in [
        (StreamKind.GATHER, spans[0]),
        *((u, s) for s in spans for u in COLLECTIVE_STREAMS),
    ]:
        before = bytes_in_use(control.device)
        made.append(_make_and_use(control, topology, config, kind, span))
        sizes.append(bytes_in_use(control.device) - before)
    control.barrier()
    for collectives in made:
        collectives.close()
    by_rank = control.gather(tuple(sizes))
    communicator = max(0, *(size for _, *others in by_rank for size in others))
    loaded = max(0, *(first - second for first, second, *_ in by_rank))
    return communicator, loaded


def _make_and_use(
    control: Control, topology: Topology, config: RuntimeConfig, kind: StreamKind, span: AxisSpan
) -> Collectives:
    """Return collectives with one process group, after running a first collective."""
    device, flat = control.device, AlgorithmChoice(names=("flat",))
    spans, resources = {kind: frozenset({span})}, make_resources(device, config.distributed_backend)
    groups = make_groups(topology, control.world.rank, spans, config, resources, device=device)
    collectives = make_collectives(flat, groups)
    numel = _NUM_BYTES // 4 // topology.world_size * topology.world_size
    buffer = torch.ones(numel, dtype=torch.float32, device=device)
    op = Op.ALL_GATHER if kind is StreamKind.GATHER else Op.REDUCE_SCATTER
    collectives.run(CollectiveRequest(op, buffer, span, buffer.dtype)).wait()
    return collectives
