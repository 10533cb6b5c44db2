"""What a rank sends by each algorithm is what it counts when it sends it."""

from __future__ import annotations

import re

import pytest
import torch

from paro.collectives.api import make_collectives
from paro.collectives.choice import AlgorithmChoice
from paro.collectives.interface import Request
from paro.collectives.schedule import COLLECTIVES, NCCL_COLLECTIVES, Op
from paro.distributed.comm_stream import InlineStreams
from paro.distributed.groups import Links, make_groups
from paro.planning.run_memory import RunMemory
from paro.planning.sending import Sender, traffic_of
from paro.precision import PrecisionConfig
from paro.spec.sharding_spec import Collective, specs_of, state_bytes
from paro.text import size_text
from paro.topology import Axes, Sent, StreamKind, make_topology
from tests.helpers.closed_form import letter_traffic
from tests.paro.launch.test_dry_run import MOCK, planned, printed
from tests.paro.planning.lone_rank import silence
from tests.paro.planning.on_ranks import moves, on_ranks, one_unit

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
    choice = AlgorithmChoice(
        names=(name,), num_chunks=(lambda *_: 3) if backend == "nccl" else None
    )
    for op in Op:
        one = Collective(StreamKind.REDUCE, op, span, NUMEL, "bf16")
        total = Sent()
        for rank in range(world_size):
            links, whole = Links(InlineStreams()), torch.zeros(NUMEL, dtype=torch.bfloat16)
            groups = make_groups(topology, rank, {}, None, links)
            collectives = make_collectives(choice, groups)
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
    run = plan.config.spec
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


# 7B parameters on 4 nodes of 8, 10 micro-batches, bf16 gradients: GB of model state per rank, GB
# sent per rank and step inside a node and between nodes. Copied from the table, digit by digit.
PUBLISHED_7B = {
    "NNN": ("112.00", "24.5", "2.62"),
    "NNI": ("38.50", "24.5", "2.62"),
    "NNG": ("30.62", "24.5", "2.62"),
    "NII": ("26.25", "134.8", "2.62"),
    "NIG": ("18.38", "134.8", "2.62"),
    "NGG": ("17.06", "134.8", "14.44"),
    "INI": ("26.25", "257.2", "2.62"),
    "ING": ("18.38", "257.2", "2.62"),
    "III": ("14.00", "367.5", "2.62"),
    "IIG": ("6.12", "367.5", "2.62"),
    "IGG": ("4.81", "367.5", "14.44"),
    "GNG": ("17.06", "257.2", "27.56"),
    "GIG": ("4.81", "367.5", "27.56"),
    "GGG": ("3.50", "367.5", "39.38"),
}
PAPER_PRECISION = PrecisionConfig(compute="bf16", grad_reduce_in_bf16=True)


@pytest.mark.parametrize("letters", PUBLISHED_7B)
def test_published_figures_for_7b(letters: str) -> None:
    strategy, topology = on_ranks(letters, world_size=32, group_size=8)
    specs = specs_of(one_unit(7 * 10**9), strategy, topology, PAPER_PRECISION)
    states = state_bytes(specs)
    sender = Sender(group_size=8, rank=None)
    sent = traffic_of(moves(10), specs, sender)
    memory, intra, inter = PUBLISHED_7B[letters]
    assert f"{states.total / 1e9:.2f}" == memory
    assert f"{sent.intra / 1e9:.1f}" == intra
    assert f"{sent.inter / 1e9:.2f}" == inter


@pytest.mark.parametrize("letters", PUBLISHED_7B)
@pytest.mark.parametrize(("world_size", "group_size"), [(32, 8), (8, 2), (6, 3), (4, 4), (5, 1)])
@pytest.mark.parametrize("frozen", [0, 15])
def test_axes_and_closed_form_agree(
    letters: str, world_size: int, group_size: int, frozen: int
) -> None:
    strategy, topology = on_ranks(letters, world_size=world_size, group_size=group_size)
    unit = 1000 * world_size
    units = one_unit(unit, frozen=frozen * unit)
    bf16 = PrecisionConfig(compute="bf16")
    sender = Sender(group_size=group_size, rank=None)
    specs = specs_of(units, strategy, topology, bf16)
    sent = traffic_of(moves(3, frozen=frozen), specs, sender)
    assert sent == letter_traffic(
        letters,
        params_bytes=2 * (1 + frozen) * unit,
        trained_bytes=2 * unit,
        world_size=world_size,
        group_size=group_size,
        num_micro_batches=3,
    )
