"""A changed sharding spec changes what a rank does and the planner counts; layouts of samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import pytest

from model.config import LLAMA_PRESETS, LoraConfig, is_adapter
from paro.layout import in_buckets
from paro.planning.run_memory import RunMemory
from paro.planning.sending import traffic_of
from paro.precision import PrecisionConfig
from paro.spec import run_spec, sharding_spec, units
from paro.spec.context_layout import ContextLayout, head_exchange
from paro.spec.offload import state_bytes
from paro.spec.run_spec import ContextLimits, Materialize, RunSettings, RunSpec
from paro.spec.sharding_spec import Collective, ShardingSpec
from paro.step.actions import ActionKind
from paro.topology import AxisSpan, Sent, StreamKind
from tests.paro.planning.cases import rank_of, run_of, silence
from tests.paro.planning.test_units import SMALL

WIDE = replace(
    SMALL, num_layers=2, hidden_size=96, ffn_hidden_size=160, num_query_groups=4, kv_channels=24
)
BF16 = PrecisionConfig(compute="bf16")
CODED = replace(BF16, inter_param_bits=4, inter_grad_bits=4, inter_grad_error_feedback=True)


ADAPTED = replace(WIDE, lora=LoraConfig(rank=2, targets=("wo", "w_up")))
BASE_BF16 = replace(BF16, lora_base_dtype="bf16", compute="fp32")
SETTINGS = {
    "all sharded": run_of(WIDE, "GGG", BF16),
    "replicas": run_of(WIDE, "III", BF16),
    "codes": run_of(WIDE, "NIG", CODED),
    "adapters": run_of(ADAPTED, "IIG", BASE_BF16, is_trained=is_adapter),
    "Muon": run_of(WIDE, "NNG", replace(BF16, optimizer="muon")),
    "rotation": run_of(WIDE, "IIG", BF16, materialize=Materialize.ROTATE),
}


class Figures(NamedTuple):
    """Bytes of a rank: sent in a step, and in one without codes, and held throughout a run."""

    sent: Sent
    sent_in_full_precision: Sent
    states: int
    codes: int


def executed(run: RunSpec) -> Figures:
    rank = rank_of(run)
    states = rank.optimizer.model_state_bytes()
    full_precision, sent = (
        [rank.step(2, full_precision=full) for _ in range(2)][-1] for full in (True, False)
    )
    units = rank.model.trainable_units
    buffers = [
        unit.quantized_update.quantized for unit in units if unit.quantized_update is not None
    ]
    buffers += [unit.grad_errors for unit in units if unit.grad_errors is not None]
    return Figures(sent, full_precision, states, sum(buffer.nbytes for buffer in buffers))


def predicted(run: RunSpec) -> Figures:
    memory = RunMemory(None)
    step, sender = memory.step(run), memory.sender(run, rank=7)
    specs, moves = run.specs(step.units), step.of_step(2)
    exact = [spec.exact for spec in specs]
    return Figures(
        sent=memory.sent(run, 2, rank=7),
        sent_in_full_precision=traffic_of(moves, exact, sender),
        states=state_bytes(specs).total,
        codes=sum(
            prod(spec.grad_error_shape)
            + sum(one.num_bytes for one in spec.collectives.get(ActionKind.PARAM_ALL_GATHER, ()))
            * (spec.update_format is not None)
            for spec in specs
        ),
    )


@cache
def unchanged(name: str) -> Figures:
    """Return a rank's figures by the description as it is, which are those predicted."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        silence(monkeypatch)
        figures = executed(SETTINGS[name])
        assert figures == predicted(SETTINGS[name])
        return figures


Patch = Callable[[pytest.MonkeyPatch], None]


