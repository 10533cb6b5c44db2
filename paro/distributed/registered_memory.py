"""Memory that NCCL's copy engines fill: a pool registered with the communicators that gather."""

# [Note: copy engines]
# Under NCCL's policy of zero thread blocks an all-gather inside a node is copies by the GPUs' copy
# engines, so that no multiprocessor is taken from matmuls. It needs memory that NCCL allocated and
# that every rank has registered as a window, at the same offset: torch registers each segment of a
# pool when the pool gets it, a collective call of the communicator. All ranks of a node allocate
# whole parameters, and nothing else, from the pool, in the same order, so their pools are alike.
# Up to NCCL 2.28 what is sent must lie in a window too: a gather is in place.

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from paro.errors import UserError

_FIRST_NCCL = (2, 28)


@dataclass(slots=True)
class RegisteredMemory:
    """A memory pool of this rank's GPU, for buffers that copy engines fill."""

    _pool: torch.cuda.MemPool | None = None
    _backends: list[Any] = field(default_factory=list)

    def register(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Registers the pool with a communicator, before anything is allocated from it."""
        backend: Any = group._get_backend(device)
        if self._pool is None:
            self._pool = torch.cuda.MemPool(backend.mem_allocator)
        backend.register_mem_pool(self._pool, symm=True)
        self._backends.append(backend)

    def allocating(self) -> AbstractContextManager[object]:
        """While entered, this thread allocates from the pool, if a communicator registered it."""
        return nullcontext() if self._pool is None else torch.cuda.use_mem_pool(self._pool)

    def close(self) -> None:
        """Takes the pool from the communicators; before they are destroyed."""
        while self._backends:
            self._backends.pop().deregister_mem_pool(self._pool)


def use_copy_engines(options: dist.ProcessGroupNCCL.Options) -> None:
    """Lets a communicator gather by copy engines; `UserError` where torch or NCCL cannot."""
    policy = getattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO", None)
    version = torch.cuda.nccl.version()
    if policy is None or not hasattr(options.config, "cta_policy") or version < _FIRST_NCCL:
        raise UserError(
            f"--paro-nccl-copy-engine needs NCCL 2.28 and a torch that names its policy: torch "
            f"{torch.__version__} has NCCL {'.'.join(map(str, version))}; leave the flag out"
        )
    options.config.cta_policy = policy
