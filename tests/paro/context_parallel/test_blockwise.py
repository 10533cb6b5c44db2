"""Blockwise attention on gloo ranks, by rings and by gathers; its mask, its check at the start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate, compress, pairwise, product
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from model.attention import QKV, Documents, SavedAttention, attend, documents_of
from model.layers import checkpointed
from paro.collectives.api import make_collectives
from paro.collectives.choice import AlgorithmChoice, needed_groups
from paro.context_parallel.attention import AllToAll, ContextAttention, check_core
from paro.context_parallel.blockwise import (
    Bounds,
    KVExchange,
    blockwise_attention,
    bounds_of,
    local_lengths,
    mask_block,
)
from paro.context_parallel.exchange import GatherKVExchange, RingKVExchange, _RingKV
from paro.distributed.comm_stream import DONE, CommStreams, InlineStreams, ThreadStreams
from paro.distributed.exposed_time import ExposedTimer
from paro.distributed.groups import ByteCounter, CommResources, make_groups
from paro.distributed.process_group import RuntimeConfig
from paro.planning.context_parallel import kv_exchange_bytes
from paro.precision import PrecisionConfig
from paro.spec import kv_exchange
from paro.spec.context_layout import ContextLayout
from paro.spec.kv_exchange import AttendKV, DoubleRing, GatheredKV, KVRoute, SendKV, WaitKV
from paro.topology import COLLECTIVE_STREAMS, StreamKind, make_topology
from tests.helpers.late_streams import LateStreams
from tests.helpers.ranks import run_ranks
from tests.helpers.refusals import refused
from tests.helpers.triton_kernels import hopper
from tests.model.values import assert_near, normal
from tests.paro.late_mutations import all_waits
from tests.paro.planning.cases import run_of
from tests.paro.planning.test_units import SMALL

CHUNK, CHANNELS, SAMPLES, HEADS = 3, 8, 2, 4
CPU = torch.device("cpu")
CONFIG = RuntimeConfig(distributed_backend="gloo")


def attend_whole(qkv: QKV, documents: Documents | None, _: SavedAttention | None) -> Tensor:
    return attend(qkv, "auto", documents)


class Inputs(NamedTuple):
    """Whole samples, and the lengths of their documents."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    lengths: tuple[int, ...] | None


