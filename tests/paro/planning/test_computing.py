"""The computation of a rank, and what it sends by each algorithm; published runs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from model.config import (
    LLAMA_PRESETS,
    LoraConfig,
    RecomputeConfig,
    is_adapter,
    targets_of,
)
from model.llama import Llama
from model.trainable import Trainable
from model.units import flops_per_token
from paro.collectives.api import make_collectives
from paro.collectives.choice import AlgorithmChoice
from paro.collectives.interface import CollectiveRequest
from paro.collectives.schedule import COLLECTIVES, NCCL_COLLECTIVES, Op
from paro.distributed.comm_stream import InlineStreams
from paro.distributed.groups import CommResources, make_groups
from paro.distributed.world import World
from paro.machine.files import find_machine
from paro.planning.computing import device_of
from paro.planning.context_parallel import AttentionSchedules
from paro.planning.estimator import Estimate, Estimator
from paro.planning.run_memory import RunMemory
from paro.planning.search_space import PlanRequest
from paro.planning.sending import Sender, traffic_of
from paro.precision import PrecisionConfig
from paro.spec.context_layout import ContextLayout
from paro.spec.run_spec import Materialize
from paro.spec.sharding_spec import Collective
from paro.strategy import legal_letters
from paro.text import size_text
from paro.topology import Axes, Sent, StreamKind, make_topology
from tests.helpers.closed_form import letter_traffic
from tests.helpers.training import llama
from tests.paro.launch.test_dry_run import MOCK, planned, printed
from tests.paro.planning.cases import (
    DEVICE,
    SMALL,
    attention_of,
    compute_seconds,
    costs,
    machine,
    moves,
    one_unit,
    plan_request,
    run_of,
    silence,
)


@pytest.mark.parametrize("materialize", [Materialize.GATHER, Materialize.ROTATE])
def test_all_that_trains_is_counted_as_in_a_training(materialize: Materialize) -> None:
    model = replace(SMALL, recompute=RecomputeConfig(granularity="full"))
    given = plan_request(model, materialize=materialize)
    found = estimate(given, "III")
    of_token = flops_per_token(model, given.seq_length, causal=False)
    per_device = of_token * given.global_batch_size * given.seq_length / given.world_size
    assert found.mfu == pytest.approx(per_device / found.seconds / DEVICE.peak_flops)


KEPT = RecomputeConfig(granularity="full", keeps_core=True)


@pytest.mark.parametrize(
    ("layout", "recompute", "apart", "rate"),
    [
        (ContextLayout(), None, False, "attention_flops"),
        (ContextLayout(size=8, heads=8), None, False, "attention_flops"),
        (ContextLayout(size=8), None, False, "parts_flops"),
        (ContextLayout(size=8, heads=2), None, False, "parts_flops"),
        (ContextLayout(size=8, gathers=True), None, False, "parts_flops"),
        (ContextLayout(), KEPT, False, "parts_flops"),
        (ContextLayout(size=8, heads=8), KEPT, False, "parts_flops"),
        (ContextLayout(), None, True, "documents_flops"),
        (ContextLayout(size=8), KEPT, True, "documents_flops"),
    ],
)
def test_every_way_of_attention_has_the_rate_of_its_kernel(
    layout: ContextLayout, recompute: RecomputeConfig | None, rate: str, *, apart: bool
) -> None:
    model = replace(SMALL, recompute=recompute)
    rates = ("attention_flops", "parts_flops", "documents_flops")

    def seconds(**given: float) -> float:
        own = machine(device=replace(DEVICE, **given))
        case = plan_request(model, machine=own, seq_length=2**16, context=layout, apart=apart)
        return compute_seconds(costs(case, "III"))

    fast, slow = DEVICE.sustained_flops, DEVICE.sustained_flops / 3
    all_fast = dict.fromkeys(rates, fast)
    for each in rates:
        assert (seconds(**(all_fast | {each: slow})) > seconds(**all_fast)) == (each == rate), each
    assert seconds(attention_flops=slow) == seconds(**dict.fromkeys(rates, slow))


@pytest.mark.parametrize(
    ("trainable", "lora"),
    [
        (Trainable(share=0.25), None),
        (Trainable(), LoraConfig(rank=4, targets=targets_of("all-linear"))),
    ],
)
def test_what_is_not_computed_does_not_count(trainable: Trainable, lora: LoraConfig | None) -> None:
    given = plan_request(replace(SMALL, lora=lora), trainable=trainable)
    assert 0 < estimate(given, "III").mfu <= DEVICE.sustained_flops / DEVICE.peak_flops
    part, everything = (costs(one, "III").computing for one in (given, plan_request()))
    assert everything.seconds / 3 < part.seconds < everything.seconds
    trained = trainable.names(given.model)
    of_token = flops_per_token(given.model, given.seq_length, trained, causal=False)
    # The first trained block's gradients of its input are computed, too; adapters take no time.
    products = part.seconds * DEVICE.sustained_flops
    assert products == pytest.approx(of_token * part.run.num_tokens, rel=0.1)


LLAMA_7B = LLAMA_PRESETS["7B"]
LLAMA_65B = replace(LLAMA_PRESETS["65B"], recompute=RecomputeConfig(granularity="full"))


def run_on(name: str, ranks: int, size: int, count: int, **changes: Any) -> PlanRequest:
    """A run with `count` micro-batches of `size` a step and flat collectives."""
    batch = {"micro_batch_size": size, "global_batch_size": size * ranks * count}
    machine = find_machine(name).for_world(ranks, subject="--paro-machine")
    return plan_request(machine=machine, **{"collective": "flat"} | batch | changes)


def paro(ranks: int = 32, size: int = 4, count: int = 10, **changes: Any) -> PlanRequest:
    """PaRO's runs; nothing overlaps in the code that was released."""
    return run_on("dgx-a100-roce100", ranks, size, count, prefetch_units=0, **changes)


