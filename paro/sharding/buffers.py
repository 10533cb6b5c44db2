"""Flat buffers that give up and regain their storage, and the ledger of what is alive."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paro.layout import UnitLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatShard:
    """A range of a unit's flat order as this rank holds it: what a checkpoint reads and fills."""

    layout: UnitLayout
    start: int  # the element of the unit that values[0] is
    values: Tensor  # 1-D
    state: str  # "param", "exp_avg" or "exp_avg_sq"
    rank: int = 0
    replicas: Sequence[int] = (0,)  # the ranks that hold this same range, this one among them

    @property
    def is_primary_replica(self) -> bool:
        """True on one of the replicas: for sums in which each element counts once."""
        return self.rank == self.replicas[0]

    def own_part(self, among: Collection[int] | None = None) -> tuple[int, int]:
        """The elements of `values` that this rank writes, so that the replicas write each once.

        With `among` only these ranks share the work, and the others write for themselves.
        """
        sharing = [rank for rank in self.replicas if among is None or rank in among]
        numel, index = self.values.numel(), sharing.index(self.rank)
        return index * numel // len(sharing), (index + 1) * numel // len(sharing)


@dataclass(slots=True)
class Tally:
    """How many buffers of one kind are alive, and at most were."""

    count: int = 0
    num_bytes: int = 0
    peak_count: int = 0
    peak_bytes: int = 0

    def change(self, count: int, num_bytes: int) -> None:
        self.count += count
        self.num_bytes += num_bytes
        self.peak_count = max(self.peak_count, self.count)
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)


@dataclass(slots=True)
class Ledger:
    """Buffers that come and go on this rank, counted where storage is taken and given up."""

    whole_params: Tally = field(default_factory=Tally)
    whole_grads: Tally = field(default_factory=Tally)
    slices: Tally = field(default_factory=Tally)  # of parameters or gradients, while they rotate


class ElasticBuffer:
    """A 1-D tensor whose storage comes and goes while every view of it stays valid.

    Tensors that autograd saved are views of one storage object, so the storage is resized and
    never replaced. Between `free` and `alloc` reading any view is an error.
    """

    def __init__(
        self,
        numel: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        tally: Tally,
        layout: UnitLayout | None = None,
    ) -> None:
        self.values = torch.empty(numel, dtype=dtype, device=device)
        # Made now: a view needs storage to be made.
        self.boxes = {} if layout is None else box_views(self.values, layout)
        self._num_bytes = self.values.untyped_storage().nbytes()
        self._tally = tally
        self.values.untyped_storage().resize_(0)

    @property
    def alive(self) -> bool:
        return self.values.untyped_storage().nbytes() > 0

    def alloc(self) -> None:
        """Allocates the storage; its contents are undefined."""
        assert not self.alive, "storage taken twice"
        self.values.untyped_storage().resize_(self._num_bytes)
        self._tally.change(1, self._num_bytes)

    def free(self) -> None:
        """Gives the storage up."""
        assert self.alive, "storage dropped twice"
        self.values.untyped_storage().resize_(0)
        self._tally.change(-1, -self._num_bytes)


def box_views(whole: Tensor, layout: UnitLayout) -> dict[str, Tensor]:
    """The boxes of a unit as views of its whole flat buffer, by parameter."""
    return {
        span.box.name: whole[span.offset : span.stop].view(span.box.extent) for span in layout.spans
    }