def inputs(places: int, groups: int, *, packed: bool, num_heads: int = HEADS) -> Inputs:
    tokens = 2 * places * CHUNK
    lengths: tuple[int, ...] | None = None
    if packed:
        # One that spans all places, beside some of one token; then odd ones.
        odd = [5] * (tokens // 5) + [tokens % 5] * (tokens % 5 > 0)
        lengths = (1, 1, tokens - 3, 1, *odd)
    heads = (num_heads, groups, groups, num_heads)
    tensors = (normal(SAMPLES, tokens, each, CHANNELS, seed=n) for n, each in enumerate(heads))
    return Inputs(*tensors, lengths)


def cut(tensor: Tensor, place: int, places: int) -> Tensor:
    chunks = tensor.chunk(2 * places, 1)
    return torch.cat([chunks[place], chunks[2 * places - 1 - place]], 1)


def attended(
    core: Callable[..., Tensor],
    given: Inputs,
    own: Callable[[Tensor], Tensor] = Tensor.clone,
    saved: SavedAttention | None = None,
) -> list[Tensor]:
    """Output and gradients of a rank's own tokens: by default of all."""
    leaves = [own(part).detach().requires_grad_() for part in given[:3]]
    out = core((*leaves,), documents_of(given.lengths, SAMPLES, CPU), saved)
    if saved is not None:
        saved.is_second_run = True
    return [out.detach(), *torch.autograd.grad(out, leaves, own(given.grad))]


def in_blocks(
    exchange: KVExchange, given: Inputs, saved: SavedAttention | None = None
) -> list[Tensor]:
    """With `saved` where a recomputation finds the output."""
    core = blockwise_attention(exchange)
    core = core if saved is None else partial(checkpointed, core)
    own = partial(cut, place=exchange.ring_rank, places=exchange.ring_size)
    return attended(core, given, own, saved)


class Ways:
    """The ways in which all ranks, `inner` of which are a group, exchange keys and values."""

    def __init__(self, inner: int) -> None:
        self.rank, world = dist.get_rank(), dist.get_world_size()
        self.topology = make_topology(world_size=world, group_size=inner, degrees=())
        self.whole = self.topology.axes
        spans = frozenset({self.whole, *((axis,) for axis in self.whole)})
        self.traffic, self.exposed_timer = ByteCounter(), ExposedTimer()
        by_kind, resources = {StreamKind.CONTEXT: spans}, self.resources(InlineStreams())
        self.groups = make_groups(self.topology, self.rank, by_kind, CONFIG, resources)
        self._closes: list[Callable[[], None]] = [self.groups.close]

    def resources(self, streams: CommStreams) -> CommResources:
        return CommResources(streams, self.traffic, self.exposed_timer)

    def ring(self, *spans: tuple[Any, ...], streams: CommStreams) -> RingKVExchange:
        groups = replace(self.groups, resources=self.resources(streams))
        return RingKVExchange(DoubleRing(*spans), groups)

    def rings(self, streams: CommStreams) -> Iterator[RingKVExchange]:
        """A flat one, also of turns alone and, with several groups, a double one."""
        yield self.ring(self.whole, (), streams=streams)
        yield self.ring((), self.whole, streams=streams)
        if len(self.whole) > 1:
            yield self.ring(self.whole[:1], self.whole[1:], streams=streams)

    def gather(self, algorithm: str, streams: CommStreams) -> GatherKVExchange:
        choice = AlgorithmChoice(names=(algorithm,))
        along = dict.fromkeys(COLLECTIVE_STREAMS, frozenset({self.whole}))
        needed = needed_groups(choice, along)
        resources = replace(self.resources(streams), stream_kind=StreamKind.CONTEXT)
        groups = make_groups(self.topology, self.rank, needed, CONFIG, resources)
        collectives = make_collectives(choice, groups)
        self._closes.append(collectives.close)
        return GatherKVExchange(GatheredKV(self.whole), collectives)

    def close(self) -> None:
        for close in reversed(self._closes):
            close()


def compare(ways: Ways) -> None:
    streams = ThreadStreams(CPU)
    gathers = (ways.gather(name, streams) for name in ("native", "ho-ring"))
    exchanges = [*ways.rings(streams), *gathers]
    places = dist.get_world_size()
    for groups, packed in ((4, False), (1, True)):
        given = inputs(places, groups, packed=packed)
        wanted = [cut(tensor, ways.rank, places) for tensor in attended(attend_whole, given)]
        for exchange in exchanges:
            ways.traffic.take()
            found = in_blocks(exchange, given)
            label = f"rank {ways.rank}: {groups} {packed} {exchange}"
            for name, one, other in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
                assert_near(one, other, f"{label}: {name}")
            # Keys and values twice, the gradients once, all in fp32.
            sent = ways.traffic.take()
            block = 2 * SAMPLES * 2 * CHUNK * groups * CHANNELS * 4
            assert sent.intra + sent.inter == 3 * (places - 1) * block, label
            if isinstance(exchange, RingKVExchange) and 1 < exchange._exchange.turns < places:
                assert sent.inter == 3 * (exchange._exchange.turns - 1) * block, label
            # What is kept is exchanged no more than without recomputation, and has the same bits.
            assert all(map(torch.equal, in_blocks(exchange, given, SavedAttention()), found)), label
            assert ways.traffic.take() == sent, label


GROUPS = {2: (2,), 3: (3,), 6: (3,), 8: (4, 2)}  # sizes of groups by world size


def compare_all() -> None:
    for inner in GROUPS[dist.get_world_size()]:
        ways = Ways(inner)
        compare(ways)
        ways.close()


@pytest.mark.verify
@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3, 6, 8])
def test_parts_are_one_call(world_size: int) -> None:
    run_ranks(compare_all, world_size)


