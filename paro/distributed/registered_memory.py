"""Memory that NCCL's copy engines fill: pools registered with the communicators that gather."""

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

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from paro.distributed.control import Control
from paro.errors import UserError

_FIRST_NCCL = (2, 28)


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


def use_copy_engines(options: dist.ProcessGroupNCCL.Options) -> None:
    """Let a communicator gather by copy engines; `UserError` where torch or NCCL cannot."""
    policy = getattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO", None)
    version = torch.cuda.nccl.version()
    if policy is None or not hasattr(options.config, "cta_policy") or version < _FIRST_NCCL:
        raise UserError(
            f"--paro-nccl-copy-engine needs NCCL 2.28 and a torch that names its policy: torch "
            f"{torch.__version__} has NCCL {'.'.join(map(str, version))}; leave the flag out"
        )
    options.config.cta_policy = policy
