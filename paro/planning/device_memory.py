"""The memory that a rank takes of its device: allocations, and what CUDA and NCCL need."""

# The total is what planner, dry run and trainer compare with the device's memory:
#
#   allocations      the largest memory snapshot of a step (tally.py)
#   buffers          in which HO-Ring's pipeline (collectives/pipelined.py) hands pieces on, and
#                    those that flat collectives permute, or native ones gather between groups for
#                    several units; each comm stream keeps its own
#   fragmentation    a share of the two: what torch's allocator holds in addition, for rounding,
#                    library workspaces and free blocks that are too small
#   communicators    NCCL's buffers, once for each process group that the rank makes
#   context          the CUDA context: driver, loaded kernels, library handles
#
# Under gloo only the allocations count, and what a machine file says a process takes without a
# model. Defaults where the machine file has no figure:
#
#   context          667 MB: all of torch's modules loaded (pytorch pull request 86509; 287 MB with
#                    those of a single kernel)
#   communicator     688 MiB: the larger of the two sizes on 4 A100 (nccl issue 964: 544 MiB for 2
#                    ranks, 688 MiB for more). Memory follows NCCL's channels and does not grow
#                    beyond two nodes (nccl issue 864), so the number of ranks does not count
#   fragmentation    5%: an assumption for expandable segments, which all launch scripts set; no
#                    published figure fits. `make gpu` compares it with reserved memory (part d)

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from paro.collectives.choice import AlgorithmChoice
from paro.collectives.pipeline import SLOTS, cut_evenly
from paro.collectives.schedule import Op
from paro.collectives.spans import has_both_links, ring_levels
from paro.layout import ALIGN
from paro.machine.machine import Device
from paro.planning.tally import MemorySnapshot
from paro.spec.run_spec import RunSpec, collectives_of, groups_of
from paro.spec.sharding_spec import Collective, ShardingSpec
from paro.step.actions import Verb
from paro.topology import COLLECTIVE_STREAMS, AxisSpan, StreamKind

CONTEXT_BYTES = 667 * 10**6
COMMUNICATOR_BYTES = 688 << 20
FRAGMENTATION = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """What a rank takes of its device, in bytes."""

    allocations: MemorySnapshot
    buffers: int = 0
    codes: int = 0
    fragmentation: int = 0
    communicators: int = 0
    context: int = 0

    @property
    def name(self) -> str:
        """The point of a step at which it is most."""
        return self.allocations.name

    @property
    def allocated(self) -> int:
        """What the rank's tensors take at most."""
        return self.allocations.total + self.buffers + self.codes

    @property
    def reserved(self) -> int:
        """What torch's allocator holds at most."""
        return self.allocated + self.fragmentation

    @property
    def total(self) -> int:
        return self.reserved + self.communicators + self.context

    def parts(self) -> dict[str, int]:
        """Return the parts of the total by name, in bytes."""
        return {
            **self.allocations.parts(),
            "buffers of collectives": self.buffers,
            "codes of updates": self.codes,
            "fragmentation": self.fragmentation,
            "communicators": self.communicators,
            "context": self.context,
        }

    @property
    def largest_part(self) -> str:
        return max(self.parts().items(), key=lambda part: part[1])[0]

    def describe(self) -> str:
        """Return one line with all parts that are not 0, in GB, or in MB if the total is below 1
        GB."""
        unit, scale = ("GB", 1e9) if self.total >= 1e9 else ("MB", 1e6)
        listed = ", ".join(
            f"{name} {size / scale:.1f}" for name, size in self.parts().items() if size
        )
        return f"{self.total / scale:.1f} {unit} at {self.name}: {listed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """The number of process groups of a run, and the buffers of a rank.

    Those of collectives, and those of updates that are sent as codes.
    """

    num_groups: int = 0
    buffer_bytes: int = 0
    code_bytes: int = 0


def device_memory(
    allocations: MemorySnapshot,
    communication: Communication,
    device: Device | None,
    device_type: str,
) -> DeviceMemory:
    """With the figures of a machine file, otherwise the defaults; under gloo without NCCL's."""
    on_gpu = device_type == "cuda"
    context = CONTEXT_BYTES if on_gpu else 0
    communicator, fragmentation = (COMMUNICATOR_BYTES, FRAGMENTATION) if on_gpu else (0, 0.0)
    if device is not None:
        context = device.reserved_bytes
        if on_gpu and device.communicator_bytes is not None:
            communicator = device.communicator_bytes
        if on_gpu and device.fragmentation is not None:
            fragmentation = device.fragmentation
    allocated = allocations.total + communication.buffer_bytes + communication.code_bytes
    return DeviceMemory(
        allocations=allocations,
        buffers=communication.buffer_bytes,
        codes=communication.code_bytes,
        fragmentation=round(fragmentation * allocated),
        communicators=communication.num_groups * communicator,
        context=context,
    )


