"""What a rank sends by each algorithm is what it counts when it sends it."""

from __future__ import annotations

import re

import pytest
import torch

from paro.collectives.api import make_collectives
from paro.collectives.choice import AlgorithmChoice
from paro.collectives.interface import Request
from paro.collectives.schedule import COLLECTIVES, NCCL_COLLECTIVES, Op
from paro.distributed.byte_counter import Sent
from paro.distributed.comm_stream import InlineStreams
from paro.distributed.groups import make_groups
from paro.distributed.links import Links
from paro.planning.run_memory import RunMemory
from paro.planning.sending import Sender
from paro.spec.sharding_spec import Collective
from paro.text import size_text
from paro.topology import Axes, StreamKind, make_topology
from paro.training.assembly import run_spec_of
from tests.paro.launch.test_dry_run import MOCK, planned, printed
from tests.paro.planning.lone_rank import silence

WAYS = [("nccl", name) for name in NCCL_COLLECTIVES] + [("gloo", name) for name in COLLECTIVES]
# Ranks, ranks of a group, degrees, and where the span begins and ends.
SPANS = [
    (6, 3, (), 1, 6),
    (8, 4, (2, 4), 1, 8),
    (8, 4, (2,), 2, 8),
    (8, 2, (4,), 1, 4),
    (8, 2, (4,), 2, 8),
    (4, 4, (2,), 1, 4),
    (4, 1, (2,), 1, 4),
]
NUMEL = 16 * 9 * 5 * 7


@pytest.mark.parametrize("shape", SPANS, ids=str)
@pytest.mark.parametrize(("backend", "name"), WAYS)
def test_ranks_count_what_a_sender_sends(
    monkeypatch: pytest.MonkeyPatch, backend: str, name: str, shape: tuple[int, ...]
) -> None:
    silence(monkeypatch, backend)
    world_size, group_size, degrees, *ends = shape
    topology = make_topology(world_size=world_size, group_size=group_size, degrees=degrees)
    span = topology.axes_between(*ends)
    choice = AlgorithmChoice(names=(name,), pieces=(lambda *_: 3) if backend == "nccl" else None)
    for op in Op:
        one = Collective(StreamKind.REDUCE, op, span, NUMEL, "bf16")
        total = Sent()
        for rank in range(world_size):
            links, whole = Links(InlineStreams()), torch.zeros(NUMEL, dtype=torch.bfloat16)
            groups = make_groups(topology, rank, {}, None)
            collectives = make_collectives(choice, groups, links)
            collectives.run(Request(op, whole, span, whole.dtype))
            counted = links.traffic.take()
            sender = Sender(group_size=group_size, rank=rank, choice=choice)
            assert counted == sender.sent([one]), (rank, op)
            total += counted
        mean = Sender(group_size=group_size, rank=None, choice=choice).sent([one])
        assert mean * world_size == total, op


def test_auto_sends_as_the_algorithm_that_it_chooses() -> None:
    topology = make_topology(world_size=4, group_size=2, degrees=())
    large = Collective(StreamKind.GATHER, Op.ALL_GATHER, topology.axes_between(1, 4), 2000, "bf16")
    asked: list[tuple[Op, Axes, int]] = []

    def best(op: Op, axes: Axes, num_bytes: int) -> str:
        asked.append((op, axes, num_bytes))
        return "ring" if num_bytes > 1000 else "native"

    choice = AlgorithmChoice(names=("native", "ring"), best=best)
    sender = Sender(group_size=2, rank=0, choice=choice)
    assert sender.sent([large]) == Sent(intra=3000)
    assert sender.sent([large._replace(numel=200)]) == Sent(intra=200, inter=100)
    assert asked == [(Op.ALL_GATHER, Axes.BOTH, size) for size in (4000, 400)]


@pytest.mark.parametrize(
    ("more", "differ"),
    [
        ("--paro-collective ho-ring", False),
        ("--paro-collective ring", True),
        ("--paro-collective flat", True),
        ("--paro-collective ring --paro-strategy III", False),
        ("--context-parallel-size 8 --paro-context-ring flat", True),
        ("--optimizer muon", True),
    ],
)
def test_where_ranks_send_different_amounts_it_says_rank_0s_and_the_mean(
    more: str, differ: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{MOCK} --paro-strategy NIG {more} --dry-run --world-size 8 --ranks-per-node 4"
    plan, (*_, lines) = planned(words), printed(words, capsys).partition("> sent by a rank ")
    run = run_spec_of(plan.config, "cpu")
    own, mean = (RunMemory(None).sent(run, plan.num_micro_batches, rank) for rank in (0, None))
    texts = [f"{size_text(sent.intra)} .*{size_text(sent.inter)} " for sent in (own, mean)]
    found, then, *_ = lines.splitlines()
    assert re.search(texts[0], found)
    assert "without codes" not in lines
    assert (own != mean) is differ
    assert bool(re.search(f"rank 0.*{texts[1]}", then)) is differ


@pytest.mark.parametrize(
    ("warmup", "samples"),
    [
        ("--lr-warmup-iters 3", "first 192 samples"),
        ("--paro-inter-bits-warmup-iters 2", "first 128 samples"),
        ("--lr-warmup-iters 3 --paro-inter-bits-warmup-iters 0", None),
    ],
)
def test_it_says_in_how_many_samples_nothing_is_sent_as_codes(
    warmup: str, samples: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{MOCK} --paro-strategy NIG --bf16 --paro-inter-grad-bits 4 --global-batch-size 64"
    told = printed(f"{words} {warmup} --dry-run --world-size 8 --ranks-per-node 4", capsys)
    assert ("without codes" in told) is (samples is not None)
    assert (samples or "> sent by") in told