def compare_on_hopper(ways: Ways) -> list[set[str]]:
    """Names of the kernels of parts without documents and with some; chunks are whole tiles."""
    kernels, streams = [], InlineStreams()
    for packed in (False, True):
        given = inputs(4, 2, packed=packed)
        wanted = [cut(tensor, ways.rank, 4) for tensor in attended(attend_whole, given)]
        with hopper(tile=CHUNK) as used:
            for exchange in (*ways.rings(streams), ways.gather("native", streams)):
                for saved in (None, SavedAttention()):
                    for one, other in zip(in_blocks(exchange, given, saved), wanted, strict=True):
                        assert_near(one, other, f"{packed} {exchange} {saved}")
        kernels.append({kernel.name for kernel in used})
    return kernels


def by_heads(ways: Ways, streams: CommStreams, groups: int) -> list[Tensor]:
    """With heads exchanged, in pieces with keys and values of their own or shared, recomputed."""
    exchange = AllToAll(replace(ways.groups, resources=ways.resources(streams)), ways.whole)
    core = ContextAttention(ContextLayout(size=4, heads=4), exchange, attend_whole)
    given = inputs(4, groups, packed=True, num_heads=16)
    for _ in range(2):  # what a recomputation left under way is waited for
        found = attended(partial(checkpointed, core), given, partial(chunk, place=ways.rank))
    return found


def chunk(whole: Tensor, place: int) -> Tensor:
    return whole.chunk(4, 1)[place].clone()


def all_ways(ways: Ways, streams: CommStreams, given: Inputs) -> list[Tensor]:
    exchanges = [*ways.rings(streams), ways.gather("native", streams)]
    found = [tensor for exchange in exchanges for tensor in in_blocks(exchange, given)]
    return found + by_heads(ways, streams, 8) + by_heads(ways, streams, 2)


def repeat(ways: Ways) -> None:
    given = inputs(4, 2, packed=True)
    first = all_ways(ways, InlineStreams(), given)
    for streams in (ThreadStreams(CPU), LateStreams(0, eager=0.2)):
        assert all(map(torch.equal, first, all_ways(ways, streams, given))), streams


def hasty() -> list[str]:
    """The waits without which jobs that run late change nothing."""
    ways, given = Ways(2), inputs(4, 2, packed=True)
    torch.use_deterministic_algorithms(True)  # so that new tensors are filled with NaN
    first, unnoticed = all_ways(ways, InlineStreams(), given), []
    for wait in all_waits():
        if wait.module.startswith("paro.context_parallel"):
            streams = LateStreams(0, eager=0.0)
            with wait.removed():
                found = all_ways(ways, streams, given)
                if all(map(torch.equal, first, found)):
                    unnoticed.append(wait.name)
            streams.close()
    torch.use_deterministic_algorithms(False)
    ways.close()
    return unnoticed


def run_on_four() -> list[set[str]]:
    ways = Ways(2)
    compare(ways)
    repeat(ways)
    kernels = compare_on_hopper(ways)
    ways.close()
    return kernels


@pytest.mark.ranks
def test_four_ranks_make_one_call_whatever_arrives_first() -> None:
    """On a Hopper cuDNN computes the parts, unless documents are kept apart."""
    kernels = [{"CUDNN_ATTENTION"}, {"FLASH_ATTENTION"}]
    assert run_ranks(run_on_four, 4) == 4 * [kernels]


@pytest.mark.verify
@pytest.mark.ranks
def test_every_wait_is_needed() -> None:
    assert run_ranks(hasty, 4) == 4 * [[]]


