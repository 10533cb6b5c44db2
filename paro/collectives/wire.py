"""The only caller of torch.distributed collectives for model state; counts the bytes sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from paro.distributed.byte_counter import ByteCounter
from paro.distributed.groups import Groups
from paro.topology import AxisSpan, Link, StreamKind, nested_range

# gloo implements reduce-scatter as an all-reduce, with twice the bytes. Here a rank sends messages
# to every peer and sums locally (gloo's all-to-all leaves slow links idle in between). It stages
# at most this many bytes at a time: no extra buffer of a unit's size is needed.
_STAGED_BYTES = 4 << 20

_TAGS = 1 << 31  # number of tags that a backend has

# torch 2.13 renamed these functions; 2.11 and 2.12 have only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A message in flight to or from a peer."""

    def __init__(self, work: dist.Work, tensor: Tensor, what: str) -> None:
        self._work = work
        self._tensor = tensor  # kept alive until the message is complete
        self._what = what

    def wait(self) -> None:
        """Wait for the message; a `RuntimeError` names a peer that is gone or times out."""
        try:
            self._work.wait()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise RuntimeError(f"{self._what} failed: {reason}") from error


class Wire:
    """Backend collectives and messages along an axis span, in the calling thread.

    Counts the bytes that this rank would send with a bandwidth-optimal backend: all to the next
    rank of a ring, but for gloo's reduce-scatters and for all-to-alls a part to every peer.
    """

    def __init__(self, groups: Groups, traffic: ByteCounter) -> None:
        self._groups = groups
        self._traffic = traffic
        self._rank = groups.rank

    def all_gather(self, kind: StreamKind, span: AxisSpan, whole: Tensor, shard: Tensor) -> None:
        """Fill `whole` with every rank's `shard`, in rank order."""
        self._count_ring(span, whole.nbytes - shard.nbytes)
        _all_gather(whole, shard, group=self._groups.of(kind, span))

    def all_reduce(
        self, kind: StreamKind, span: AxisSpan, whole: Tensor, comm_dtype: torch.dtype
    ) -> None:
        """Sum `whole` in place over the axis span."""
        moved = whole.to(comm_dtype)
        size = len(self._members(span))
        self._count_ring(span, 2 * moved.nbytes * (size - 1) // size)
        dist.all_reduce(moved, group=self._groups.of(kind, span))
        if moved is not whole:
            whole.copy_(moved)

    def reduce_scatter(self, kind: StreamKind, span: AxisSpan, whole: Tensor) -> Tensor:
        """Split `whole` by rank, sum this rank's part in place over all ranks, and return it."""
        members = self._members(span)
        parts = whole.view(len(members), -1)
        own = parts[members.index(self._rank)]
        group = self._groups.of(kind, span)
        if dist.get_backend(group) != "gloo":
            self._count_ring(span, whole.nbytes - own.nbytes)
            _reduce_scatter(own, whole, group=group)
            return own
        step = max(1, _STAGED_BYTES // (len(members) * whole.element_size()))
        for begin in range(0, own.numel(), step):
            sent = parts[:, begin : begin + step]
            received = torch.empty(sent.shape, dtype=sent.dtype, device=sent.device)
            self._exchange_rows(kind, span, sent, received)
            # Summed in rank order, in fp32: bitwise reproducible.
            own[begin : begin + step] = received.sum(0, dtype=torch.float32)
        return own

    def all_to_all(self, kind: StreamKind, span: AxisSpan, parts: Tensor, received: Tensor) -> None:
        """Send every member its row of `parts`; fill `received`, in rank order."""
        group = self._groups.of(kind, span)
        if dist.get_backend(group) == "gloo":
            self._exchange_rows(kind, span, parts, received)
            return
        for member in self._members(span):
            if member != self._rank:
                self._traffic.add(self._link_to(member), parts[0].nbytes)
        dist.all_to_all_single(received, parts, group=group)

    def _exchange_rows(
        self, kind: StreamKind, span: AxisSpan, parts: Tensor, received: Tensor
    ) -> None:
        """Send every member its row of `parts` as a separate message."""
        members = self._members(span)
        own = members.index(self._rank)
        others = [(row, rank) for row, rank in enumerate(members) if rank != self._rank]
        pending = [self.receive(kind, span, received[row], rank, 0) for row, rank in others]
        pending += [self.send(kind, span, parts[row], rank, 0) for row, rank in others]
        received[own] = parts[own]
        for message in pending:
            message.wait()

    def exchange(
        self,
        kind: StreamKind,
        span: AxisSpan,
        sent: Mapping[int, Tensor],
        received: Mapping[int, Tensor],
        *,
        tag: int = 0,
    ) -> None:
        """Send and receive tensors of any size, by rank, as one grouped operation under NCCL."""
        if not sent and not received:
            return
        group, tag = self._groups.of(kind, span), tag % _TAGS
        messages = [
            *(dist.P2POp(dist.irecv, part, rank, group, tag) for rank, part in received.items()),
            *(dist.P2POp(dist.isend, part, rank, group, tag) for rank, part in sent.items()),
        ]
        for rank, part in sent.items():
            self._traffic.add(self._link_to(rank), part.nbytes)
        what = f"rank {self._rank}: messages to ranks {sorted(sent)} from {sorted(received)}"
        try:
            works = dist.batch_isend_irecv(messages)
        except RuntimeError as error:
            raise RuntimeError(f"{what} failed: {error}") from error
        for work, message in zip(works, messages, strict=len(works) > 1):
            Pending(work, message.tensor, what).wait()

    def send(
        self, kind: StreamKind, span: AxisSpan, tensor: Tensor, peer: int, tag: int
    ) -> Pending:
        """Start to send a tensor, which must not change until the message is complete."""
        self._traffic.add(self._link_to(peer), tensor.nbytes)
        return self._start(dist.isend, "to", kind, span, tensor, peer, tag)

    def receive(
        self, kind: StreamKind, span: AxisSpan, tensor: Tensor, peer: int, tag: int
    ) -> Pending:
        """Start to receive into `tensor`."""
        return self._start(dist.irecv, "from", kind, span, tensor, peer, tag)

    def _start(
        self,
        start: Callable[..., dist.Work | None],
        direction: str,
        kind: StreamKind,
        span: AxisSpan,
        tensor: Tensor,
        peer: int,
        tag: int,
    ) -> Pending:
        group, transfer = self._groups.of(kind, span), self._describe(direction, peer)
        try:
            work = start(tensor, peer, group=group, tag=tag % _TAGS)
        except RuntimeError as error:
            raise RuntimeError(f"{transfer} failed: {error}") from error
        assert work is not None, f"rank {self._rank} is no member of the group along {span}"
        return Pending(work, tensor, transfer)

    def _describe(self, direction: str, peer: int) -> str:
        link = self._link_to(peer).value
        return f"rank {self._rank}: a message {direction} rank {peer} over {link}-group links"

    def _members(self, span: AxisSpan) -> tuple[int, ...]:
        return self._groups.topology.members(span, self._rank)

    def _link_to(self, rank: int) -> Link:
        group_size = self._groups.topology.group_size
        return Link.INTRA if rank // group_size == self._rank // group_size else Link.INTER

    def _count_ring(self, span: AxisSpan, num_bytes: int) -> None:
        members = self._members(span)
        after = members[(members.index(self._rank) + 1) % len(members)]
        self._traffic.add(self._link_to(after), num_bytes)


def shard_in(whole: Tensor, span: AxisSpan, rank: int) -> Tensor:
    """Return a rank's shard at the fine degree: a view of `whole`, at the span's coarse degree."""
    start, stop = nested_range(span, rank, whole.numel())
    return whole[start:stop]


def as_nested(by_rank: Tensor, *levels: AxisSpan) -> Tensor:
    """Return a buffer in the order of backends, viewed with the dims of `Request.nested`.

    Backends order shards by rank of the inner level, then by rank of the outer level, if any. The
    most significant digit of a rank belongs to the outermost axis.
    """
    axes = [axis for level in levels for axis in reversed(level)]
    dims = [axes.index(axis) for level in levels for axis in level]
    return by_rank.view(*(axis.size for axis in axes), -1).permute(*dims, len(axes))
