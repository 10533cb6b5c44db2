"""Process groups of a topology and their comm streams; the only caller of new_group."""

# [Note: no communicator of the world]
# The default group is gloo's under any backend: it sends scalars and objects, which are on the
# host. An NCCL default group would cost every GPU the memory of a communicator that no model state
# uses. If it were bound to a device, all ranks, members or not, would take part in splitting every
# new group from it (272 groups for IIG on 1,024 GPUs). With gloo, a rank makes only communicators
# of its own few groups, when the groups are created: their memory is taken before training begins.

# [Note: room on the GPU]
# A collective's kernel waits on the GPU for the kernels of the other ranks. If the kernels of two
# communicators did not fit side by side, ranks could deadlock:
#
#     rank 0    runs A, waits for room for B        rank 1    runs B, waits for room for A
#
# NCCL_LAUNCH_ORDER_IMPLICIT begins collectives in the order in which they are queued, but then a
# gather may wait for collectives that only later units need. Instead all communicators of a rank
# have so few thread blocks (CTAs, each takes at most one multiprocessor) that they fit at once.
# NCCL runs one kernel of a communicator at a time, of at most `max_ctas` blocks, rounded up to a
# power of two for messages and all-to-alls (ncclTopoComputeP2pChannels): `max_ctas` is a power of
# two. NCCL variables that override it are refused where the blocks would not fit.

# [Note: copy engines]
# Under NCCL's policy of zero thread blocks the GPUs' copy engines carry out an all-gather inside a
# node, so matmuls lose no multiprocessor. The buffer must be memory that NCCL allocated and every
# rank registered as a window, and all ranks must use the same offset of the same window.
# Registering is collective, in the order of windows, and has no timeout. torch registers a pool's
# memory at once; memory that the pool gets later it registers in the middle of an allocation or, in
# newer versions, never. So all memory that unsharded parameters ever take is allocated before
# training and registered with every communicator, and afterwards no pool may grow.
# Every buffer has a pool of its own, a single segment of torch's allocator: a pool that is free on
# this rank is free on all ranks, whatever the addresses of the segments.
# Up to NCCL 2.28 the memory that is sent must lie in a window too: a gather is in place.

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paro.distributed.comm_stream import CommStreams, CudaStreams, InlineStreams, ThreadStreams
from paro.distributed.control import Control
from paro.distributed.exposed_time import ExposedTimer
from paro.distributed.process_group import RuntimeConfig
from paro.errors import UserError
from paro.topology import MOST_CTAS, AxisSpan, Link, Sent, Spans, StreamKind, Topology


class ByteCounter:
    """Counter of bytes sent, which the training loop reads once per iteration."""

    def __init__(self) -> None:
        self._bytes = dict.fromkeys(Link, 0)
        self._paused = False
        self._lock = threading.Lock()  # several comm stream threads call add

    def add(self, link: Link, num_bytes: int) -> None:
        with self._lock:
            if not self._paused:
                self._bytes[link] += num_bytes

    def take(self) -> Sent:
        """Return the bytes sent since the last call of `take`."""
        with self._lock:
            sent = Sent(self._bytes[Link.INTRA], self._bytes[Link.INTER])
            self._bytes = dict.fromkeys(Link, 0)
        return sent

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count no bytes inside the block: for evaluation and saving."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before


@dataclass(frozen=True, slots=True)
class CommResources:
    """Comm streams and counters that all communication of a rank shares.

    With `stream_kind` jobs run on comm streams of this kind, whatever they send.
    """

    streams: CommStreams
    traffic: ByteCounter = field(default_factory=ByteCounter)
    exposed_timer: ExposedTimer = field(default_factory=ExposedTimer)
    stream_kind: StreamKind | None = None


def make_resources(device: torch.device, backend: str, *, overlap: bool = True) -> CommResources:
    """Return comm streams and counters; without `overlap` jobs run when submitted."""
    has_cuda_streams = device.type == "cuda" and backend == "nccl"
    exposed_timer = ExposedTimer(on_streams=has_cuda_streams)
    streams: CommStreams = InlineStreams(exposed_timer.note)
    if overlap:
        streams = CudaStreams() if has_cuda_streams else ThreadStreams(device)
    return CommResources(streams, exposed_timer=exposed_timer)


@dataclass(slots=True)
class _Slot:
    """A pool of a single segment, at `address`, for one buffer at a time."""

    pool: torch.cuda.MemPool
    trains: bool
    num_bytes: int
    address: int
    is_free: bool = True