@pytest.mark.parametrize(("steps", "turns"), [(4, 1), (2, 2), (4, 4)])
def test_a_mutation_of_receive_buffers_changes_rank_and_prediction(
    steps: int, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rings of 2 ranks receive once: into one buffer, however many they may have."""
    layout = ContextLayout(size=steps * turns, heads=1)
    sizes = {"world_size": layout.size, "group_size": steps, "seq_length": 2 * layout.size}
    run = run_of(SMALL, "NNN", PrecisionConfig(compute="fp32"), context=layout, **sizes)
    double = layout.kv_exchange(run.context_topology)
    assert isinstance(double, DoubleRing)
    monkeypatch.setattr("paro.context_parallel.exchange._shift", lambda *_: DONE)

    def both() -> tuple[Counter[KVRoute], int]:
        rings: dict[Any, Any] = {
            route: SimpleNamespace(size=size, owner_of=lambda _: 0, exposed_timer=ExposedTimer())
            for route, size in zip(double.spans, (steps, turns), strict=True)
        }
        kv, most = _RingKV(double, rings, torch.zeros(2, 1, 1, HEADS, 1)), Counter[KVRoute]()
        for action in double.forward(HEADS):
            if isinstance(action, AttendKV):
                kv.attended(action)
            elif isinstance(action, SendKV | WaitKV):
                kv.run(action)
            most |= Counter({route: len(each) for route, each in kv._buffers.items()})
        assert most == Counter({route: double.receive_buffers(route) for route in rings})
        return most, kv_exchange_bytes(run)

    before = both()
    monkeypatch.setattr(kv_exchange, "_RECEIVE_BUFFERS", 3)
    after = both()
    assert (after == before) is (steps == 2)
    assert (after[1] > before[1]) is (steps > 2)


def alone(qkv: QKV, documents: Documents | None, _: SavedAttention | None) -> Tensor:
    lengths = (5, qkv[0].shape[1] - 5)
    return attend_whole(qkv, None if documents is None else Documents(lengths), None)


def broken(*given: Any) -> Tensor:
    return attend_whole(*given) * torch.nan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_attention_to_own_tokens_alone_ends_the_run(
    rank: int, apart: bool, dtype: torch.dtype
) -> None:
    head, shared = torch.empty(8, dtype=dtype), ContextLayout(size=2)
    check_core(attend_whole, ContextLayout(), 0, head, "auto", apart=apart)
    for core, layout, message in (
        (alone, shared, f"rank {rank} ... 2 ranks that share a sample ... --cp-comm-type"),
        (broken, ContextLayout(), "nan"),
    ):
        check = partial(check_core, core, layout, rank % layout.size, head, "auto", apart=apart)
        refused(check, message, status=1)


def owned(ring_rank: int, ring_size: int, chunk: int) -> list[int]:
    """The positions of a rank's tokens."""
    starts = ring_rank * chunk, (2 * ring_size - 1 - ring_rank) * chunk
    return [position for start in starts for position in range(start, start + chunk)]


def pairs_of(bounds: Bounds, ring_rank: int, source: int, ring_size: int) -> list[tuple[int, int]]:
    """(query, key) positions that the blocks of two ring ranks have."""
    chunk = bounds[-1] // (2 * ring_size)
    queries, keys = owned(ring_rank, ring_size, chunk), owned(source, ring_size, chunk)
    if source == ring_rank:
        ends = list(accumulate(local_lengths(bounds, ring_rank, ring_size), initial=0))
        return [
            (queries[row], keys[column])
            for begin, end in pairwise(ends)
            for row in range(begin, end)
            for column in range(begin, row + 1)
        ]
    block = mask_block(bounds, ring_rank, source, ring_size)
    if block is None:
        return []
    rows, columns = queries[block[0]], keys[block[1]]
    assert rows
    assert columns
    return [(row, column) for row in rows for column in columns]


@pytest.mark.parametrize(("ring_size", "chunk"), [(1, 3), (2, 1), (2, 2), (3, 1), (4, 1)])
def test_the_blocks_are_the_mask(ring_size: int, chunk: int) -> None:
    """Compares masks for every way to cut a sample into documents."""
    seq_length = 2 * ring_size * chunk
    for cuts in product((False, True), repeat=seq_length - 1):
        bounds = (0, *compress(range(1, seq_length), cuts), seq_length)
        lengths = tuple(stop - start for start, stop in pairwise(bounds))
        assert bounds_of(lengths * 2, seq_length) == (bounds, bounds)
        document = [sum(start <= position for start in bounds) for position in range(seq_length)]
        found = Counter(
            pair
            for ring_rank in range(ring_size)
            for source in range(ring_size)
            for pair in pairs_of(bounds, ring_rank, source, ring_size)
        )
        assert found == {
            (query, key): 1
            for query in range(seq_length)
            for key in range(query + 1)
            if document[query] == document[key]
        }
