"""The input and the expected result of a collective, computed by every rank independently."""

# The data are random integers, drawn identically on every rank, and bounded so that sums over all
# ranks are just exact in their type. So a result is right to the last bit or wrong, in whatever
# order it was summed, and one that was communicated in a smaller type is wrong. (bf16 holds
# integers up to 256: for more ranks than that each draws from -1, 0, 1, whose sum stays far below.)

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paro.collectives.schedule import Op
from paro.topology import AxisSpan, nested_range

SEED = 1234


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One collective on a whole buffer of `numel` elements along an axis span."""

    op: Op
    span: AxisSpan
    numel: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def shard_of(self, rank: int) -> slice:
        return slice(*nested_range(self.span, rank, self.numel))


def moves_of(
    op: Op, span: AxisSpan, sizes: Sequence[int], *, ranks: int, dtype: torch.dtype = torch.float32
) -> list[Move]:
    """Return one collective per size in bytes, rounded up until all `ranks` have equally many
    elements."""
    numels = dict.fromkeys(-(-size // (dtype.itemsize * ranks)) * ranks for size in sizes)
    return [Move(op=op, span=span, numel=numel, dtype=dtype) for numel in numels]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A collective with this rank's input, and with the result computed without it."""

    move: Move
    shard: slice
    given: Tensor  # a gather's: this rank's shard
    expected: Tensor  # a reduce-scatter's: this rank's shard

    def fill(self, buffer: Tensor) -> None:
        """Prepare `buffer` for the collective; elements that an all-gather must write are NaN."""
        if self.move.op is Op.ALL_GATHER:
            buffer.fill_(torch.nan)
            buffer[self.shard].copy_(self.given)
        else:
            buffer.copy_(self.given)

    def is_right(self, buffer: Tensor) -> bool:
        """Return whether `buffer` has the collective's expected result."""
        result = buffer[self.shard] if self.move.op is Op.REDUCE_SCATTER else buffer
        return torch.equal(result, self.expected)


def zero_trial(move: Move, rank: int, device: torch.device) -> Trial:
    """Return the trial of one rank with zeros, which take no time to draw and sum."""
    shard = move.shard_of(rank)
    whole = torch.zeros(move.numel, dtype=move.dtype, device=device)
    given = whole[shard] if move.op is Op.ALL_GATHER else whole
    expected = whole[shard] if move.op is Op.REDUCE_SCATTER else whole
    return Trial(move=move, shard=shard, given=given, expected=expected)


def make_trial(move: Move, members: Sequence[int], rank: int, device: torch.device) -> Trial:
    """Return the trial of one rank among the `members` of its axis span."""
    whole = torch.empty(move.numel, dtype=move.dtype)
    if move.op is Op.ALL_GATHER:
        given = draw(move, members, rank, rank)
        for member in members:
            whole[move.shard_of(member)] = draw(move, members, member, member)
        expected = whole
    else:
        given = torch.empty_like(whole)
        for place in members:
            given[move.shard_of(place)] = draw(move, members, rank, place)
            if move.op is Op.ALL_REDUCE or place == rank:
                drawn = [draw(move, members, member, place).double() for member in members]
                whole[move.shard_of(place)] = torch.stack(drawn).sum(0)
        expected = whole if move.op is Op.ALL_REDUCE else whole[move.shard_of(rank)].clone()
    return Trial(
        move=move,
        shard=move.shard_of(rank),
        given=given.to(device),
        expected=expected.to(device),
    )


def draw(move: Move, members: Sequence[int], rank: int, place: int) -> Tensor:
    """Return the data of `rank` at the position of the shard of rank `place`."""
    key = f"{SEED}/{move.op.value}/{move.numel}/{move.dtype}/{rank}/{place}"
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    most = max(1, int(2 / torch.finfo(move.dtype).eps) // len(members))
    size = (move.numel // len(members),)
    return torch.randint(-most, most + 1, size, generator=generator, dtype=move.dtype)