def sends(kind: ActionKind, *, coded: bool = False, **changes: Callable[[Any], object]) -> Patch:
    """Changes fields of the collectives of an action, of those of codes or the others."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        original = ShardingSpec.collectives.func

        def collectives(spec: ShardingSpec) -> dict[ActionKind, tuple[Collective, ...]]:
            found = dict(original(spec))
            new = [
                one._replace(**{field: of(getattr(one, field)) for field, of in changes.items()})
                if one.is_quantized is coded
                else one
                for one in found.get(kind, ())
            ]
            return found | {kind: tuple(one for one in new if one.span)}

        monkeypatch.setattr(ShardingSpec, "collectives", property(collectives))

    return patch


def has(field: str, change: Callable[[ShardingSpec, Any], object]) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        found = vars(ShardingSpec)[field]
        of = found.fget if isinstance(found, property) else found.func
        monkeypatch.setattr(ShardingSpec, field, property(lambda spec: change(spec, of(spec))))

    return patch


def outermost(span: AxisSpan) -> AxisSpan:
    return span[-1:]


def twice(spec: ShardingSpec, value: Any) -> object:
    return tuple(2 * each for each in value) if isinstance(value, tuple) else 2 * value


def keeps_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer has fp32 masters even where the shard of parameters would do."""
    of = ShardingSpec.optimizer_numels
    monkeypatch.setattr(
        ShardingSpec,
        "optimizer_numels",
        lambda spec, numel: {state: length + 8 for state, length in of(spec, numel).items()},
    )


def in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets have other sizes than there are groups."""
    of = units.prepare_for_muon
    monkeypatch.setattr(units, "prepare_for_muon", lambda each, size: of(each, 2 * size))


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every unit of a bucket is one of its own."""
    code = (lambda trained: [(part,) for _, part in trained]).__code__
    monkeypatch.setattr(in_buckets, "__code__", code)


