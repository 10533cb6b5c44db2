"""The interface of all algorithms: collectives on flat buffers along an axis span."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paro.collectives.choice import group_spans
from paro.collectives.schedule import Op
from paro.distributed.comm_stream import DONE, Event, Job
from paro.distributed.exposed_time import ExposedTimer
from paro.distributed.groups import Groups
from paro.topology import AxisSpan, StreamKind, by_units, nested_range


class CollectiveRequest(NamedTuple):
    """A collective on `whole` along `span`, to run after an event.

    all-gather        fills `whole` from the shards of the ranks along `span`
    reduce-scatter    writes the sum to this rank's shard of `whole`; the rest is undefined
    all-reduce        writes the sum to all of `whole`
    """

    op: Op
    whole: Tensor
    span: AxisSpan
    comm_dtype: torch.dtype
    shard: Tensor | None = None  # an all-gather's input; None: this rank's range of `whole`
    after: Event = DONE
    units: int = 1  # number of equal units whose buffers `whole` concatenates; see `by_units`

    @property
    def stream_kind(self) -> StreamKind:
        return StreamKind.GATHER if self.op is Op.ALL_GATHER else StreamKind.REDUCE

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole buffer in the communication dtype."""
        return self.whole.numel() * self.comm_dtype.itemsize

    def own(self, rank: int) -> Tensor:
        """Return the shard of this rank."""
        return self.whole[slice(*self.range_of(rank))] if self.shard is None else self.shard

    def range_of(self, rank: int) -> tuple[int, int]:
        """Return (start, stop) of a rank's shard in `whole`."""
        return nested_range(by_units(self.span, self.units), rank, self.whole.numel())

    def nested(self) -> Tensor:
        """View `whole` as [axis sizes, innermost first; elements of a shard]."""
        order = by_units(self.span, self.units)
        view = self.whole.view(*(axis.size for axis in order), -1)
        return view if self.units == 1 else view.movedim(0, -2)


@dataclass(eq=False)
class Endpoint:
    """Base of a rank's collectives and messages along axis spans, in a run's process groups."""

    groups: Groups

    @property
    def exposed_timer(self) -> ExposedTimer:
        """Counter of the time that compute waits for communication."""
        return self.groups.resources.exposed_timer

    def _submit(self, kind: StreamKind, span: AxisSpan, job: Job, *, after: Event = DONE) -> Event:
        """Queue a job on the comm stream of the process group for `kind` along `span`."""
        kind = self.groups.resources.stream_kind or kind
        return self.groups.resources.streams.submit((kind, *span), job, after=after)


@dataclass(eq=False)
class Collectives(Endpoint, ABC):
    """Collectives on flat buffers along `span`, an axis span ordered innermost first.

    All work in place on nested shards: `whole` is the buffer at the coarse degree of the span and
    contains this rank's shard at the fine degree. With `units` > 1, `whole` holds the buffers of
    that many units. Every call queues jobs on comm streams and returns their completion; an empty
    span costs nothing. Values are sent in `comm_dtype`.
    """

    _algorithm = "native"
    _pipelined = False  # whether ho-ring is a pipeline of the backend's own collectives

    @abstractmethod
    def run(self, request: CollectiveRequest) -> Event:
        """Queue a collective."""

    def run_after(self, span: AxisSpan, job: Job, *, after: Event) -> Event:
        """Queue local work after a collective over `span`, on a comm stream of reductions."""
        *_, outermost = group_spans(self._algorithm, span, pipelined=self._pipelined)
        return self._submit(StreamKind.REDUCE, outermost, job, after=after)

    def close(self) -> None:
        """Close comm streams and process groups; call it on every rank with no work in flight."""
        self.groups.resources.streams.close()
        self.groups.close()
