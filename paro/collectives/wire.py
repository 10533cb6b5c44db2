"""The only caller of torch.distributed collectives for model state; counts the bytes sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paro.distributed.groups import Groups
from paro.topology import AxisSpan, Link, StreamKind

# gloo implements reduce-scatter as an all-reduce, with twice the bytes. Here a rank sends messages
# to every peer and sums locally (gloo's all-to-all leaves slow links idle in between). It stages
# at most this many bytes at a time: no extra buffer of a unit's size is needed.
_STAGED_BYTES = 4 << 20

_TAGS = 1 << 31  # number of tags that a backend has

# torch 2.13 renamed these functions; 2.11 and 2.12 have only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_Start = Callable[..., dist.Work | None]  # isend or irecv


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


@dataclass(frozen=True, slots=True)
class Wire:
    """Backend collectives and messages along an axis span, in the calling thread.

    Counts the bytes that this rank would send with a bandwidth-optimal backend: all to the next
    rank of a ring, but for gloo's reduce-scatters and for all-to-alls a part to every peer.
    """

    groups: Groups
    kind: StreamKind  # kind of the comm stream that the process group is for
    span: AxisSpan

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group of the wire."""
        return self.groups.of(self.kind, self.span)

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks along the span, ascending."""
        return self.groups.topology.members(self.span, self.groups.rank)

    def row(self, whole: Tensor) -> Tensor:
        """Return the part of this rank, where `whole` has an equal part of every rank in order."""
        members = self.members
        return whole.view(len(members), -1)[members.index(self.groups.rank)]

    def all_gather(self, whole: Tensor, shard: Tensor) -> None:
        """Fill `whole` with every rank's `shard`, in rank order."""
        self._count_ring(whole.nbytes - shard.nbytes)
        _all_gather(whole, shard, group=self.group)

    def all_reduce(self, whole: Tensor, comm_dtype: torch.dtype) -> None:
        """Sum `whole` in place over the axis span."""
        moved = whole.to(comm_dtype)
        size = len(self.members)
        self._count_ring(2 * moved.nbytes * (size - 1) // size)
        dist.all_reduce(moved, group=self.group)
        if moved is not whole:
            whole.copy_(moved)

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        """Split `whole` by rank, sum this rank's part in place over all ranks, and return it."""
        row = self.row(whole)
        if dist.get_backend(self.group) != "gloo":
            self._count_ring(whole.nbytes - row.nbytes)
            _reduce_scatter(row, whole, group=self.group)
            return row
        num_ranks = len(self.members)
        parts = whole.view(num_ranks, -1)
        step = max(1, _STAGED_BYTES // (num_ranks * whole.element_size()))
        for begin in range(0, row.numel(), step):
            sent = parts[:, begin : begin + step]
            received = torch.empty(sent.shape, dtype=sent.dtype, device=sent.device)
            self._exchange_rows(sent, received)
            # Summed in rank order, in fp32: bitwise reproducible.
            row[begin : begin + step] = received.sum(0, dtype=torch.float32)
        return row

    def all_to_all(self, parts: Tensor, received: Tensor) -> None:
        """Send every member its row of `parts`; fill `received`, in rank order."""
        if dist.get_backend(self.group) == "gloo":
            self._exchange_rows(parts, received)
            return
        for member in self.members:
            if member != self.groups.rank:
                self._count(member, parts[0].nbytes)
        dist.all_to_all_single(received, parts, group=self.group)

    def _exchange_rows(self, parts: Tensor, received: Tensor) -> None:
        """Send every member its row of `parts` as a separate message."""
        rank, members = self.groups.rank, self.members
        others = [(row, member) for row, member in enumerate(members) if member != rank]
        pending = [self.receive(received[row], member, 0) for row, member in others]
        pending += [self.send(parts[row], member, 0) for row, member in others]
        number = members.index(rank)
        received[number] = parts[number]
        for message in pending:
            message.wait()

    def exchange(
        self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], *, tag: int = 0
    ) -> None:
        """Send and receive tensors of any size, by rank, as one grouped operation under NCCL."""
        if not sent and not received:
            return
        group, tag = self.group, tag % _TAGS
        messages = [
            *(dist.P2POp(dist.irecv, part, rank, group, tag) for rank, part in received.items()),
            *(dist.P2POp(dist.isend, part, rank, group, tag) for rank, part in sent.items()),
        ]
        for rank, part in sent.items():
            self._count(rank, part.nbytes)
        what = f"rank {self.groups.rank}: messages to ranks {sorted(sent)} from {sorted(received)}"
        try:
            works = dist.batch_isend_irecv(messages)
        except RuntimeError as error:
            raise RuntimeError(f"{what} failed: {error}") from error
        for work, message in zip(works, messages, strict=len(works) > 1):
            Pending(work, message.tensor, what).wait()

    def send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start to send a tensor, which must not change until the message is complete."""
        self._count(peer, tensor.nbytes)
        return self._start(dist.isend, "to", tensor, peer, tag)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start to receive into `tensor`."""
        return self._start(dist.irecv, "from", tensor, peer, tag)

    def _start(self, start: _Start, direction: str, tensor: Tensor, peer: int, tag: int) -> Pending:
        link, rank = self._link_to(peer).value, self.groups.rank
        transfer = f"rank {rank}: a message {direction} rank {peer} over {link}-group links"
        try:
            work = start(tensor, peer, group=self.group, tag=tag % _TAGS)
        except RuntimeError as error:
            raise RuntimeError(f"{transfer} failed: {error}") from error
        assert work is not None, f"rank {rank} is no member of the group along {self.span}"
        return Pending(work, tensor, transfer)

    def _link_to(self, peer: int) -> Link:
        group_size = self.groups.topology.group_size
        return Link.INTRA if peer // group_size == self.groups.rank // group_size else Link.INTER

    def _count(self, peer: int, num_bytes: int) -> None:
        self.groups.resources.traffic.add(self._link_to(peer), num_bytes)

    def _count_ring(self, num_bytes: int) -> None:
        members = self.members
        self._count(members[(members.index(self.groups.rank) + 1) % len(members)], num_bytes)


def as_nested(by_rank: Tensor, *levels: AxisSpan) -> Tensor:
    """Return a buffer in the order of backends, viewed as `CollectiveRequest.nested`.

    Backends order shards by rank of the inner level, then by rank of the outer level, if any. The
    most significant digit of a rank belongs to the outermost axis.
    """
    axes = [axis for level in levels for axis in reversed(level)]
    dims = [axes.index(axis) for level in levels for axis in level]
    return by_rank.view(*(axis.size for axis in axes), -1).permute(*dims, len(axes))