def sharded_as_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms are sharded as the weights are that rotate."""
    of = run_spec.buffers_of
    monkeypatch.setattr(
        run_spec,
        "buffers_of",
        lambda units: of([replace(unit, replicated=False) for unit in units]),
    )


def constant(name: str, value: object) -> Patch:
    return lambda monkeypatch: monkeypatch.setattr(sharding_spec, name, value)


MUTATIONS: dict[str, tuple[str, Patch]] = {
    "a gather leaves axes out": ("all sharded", sends(ActionKind.GATHER, span=outermost)),
    "gradients are reduced in fp32": (
        "all sharded",
        sends(ActionKind.REDUCE, dtype=lambda _: "fp32"),
    ),
    "no sum over replicas": ("replicas", sends(ActionKind.GRAD_SYNC, span=lambda _: ())),
    "gradients on streams of gathers": (
        "replicas",
        sends(ActionKind.GRAD_SYNC, stream_kind=lambda _: StreamKind.GATHER),
    ),
    "frozen parameters are held in fp32": ("adapters", has("param_dtype", lambda *_: "fp32")),
    "parameters have twice the shard": ("all sharded", has("param_numel", twice)),
    "optimizer states have more elements": ("replicas", keeps_more),
    "blocks of updates are shorter": ("codes", constant("UPDATE_BLOCK", 256)),
    "errors have twice the room": ("codes", has("grad_error_shape", twice)),
    "codes are sent in every step": ("codes", has("exact", lambda spec, _: spec)),
    "gradients are sent exactly": ("codes", has("grad_format", lambda *_: None)),
    "updates gathered along no axis": (
        "codes",
        sends(ActionKind.PARAM_ALL_GATHER, coded=True, span=lambda _: ()),
    ),
    "updates gathered in fp32": (
        "Muon",
        sends(ActionKind.PARAM_ALL_GATHER, dtype=lambda _: "fp32"),
    ),
    "gathers in fp32": ("all sharded", sends(ActionKind.GATHER, dtype=lambda _: "fp32")),
    "slices rotate in fp32": ("rotation", sends(ActionKind.GATHER, dtype=lambda _: "fp32")),
    "buckets have twice as many units": ("Muon", in_pairs),
    "no unit has others in its bucket": ("Muon", alone),
    "buckets are counted as one unit": (
        "Muon",
        sends(ActionKind.GRAD_SYNC, numel=lambda n: n // 2),
    ),
    "norms sharded as weights": ("rotation", sharded_as_weights),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_change_of_the_description_changes_rank_and_prediction(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    setting, patch = MUTATIONS[name]
    before = unchanged(setting)
    silence(monkeypatch)
    patch(monkeypatch)
    try:
        done = executed(SETTINGS[setting])
    except (AssertionError, RuntimeError, ValueError, KeyError, IndexError):
        return  # the rank stops
    assert done != before, "no byte of the rank has changed"
    assert done == predicted(SETTINGS[setting])


LAYOUTS = [(1, 1), (2, 1), (2, 2), (3, 3), (4, 1), (4, 2), (4, 4), (6, 3), (6, 2), (8, 4), (8, 1)]


@pytest.mark.parametrize(("size", "heads"), LAYOUTS)
def test_the_ranks_that_share_a_sample_have_equal_parts_that_make_up_the_whole(
    size: int, heads: int
) -> None:
    layout, length = ContextLayout(size=size, heads=heads), 2 * size * 3
    parts = [[*chain(*layout.ranges(rank, length))] for rank in range(size)]
    assert {len(part) for part in parts} == {length // size}
    assert sorted(chain(*parts)) == list(range(length))
    assert layout.ranges(size + 1, length) == layout.ranges(1 % size, length)
    if heads == size:  # without a ring in order
        assert [*chain(*parts)] == list(range(length))


@pytest.mark.parametrize(("size", "heads"), LAYOUTS)
def test_every_place_of_the_ring_owns_as_much_causal_attention(size: int, heads: int) -> None:
    layout, length = ContextLayout(size=size, heads=heads), 2 * size * 2
    pairs = [0] * layout.ring
    for rank in range(size):
        for position in chain(*layout.ranges(rank, length)):
            pairs[rank // heads] += position + 1
    assert len(set(pairs)) == 1


def test_the_ranks_of_a_place_have_its_two_chunks_in_order() -> None:
    layout = ContextLayout(size=6, heads=3)  # the second of three ranks has the border
    parts = [layout.ranges(rank, 24) for rank in range(6)]
    assert parts[:3] == [(range(4),), (range(4, 6), range(18, 20)), (range(20, 24),)]
    assert [*chain(*chain(*parts[3:]))] == list(range(6, 18))


MODEL = replace(LLAMA_PRESETS["7B"], hidden_size=96, num_attention_heads=12, num_query_groups=3)
RUN = RunSettings(model=MODEL, group_size=4, seq_length=24, micro_batch_size=1, precision=BF16)
LIMITS = ContextLimits(RUN, 12)


def test_what_does_not_fit_is_told() -> None:
    for size, heads, message in (
        (12, 3, "3 ranks and groups of 4"),
        (6, 1, "6 ranks and groups of 4"),
        (12, 1, None),
    ):
        found = LIMITS.reason_invalid(ContextLayout(size=size, heads=heads))
        assert found == message or (found is not None and message is not None and message in found)


@pytest.mark.parametrize(
    ("heads", "num_ranks", "expected"),
    [
        ((32, 32), 8, (4, 4, 1)),
        ((32, 8), 8, (4, 1, 1)),  # one head of keys for all chunks
        ((32, 2), 8, (4, 1, 4)),
        ((32, 16), 8, (2, 2, 1)),
        ((24, 24), 8, (1, 1, 1)),
        ((12, 6), 2, (1, 1, 1)),
        ((8, 8), 8, (1, 1, 1)),
        ((32, 8), 1, (1, 1, 1)),
    ],
)
def test_head_chunks_have_whole_groups_of_queries(
    heads: tuple[int, int], num_ranks: int, expected: tuple[int, int, int]
) -> None:
    layout = ContextLayout(size=num_ranks, heads=num_ranks)
    assert head_exchange(*heads, layout) == expected
