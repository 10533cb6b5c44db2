"""Process groups of a rank without peers: what arrives is the rank's own."""

# torch.distributed makes groups of the classes ProcessGroupGloo and ProcessGroupNCCL. While `alone`
# is entered they are subclasses of `_LoneGroup`, so a trainer runs without a change: it has the
# groups, hooks, streams and buffers of one rank of many. On a CPU a transfer takes its time in the
# wait for it; on a GPU it is a kernel on the stream that calls it. Names and types of a group's
# methods differ from release to release of torch.
# mypy: disable-error-code="assignment, call-arg, override"

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from paro.collectives.schedule import Op
from tools.bench.link_model.links import Links, TimedJob

NCCL_CTAS = 24  # thread blocks of a communicator that no option bounds, an assumption


class _Transfer(dist._Work):
    """A collective or message, which begins when it is made."""

    def __init__(
        self, links: Links, job: TimedJob | None, result: object, *, spent: float = 0.0
    ) -> None:
        super().__init__()
        self._links, self._job, self._result, self._spent = links, job, result, spent
        self._end = 0.0 if job is None else links.book(job)

    def wait(self, timeout: object = None) -> bool:
        if self._job is not None:
            self._links.stay(self._job, self._end, self._spent)
        return True

    def get_future(self) -> torch.futures.Future[object]:
        self.wait()
        future: torch.futures.Future[object] = torch.futures.Future()
        future.set_result(self._result)
        return future


class _LoneGroup(dist.ProcessGroup):
    """A process group with one real rank."""

    links: ClassVar[Links]
    supports_splitting = False

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any = None, **_: object):
        super().__init__(rank, size)
        self.options = SimpleNamespace()  # torch writes there
        bound = getattr(getattr(options, "config", None), "max_ctas", 0)
        self._num_ctas = bound if bound > 0 else NCCL_CTAS

    def _get_backend(self, device: torch.device) -> _LoneGroup:
        return self

    def _set_sequence_number_for_group(self) -> None:
        return

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 (torch's name)
        return self._name

    group_name = property(getGroupName)

    def _transfer(
        self,
        op: Op | None,
        target: Tensor,
        source: Tensor,
        num_bytes: int,
        opts: Any = None,
    ) -> dist._Work:
        """Fill `target` with `source`, repeated, or multiplied if `opts` has a sum."""
        job = self.links.job(op, tuple(dist.get_process_group_ranks(self)), num_bytes)
        scale = self.size() if getattr(opts, "reduceOp", None) == dist.ReduceOp.SUM else 1
        if target.device.type == "cuda":
            from tools.bench.link_model.kernels import carry

            carry(target, source, job, scale=scale, num_bytes=num_bytes, num_ctas=self._num_ctas)
            return _Transfer(self.links, None, [target])
        begin = time.thread_time() - self.links.spent_on(op, self.size())
        if target is not source:  # a shard may be a part of what is gathered
            repeats = target.numel() // source.numel()
            target.view(repeats, *source.shape).copy_(source.clone())
        target.mul_(scale)
        return _Transfer(self.links, job, [target], spent=time.thread_time() - begin)

    def all_gather_single(self, whole: Tensor, shard: Tensor, opts: Any = None) -> dist._Work:
        return self._transfer(Op.ALL_GATHER, whole, shard, whole.nbytes)

    def all_gather_single_coalesced(
        self, wholes: Sequence[Tensor], shards: Sequence[Tensor], opts: Any = None
    ) -> dist._Work:
        return [*map(self.all_gather_single, wholes, shards)][-1]

    def reduce_scatter_single(self, own: Tensor, whole: Tensor, opts: Any = None) -> dist._Work:
        part, on_cpu = whole.view(self.size(), -1)[self.rank()], whole.device.type == "cpu"
        op = Op.ALL_REDUCE if on_cpu else Op.REDUCE_SCATTER  # as gloo does
        return self._transfer(op, own, part.view_as(own), whole.nbytes, opts)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist._Work:
        return self._transfer(Op.ALL_REDUCE, tensors[0], tensors[0], tensors[0].nbytes, opts)

    def all_to_all_single(self, received: Tensor, sent: Tensor, *_: Any, **__: Any) -> dist._Work:
        return self._transfer(Op.ALL_GATHER, received, sent, sent.nbytes)

    def allgather(
        self, received: Sequence[Sequence[Tensor]], own: Sequence[Tensor], opts: Any = None
    ) -> dist._Work:
        for tensor in received[0] if received else ():
            tensor.copy_(own[0])
        return _Transfer(self.links, None, received)

    def broadcast(self, tensors: Sequence[Tensor], *_: Any) -> dist._Work:
        return _Transfer(self.links, None, tensors)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> dist._Work:
        zero = torch.zeros_like(tensors[0])
        return self._transfer(None, tensors[0], zero, tensors[0].nbytes)

    gather, send = allgather, broadcast
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    alltoall_base, allgather_into_tensor_coalesced = all_to_all_single, all_gather_single_coalesced


@contextmanager
def alone(links: Links) -> Iterator[None]:
    """Give new groups of torch.distributed one real rank on these links, in the block."""
    options = getattr(getattr(dist, "ProcessGroupNCCL", None), "Options", None)
    group = type("LoneGroup", (_LoneGroup,), {"links": links, "Options": options})
    lone = dict.fromkeys(("ProcessGroupGloo", "ProcessGroupNCCL"), group)
    known = {name: vars(c10d)[name] for name in lone if name in vars(c10d)}
    try:
        vars(c10d).update(lone)
        yield
    finally:
        vars(c10d).update(known)