@dataclass(slots=True)
class RegisteredMemory:
    """Memory of this rank's GPU for buffers that copy engines fill; empty without communicators."""

    _backends: list[Any] = field(default_factory=list)
    _slots: list[_Slot] = field(default_factory=list)

    def add(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Let a communicator gather into the memory."""
        self._backends.append(group._get_backend(device))

    def reserve(self, room: Mapping[bool, tuple[int, int]], control: Control) -> None:
        """Allocate and register memory for buffers of unsharded parameters.

        `room` maps trainable (True) or frozen (False) parameters to the bytes of each buffer and
        the number of buffers. Collective; replaces the memory that was reserved before.
        """
        self._release()
        if not self._backends:
            return
        with control.raise_on_all_ranks():  # else registering waits for a rank without memory
            for trains, (num_bytes, number) in room.items():
                for _ in range(number):
                    pool = torch.cuda.MemPool(self._backends[0].mem_allocator)
                    storage = torch.empty(0, device=control.device).untyped_storage()
                    with torch.cuda.use_mem_pool(pool):
                        storage.resize_(num_bytes)
                    self._slots.append(_Slot(pool, trains, num_bytes, storage.data_ptr()))
                    storage.resize_(0)  # the pool keeps the segment
        for slot in self._slots:
            for backend in self._backends:
                backend.register_mem_pool(slot.pool, symm=True)

    def resize(self, storage: torch.UntypedStorage, num_bytes: int, *, trains: bool) -> None:
        """Give a buffer a free slot of the memory or, with 0 bytes, take the slot back."""
        if not self._backends:
            storage.resize_(num_bytes)
        elif num_bytes:
            slot = next((s for s in self._slots if s.is_free and s.trains is trains), None)
            assert slot is not None, "more parameters are whole at once than memory is registered"
            assert num_bytes <= slot.num_bytes, f"{num_bytes} bytes are more than {slot.num_bytes}"
            with torch.cuda.use_mem_pool(slot.pool):
                storage.resize_(slot.num_bytes)
            assert storage.data_ptr() == slot.address, "a pool has grown after it was registered"
            slot.is_free = False
        else:
            next(s for s in self._slots if s.address == storage.data_ptr()).is_free = True
            storage.resize_(0)

    def close(self) -> None:
        """Deregister the memory from the communicators; call it before they are destroyed."""
        self._release()
        self._backends.clear()

    def _release(self) -> None:
        while self._slots:
            pool = self._slots.pop().pool
            for backend in self._backends:
                backend.deregister_mem_pool(pool)


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups of this rank, all created in advance, and the resources that they share.

    Scalars, barriers and checkpoint loading use the default gloo group, from the training thread.
    """

    topology: Topology
    rank: int
    resources: CommResources
    _by_kind_and_span: dict[tuple[StreamKind, AxisSpan], dist.ProcessGroup] = field(
        default_factory=dict
    )
    registered: RegisteredMemory = field(default_factory=RegisteredMemory)
    copy_engine: bool = False

    def of(self, kind: StreamKind, span: AxisSpan) -> dist.ProcessGroup:
        """Return this rank's group for a kind of stream along an axis span."""
        return self._by_kind_and_span[kind, span]

    def copies(self, kind: StreamKind, span: AxisSpan) -> bool:
        """Return whether copy engines carry out the collectives of `kind` along `span`."""
        inside = all(axis.link is Link.INTRA for axis in span)
        return self.copy_engine and kind is StreamKind.GATHER and inside

    def close(self) -> None:
        """Destroy the groups: threads of existing gloo groups keep waking up."""
        self.registered.close()
        while self._by_kind_and_span:  # popped, as this object may outlive the groups
            dist.destroy_process_group(self._by_kind_and_span.popitem()[1])


def make_save_groups(
    folders: Sequence[tuple[int, ...]], rank: int, timeout: timedelta
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Make two gloo groups, of all ranks and of the ranks that see this rank's folder.

    They carry save plans and results, by one thread at a time. Collective over the world.
    """
    world = dist.new_group(backend="gloo", timeout=timeout)
    return world, group_among(folders, rank, timeout) if len(folders) > 1 else world


def group_among(
    groups: Sequence[tuple[int, ...]], rank: int, timeout: timedelta
) -> dist.ProcessGroup:
    """Make a gloo group of each tuple of ranks, and return that of `rank`; collective."""
    made = {ranks: dist.new_group([*ranks], backend="gloo", timeout=timeout) for ranks in groups}
    (own,) = (group for ranks, group in made.items() if rank in ranks)
    return own


def make_groups(
    topology: Topology,
    rank: int,
    spans: Spans,
    config: RuntimeConfig | None,
    resources: CommResources,
    *,
    device: torch.device | None = None,
    communicators: int = 0,
) -> Groups:
    """Create the groups for `spans`, in one order on all ranks; collective over the world.

    With `config` None no group is created: for planning a rank that never runs. NCCL's are on a
    `device`, where a rank makes `communicators` in the entire run; 0: only those of this call.
    """
    if config is None or not spans:
        return Groups(topology, rank, resources)
    device = device if config.by_nccl else None
    groups = Groups(topology, rank, resources, copy_engine=config.paro_nccl_copy_engine)
    in_order = config.paro_nccl_launch_order == "implicit"
    number = None if in_order else max(communicators, sum(map(len, spans.values())))
    for kind in StreamKind:
        for span in sorted(spans.get(kind, ()), key=lambda span: [axis.index for axis in span]):
            ranks = range(topology.world_size)
            for members in dict.fromkeys(topology.members(span, other) for other in ranks):
                copies = groups.copies(kind, span)
                options = None
                if device is not None:
                    options = _nccl_options(config.timeout, device, number, copies=copies)
                group = dist.new_group(
                    list(members),
                    backend=config.distributed_backend,
                    timeout=config.timeout,
                    pg_options=options,
                    device_id=device if rank in members else None,
                )
                if rank in members:
                    groups._by_kind_and_span[kind, span] = group
                    if copies and device is not None:
                        groups.registered.add(group, device)
    return groups


_FIRST_NCCL = (2, 28)  # with copy engines
# NCCL variables that can give a communicator more blocks than `max_ctas`.
_OVERRIDING = ("MAX_CTAS", "MIN_NCHANNELS", "MIN_NRINGS", "MIN_P2P_NCHANNELS", "SYM_CTAS")


def bounded_ctas(multiprocessors: int, communicators: int) -> int:
    """Return the most thread blocks of a communicator with which all fit: a power of two.

    `UserError` if not every communicator has one, or if NCCL variables ask for more than fits.
    """
    room = multiprocessors // communicators
    texts = {f"NCCL_{name}": os.environ.get(f"NCCL_{name}", "") for name in _OVERRIDING}
    requested = {name: int(text) for name, text in texts.items() if text.isdecimal()}
    name, least = max(requested.items(), key=lambda item: item[1], default=("", 1))
    if 1 << max(0, least - 1).bit_length() > room:  # NCCL rounds up to a power of two
        blocks, unset = (f"{least} ({name})", f"unset {name}, or ") if name else ("at least 1", "")
        raise UserError(
            f"{communicators} communicators, each with {blocks} of the {multiprocessors} "
            f"multiprocessors of a GPU, do not fit on it at once: {unset}give "
            "--paro-nccl-launch-order implicit"
        )
    return min(MOST_CTAS, 1 << (room.bit_length() - 1))


def _nccl_options(
    timeout: timedelta, device: torch.device, communicators: int | None, *, copies: bool
) -> dist.ProcessGroupNCCL.Options:
    """Return the options of one NCCL group, an object of its own, as the group keeps it.

    The thread blocks of `communicators` fit on the GPU at once; None: NCCL begins collectives in
    the order in which they are queued. Collectives run on the comm stream that calls them. Only the
    rotation's grouped messages run on the group's own stream, with the same priority.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # otherwise torch warns
    if copies:
        _use_copy_engines(options)
    if communicators is None:
        os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"  # read by NCCL from 2.26
        return options
    if not hasattr(getattr(options, "config", None), "max_ctas"):
        raise UserError(
            f"torch {torch.__version__} does not bound the thread blocks of NCCL (Options has no "
            "config.max_ctas), so collectives of several groups may wait for each other's place "
            "on a GPU: give --paro-nccl-launch-order implicit, or install another torch"
        )
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    options.config.max_ctas = bounded_ctas(multiprocessors, communicators)
    return options


def _use_copy_engines(options: dist.ProcessGroupNCCL.Options) -> None:
    """Let a communicator gather by copy engines; `UserError` where torch or NCCL cannot."""
    policy = getattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO", None)
    version = torch.cuda.nccl.version()
    if policy is None or not hasattr(options.config, "cta_policy") or version < _FIRST_NCCL:
        raise UserError(
            f"--paro-nccl-copy-engine needs NCCL 2.28 and a torch that names its policy: torch "
            f"{torch.__version__} has NCCL {'.'.join(map(str, version))}; leave the flag out"
        )
    options.config.cta_policy = policy
