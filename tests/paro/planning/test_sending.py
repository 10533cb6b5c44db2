"""A rank counts as sent what a sender sends by each algorithm, and for attention."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from model.config import LlamaConfig, LoraConfig, RecomputeConfig, is_adapter
from model.llama import Llama
from paro.collectives.api import make_collectives
from paro.collectives.choice import AlgorithmChoice
from paro.collectives.interface import Request
from paro.collectives.schedule import COLLECTIVES, NCCL_COLLECTIVES, Op
from paro.distributed.comm_stream import InlineStreams
from paro.distributed.groups import Links, make_groups
from paro.distributed.world import World
from paro.planning.context_parallel import ContextAttention
from paro.planning.run_memory import RunMemory
from paro.planning.sending import Sender, traffic_of
from paro.precision import PrecisionConfig
from paro.spec.context_layout import ContextLayout
from paro.spec.sharding_spec import Collective, specs_of
from paro.strategy import legal_letters
from paro.text import size_text
from paro.topology import Axes, Sent, StreamKind, make_topology
from tests.helpers.closed_form import letter_traffic
from tests.helpers.models import llama
from tests.paro.launch.test_dry_run import MOCK, planned, printed
from tests.paro.planning.lone_rank import attention_of, silence
from tests.paro.planning.on_ranks import moves, on_ranks, one_unit, run_of

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


@pytest.mark.parametrize("letters", legal_letters())
@pytest.mark.parametrize(("world_size", "group_size"), [(32, 8), (6, 3), (4, 4)])
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


MODEL = replace(
    llama(3, 16, 24, heads=(16, 4, 4), length=16, vocab=32), add_qkv_bias=True, qk_layernorm=True
)
LAYOUTS = {
    "p2p": ContextLayout(size=4, inner=4),
    "allgather": ContextLayout(size=4, gathers=True),
    # Keys and values go with the first of 4 chunks of the queries, and with each of 2 chunks.
    "a2a": ContextLayout(size=4, heads=4),
    "a2a of two heads": ContextLayout(size=2, heads=2),
    "a2a+p2p": ContextLayout(size=4, heads=2, inner=4),
}
RECOMPUTES = {
    "none": None,
    "core": RecomputeConfig(granularity="selective"),
    "pairs": RecomputeConfig(granularity="full", num_layers=2),
    "all but attention": RecomputeConfig(granularity="full", keeps_core=True),
}
# What trains of block 1, by whether attention has gradients of queries, of keys or values, or none.
QUERIES = ("attention_norm", "wv", "q_norm")
KEYS = ("k_norm", "bv")
NONE = ("wo", "w_down")
ADAPTERS = ("wq", "wv", "wo")


def trained_cases() -> list[tuple[LlamaConfig, frozenset[str]]]:
    head = {"head.weight"}
    adapted = [replace(MODEL, lora=LoraConfig(rank=2, targets=(name,))) for name in ADAPTERS]
    names = [frozenset({f"blocks.1.{name}"} | head) for name in (*QUERIES, *KEYS, *NONE)]
    return [(MODEL, trained) for trained in names] + [(one, frozenset()) for one in adapted]


def zeros(config: LlamaConfig) -> Llama:
    llama = Llama(config)
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.zero_()
    return llama


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_a_rank_sends_what_the_part_that_trains_needs(
    monkeypatch: pytest.MonkeyPatch, layout: str, recompute: str
) -> None:
    silence(monkeypatch)
    shared, links = LAYOUTS[layout], Links(InlineStreams())
    world, sender = World(size=4, group=4), Sender(group_size=4, rank=0)
    core, precision = attention_of(shared, world, links), PrecisionConfig(compute="fp32")
    tokens_BS = torch.zeros(1, 16 // shared.size, dtype=torch.int64)
    for model, names in trained_cases():
        config = replace(model, recompute=RECOMPUTES[recompute])
        is_trained = names.__contains__ if names else is_adapter
        llama = zeros(config)
        llama.core = core
        llama.freeze(is_trained)
        llama(tokens_BS, tokens_BS, torch.ones(tokens_BS.shape)).backward()
        run = run_of(config, "NNG", precision, world_size=4, is_trained=is_trained, context=shared)
        moves = RunMemory(None).step(run).schedule(1).actions()
        said = ContextAttention(run).sent(moves, sender)
        assert links.traffic.take() == said, names or config.lora
