"""Attention of a sample that several ranks share is that of the whole sample, and its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from model.attention import Documents, attend
from model.kept import checkpointed
from paro.context_parallel.attention import make_context_attention
from paro.context_parallel.layout import ContextLayout, num_pieces
from paro.distributed.byte_counter import ByteCounter, Sent
from paro.distributed.comm_stream import CommStreams, make_comm_streams
from paro.distributed.exposed_time import Exposure
from paro.distributed.groups import GroupConfig
from paro.distributed.links import Links
from paro.distributed.world import World
from tests.helpers.late_streams import LateStreams
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")
SAMPLES, HEAD = 2, 8


class Case(NamedTuple):
    """Ranks that share a sample, heads of queries and of keys, and documents of the two samples."""

    size: int
    heads: int
    num_heads: int
    num_kv_heads: int
    lengths: tuple[int, ...] | None = None
    overlap: bool = True
    late: int | None = None  # the seed of streams whose jobs run as late as waits allow
    recomputes: bool = False

    @property
    def seq_length(self) -> int:
        return 2 * self.size * 3

    def inputs(self) -> list[Tensor]:
        """Queries, keys, values and the gradient of the output, of whole samples."""
        generator = torch.Generator().manual_seed(7)
        return [
            torch.randn(SAMPLES, self.seq_length, heads, HEAD, generator=generator)
            for heads in (self.num_heads, *2 * (self.num_kv_heads,), self.num_heads)
        ]

    def documents(self) -> Documents | None:
        return None if self.lengths is None else Documents(self.lengths)


CASES = {
    4: [
        Case(2, 2, 4, 4),
        Case(4, 4, 4, 4, overlap=False),
        Case(4, 4, 16, 8),  # pieces with keys and values of their own
        Case(4, 4, 16, 4, lengths=(5, 19, 1, 1, 22)),  # of two samples of 24 tokens
        Case(4, 4, 8, 2),  # each head of keys and values twice
        Case(4, 4, 4, 1, recomputes=True),
        Case(4, 4, 16, 8, late=1, recomputes=True),
        Case(2, 2, 8, 2, late=2),
        Case(2, 2, 8, 2, lengths=(12, 3, 9), recomputes=True),
    ]
}


def attention_on_ranks(cases: Sequence[Case], group_size: int) -> list[tuple[list[Tensor], Sent]]:
    """The output and the gradients of queries, keys and values of this rank's tokens."""
    rank = dist.get_rank()
    world = World(rank=rank, size=dist.get_world_size(), group=group_size)
    found = []
    for case in cases:
        layout, traffic = ContextLayout(size=case.size, heads=case.heads), ByteCounter()
        streams: CommStreams = make_comm_streams(CPU, overlap=case.overlap, backend="gloo")
        if case.late is not None:
            streams = LateStreams(case.late, eager=0.3)
        config = GroupConfig(timeout=timedelta(seconds=60))
        links = Links(streams, traffic, Exposure(), config)
        core = make_context_attention(layout, world, links, None, "auto")
        *parts, grad = (
            torch.cat([whole[:, own.start : own.stop] for own in ranges], 1)
            for ranges in (layout.ranges(rank, case.seq_length),)
            for whole in case.inputs()
        )
        leaves = [part.requires_grad_() for part in parts]
        for _ in range(2):  # what a recomputation left under way is waited for
            given = (*leaves, case.documents(), None)
            out = checkpointed(core, *given) if case.recomputes else core(*given)
            grads = torch.autograd.grad(out, leaves, grad)
        found.append(([out.detach(), *grads], traffic.take()))
        streams.close()
        core.close()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", CASES)
def test_outputs_and_gradients_are_those_of_the_whole_sample(world_size: int) -> None:
    cases = CASES[world_size]
    by_rank = run_ranks(attention_on_ranks, world_size, cases, world_size)
    for number, case in enumerate(cases):
        layout = ContextLayout(size=case.size, heads=case.heads)
        *inputs, grad = case.inputs()
        leaves = [each.requires_grad_() for each in inputs]
        out = attend(*leaves, "auto", case.documents())
        wanted = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
        for rank, found in enumerate(by_rank):
            for whole, part in zip(wanted, found[number][0], strict=True):
                own = layout.ranges(rank, case.seq_length)
                expected = torch.cat([whole[:, each.start : each.stop] for each in own], 1)
                torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-5, msg=str(case))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "num_ranks", "pieces"),
    [(32, 32, 8, 4), (32, 8, 8, 4), (32, 16, 8, 2), (24, 24, 8, 1), (12, 6, 2, 1), (8, 8, 8, 1)],
)
def test_pieces_have_whole_groups_of_queries(
    num_heads: int, num_kv_heads: int, num_ranks: int, pieces: int
) -> None:
    layout = ContextLayout(size=num_ranks, heads=num_ranks)
    assert num_pieces(num_heads, num_kv_heads, layout) == pieces


def test_no_piece_shares_keys_that_go_round_a_ring() -> None:
    layout = ContextLayout(size=16, heads=8)
    assert [num_pieces(32, kv_heads, layout) for kv_heads in (8, 16, 32)] == [1, 2, 4]