def estimate(run: PlanRequest, strategy: str) -> Estimate:
    return Estimator(run).estimate(run.candidate(run.strategy(strategy)))


def gain(run: PlanRequest, slower: str, faster: str) -> float:
    return estimate(run, slower).seconds / estimate(run, faster).seconds


@pytest.mark.verify
def test_gains_in_paros_main_tables() -> None:
    """The bandwidth between its nodes is a fit to these."""
    assert gain(paro(model=LLAMA_7B), "GGG", "IIG") == pytest.approx(2.28, rel=0.2)
    assert gain(paro(model=LLAMA_7B), "NGG", "NII") == pytest.approx(1.67, rel=0.2)
    assert gain(paro(model=LLAMA_65B), "GGG", "IIG") == pytest.approx(1.86, rel=0.2)


@pytest.mark.verify
def test_65b_fits_on_32_devices_where_paro_ran_it() -> None:
    run, named = paro(model=LLAMA_65B), ("NGG", "NII", "NIG", "III", "IIG", "IGG", "GGG")
    assert {name for name in named if estimate(run, name).fits} == {"IIG", "IGG", "GGG"}


@pytest.mark.verify
@pytest.mark.parametrize(
    ("run", "published"),
    [
        (run_on("a800-ib800", 64, 1, 4, model=LLAMA_7B, seq_length=4096), 4416),
        (run_on("a800-ib800", 64, 1, 8, model=LLAMA_7B, seq_length=4096), 4503),
        (run_on("a100-roce400", 8, 2, 4, model=LLAMA_7B, seq_length=2048), 4078),
    ],
    ids=["AMSP, 4 micro-batches", "AMSP, 8 micro-batches", "InternEvo"],
)
def test_tokens_per_second_where_links_do_not_limit(run: PlanRequest, published: float) -> None:
    """From these runs come the sustained FLOP/s of their machines."""
    tokens = estimate(run, "1,1,8").tokens_per_second / run.world_size
    assert tokens == pytest.approx(published, rel=0.02)


@pytest.mark.verify
def test_mfu_of_mics_on_1024_devices() -> None:
    """It overlaps nothing. The device is a line through AMSP's overlapped runs on 64 devices."""
    run = run_on("a800-ib800", 1024, 1, 1, model=LLAMA_7B, seq_length=4096, prefetch_units=0)
    device = replace(device_of(run.machine), sustained_flops=221.8e12, step_seconds=0.219)
    fitted = replace(run, machine=replace(run.machine, device=device), collective="native")
    assert estimate(fitted, "8,8,8").mfu == pytest.approx(0.35, rel=0.15)


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
            comms, whole = CommResources(InlineStreams()), torch.zeros(NUMEL, dtype=torch.bfloat16)
            groups = make_groups(topology, rank, {}, None, comms)
            collectives = make_collectives(choice, groups)
            collectives.run(CollectiveRequest(op, whole, span, whole.dtype))
            counted = comms.traffic.take()
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
    unit = 1000 * world_size
    units = one_unit(unit, frozen=frozen * unit)
    bf16 = PrecisionConfig(compute="bf16")
    sender = Sender(group_size=group_size, rank=None)
    run = run_of(SMALL, letters, bf16, world_size=world_size, group_size=group_size)
    sent = traffic_of(moves(3, frozen=frozen), run.specs(units), sender)
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
OF_BLOCK = (*("attention_norm", "wv", "q_norm"), *("k_norm", "bv"), *("wo", "w_down"))
ADAPTERS = ("wq", "wv", "wo")


TRAINED = [
    *((MODEL, frozenset({f"blocks.1.{name}", "head.weight"})) for name in OF_BLOCK),
    *((replace(MODEL, lora=LoraConfig(rank=2, targets=(n,))), frozenset()) for n in ADAPTERS),
]


@pytest.mark.slow("builds trainings")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_a_rank_sends_what_the_part_that_trains_needs(
    monkeypatch: pytest.MonkeyPatch, layout: str, recompute: str
) -> None:
    silence(monkeypatch)
    shared, resources = LAYOUTS[layout], CommResources(InlineStreams())
    world, sender = World(size=4, group=4), Sender(group_size=4, rank=0)
    core, precision = attention_of(shared, world, resources), PrecisionConfig(compute="fp32")
    tokens_BS = torch.zeros(1, 16 // shared.size, dtype=torch.int64)
    for model, names in TRAINED:
        config = replace(model, recompute=RECOMPUTES[recompute])
        is_trained = names.__contains__ if names else is_adapter
        llama = Llama(config)
        for parameter in llama.parameters():
            parameter.detach().zero_()
        llama.core = core
        llama.freeze(is_trained)
        llama(tokens_BS, tokens_BS, torch.ones(tokens_BS.shape)).backward()
        run = run_of(config, "NNG", precision, world_size=4, is_trained=is_trained, context=shared)
        moves = RunMemory(None).step(run).schedule(1).actions()
        said = AttentionSchedules(run).sent(moves, sender)
        assert resources.traffic.take() == said, names or config.lora