def communication_of(
    run: RunSpec, specs: Sequence[ShardingSpec], choice: AlgorithmChoice
) -> Communication:
    """What a run with these buffers communicates in, with collectives by the `choice`."""
    return Communication(
        num_groups=groups_of(run, specs, choice).number,
        buffer_bytes=_buffer_bytes(run, specs, choice),
        code_bytes=_code_bytes(specs),
    )


def _buffer_bytes(run: RunSpec, specs: Sequence[ShardingSpec], choice: AlgorithmChoice) -> int:
    """Return bytes of a rank's buffers of collectives; under gloo they are not counted."""
    largest: dict[tuple[str, StreamKind, AxisSpan], int] = {}
    names, pieces = choice.names, choice.pieces
    if pieces is None:
        return 0
    for one in collectives_of(run, specs):
        if one.stream_kind not in COLLECTIVE_STREAMS:
            continue
        taken = {}
        if "ho-ring" in names and has_both_links(one.span):
            count = pieces(one.op, one.span, one.num_bytes)
            taken["ho-ring"] = pipeline_bytes(one, count)
        if "flat" in names and one.op is not Op.ALL_REDUCE:
            taken["flat"] = one.num_bytes
        if "native" in names and one.op is Op.ALL_GATHER and one.units > 1 and len(one.span) > 1:
            # Parts of all units.
            taken["native"] = one.num_bytes * one.span[0].inner // one.span[-1].inner
        for name, size in taken.items():
            key = name, one.stream_kind, one.span
            largest[key] = max(size, largest.get(key, 0))
    return sum(largest.values())


def _code_bytes(specs: Iterable[ShardingSpec]) -> int:
    """Return bytes of a rank's buffers of codes: of all updates, and of the largest unit's
    gradients.

    With error feedback also what the codes of all gradients have lost.
    """
    updates = gradients = errors = 0
    for spec in specs:
        updates += sum(
            one.num_bytes for one in spec.collectives.get(Verb.PARAM_ALL_GATHER, ()) if one.is_coded
        )
        errors += prod(spec.grad_error_bytes)
        if spec.grad_codes is not None:
            sent, *gathered = (one.num_bytes for one in spec.exchange)
            in_fp32 = 4 * 4 * spec.grad_codes.numel  # the sum of a piece and its transform
            gradients = max(gradients, 2 * sent + sum(gathered) + in_fp32)  # sent and received
    return updates + gradients + errors


def pipeline_bytes(one: Collective, pieces: int) -> int:
    """Return the buffers of a pipeline for a collective: its slots, and one whole piece."""
    numel = one.numel // one.num_shards
    ranges = cut_evenly(numel, min(pieces, max(1, numel // ALIGN)), ALIGN)
    piece = max(stop - start for start, stop in ranges) * one.itemsize
    between = prod(axis.size for level in ring_levels("ho-ring", one.span)[1:] for axis in level)
    return piece * (SLOTS * between + one.num_shards)
