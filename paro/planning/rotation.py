"""Sizes of LLaMA's units, and how often they are sent round the ring, where weights rotate."""

# A pass carries every slice to every rank of the ring: d - 1 shifts of a slice. A matrix makes one
# pass in forward, one in backward, and its gradient one; one more if its block is recomputed. The
# embedding's backward reads no weight. A tied head uses the embedding's slices.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from model.config import LlamaConfig
from model.units import parameter_shapes, unit_specs
from paro.layout import Shape, UnitLayout, halves_of, make_layout, make_sliced_layout, whole_box
from paro.planning.cost_model import UnitSize
from paro.strategy import FLAG, Strategy


def rotation_conflict(config: LlamaConfig) -> str | None:
    """Why a model's weights cannot rotate on any ranks; None if they can on some."""
    if config.fp8_format is not None:
        return (
            "--paro-materialize rotate has no fp8, whose scales are those of whole weights: leave "
            "--fp8-format out, or gather parameters"
        )
    if config.torch_compile is not None:
        return (
            "--paro-materialize rotate computes blocks in slices, which are not compiled: leave "
            "--torch-compile out, or gather parameters"
        )
    return None


def rotation_infeasible_reason(
    strategy: Strategy, config: LlamaConfig, *, world_size: int, group_size: int
) -> str | None:
    """Why a model's weights cannot rotate under a strategy, and what to change; None if they can.

    They rotate only inside groups, and only if every rank of the ring gets a slice of each matrix.
    """
    degree = strategy.params
    if (conflict := rotation_conflict(config)) is not None:
        return conflict
    if not 1 < degree == strategy.grads <= group_size:
        return (
            "--paro-materialize rotate needs params and grads sharded over the same 2 or more "
            f"ranks of a group: {FLAG} {strategy.name} shards them over {degree} and "
            f"{strategy.grads}, in groups of {group_size} of the {world_size} ranks; use III or "
            "IIG in groups of 2 or more (--paro-group-size)"
        )
    heads, groups = config.num_attention_heads, config.num_query_groups
    if heads % degree or groups % degree:
        common = math.gcd(heads, groups)
        fitting = [d for d in range(2, common + 1) if common % d == 0 and world_size % d == 0]
        some = ", ".join(map(str, fitting)) or "none"
        return (
            f"--paro-materialize rotate over {degree} ranks cannot cut --num-attention-heads "
            f"{heads} with --num-query-groups {groups}: both must be multiples of {degree}; of "
            f"these heads, numbers of ranks that would work: {some} (--paro-group-size)"
        )
    for flag, size in (
        ("--ffn-hidden-size", config.ffn_hidden_size),
        ("--vocab-size", config.vocab_size),
    ):
        if size < degree:
            return f"{flag} {size} is too small to rotate over {degree} ranks"
    return None


def rotating_units_of(
    config: LlamaConfig,
    degree: int,
    *,
    world_size: int,
    is_trained: Callable[[str], bool] = lambda _name: True,
    in_place: bool = False,
) -> tuple[UnitSize, ...]:
    """Units for rings of `degree` ranks: all norms, embedding, attentions, MLPs, an untied head.

    A parameter trains unless `is_trained(name)` is false; below the first that trains there is no
    backward. Names are those of sharding: `blocks.0.attention`, or `blocks.0.mlp 1/2` and `2/2`
    `in_place`, where slices are sent in halves.
    """
    shapes = parameter_shapes(config)
    parts: dict[str, tuple[dict[str, int], int | None]] = {}  # cuts and shares by label
    gathers: Counter[str] = Counter()
    reductions: Counter[str] = Counter()
    reached = False  # whether backward reaches the part
    for spec in unit_specs(config):
        for part in spec.parts:
            cuts, label = spec.cuts_of(part), spec.label_of(part)
            whole = (f"{spec.name}.{name}" for name in part.replicated)
            reached = reached or any(map(is_trained, (*cuts, *whole)))
            again = spec.backward_needs_weight + (spec.recomputed_from is not None)
            gathers[label] += 1 + reached * again
            reductions[label] += 1
            parts[label] = cuts, part.shares

    def layout(cuts: Mapping[str, int], half: int | None, *, trained: bool) -> UnitLayout:
        own = {name: shapes[name] for name in cuts if is_trained(name) is trained}
        if not own:
            return UnitLayout((), 0, 0)
        return make_sliced_layout(own, cuts=cuts, number=degree, world_size=world_size, half=half)

    def halves(cuts: Mapping[str, int], shares: int | None) -> tuple[int | None, ...]:
        if not in_place:
            return (None,)
        own = {name: shapes[name] for name in cuts}
        return halves_of(own, cuts=cuts, number=degree, shares=shares)

    units = [
        UnitSize(
            name=label if half is None else f"{label} {half + 1}/2",
            part=label,
            trainable_numel=(trainable := layout(cuts, half, trained=True)).numel,
            frozen_numel=layout(cuts, half, trained=False).numel,
            gathers_per_micro_batch=gathers[label],
            reductions_per_micro_batch=reductions[label],
            num_slices=trainable.num_slices,
            matrix_stop=trainable.decayed_stop,
        )
        for label, (cuts, shares) in parts.items()
        for half in halves(cuts, shares)
    ]
    cut = {name for cuts, _ in parts.values() for name in cuts}
    norms = {name: shape for name, shape in shapes.items() if name not in cut}
    return (_norms(norms, world_size, is_trained), *units)


def _norms(
    shapes: Mapping[str, Shape], world_size: int, is_trained: Callable[[str], bool]
) -> UnitSize:
    def numel(trained: bool) -> int:
        boxes = [
            whole_box(name, shape) for name, shape in shapes.items() if is_trained(name) is trained
        ]
        return make_layout(boxes, decayed=frozenset(), world_size=world_size).numel

    return UnitSize(
        name="norms",
        trainable_numel=numel(True),
        frozen_numel=numel(False),
        gathers_per_micro_batch=0,
        replicated=True,
    )


def units_by_part(units: Iterable[UnitSize]) -> dict[str, list[UnitSize]]:
    """The units of every part: one, or one for each half of its slices."""
    parts: dict[str, list[UnitSize]] = {}
    for unit in units:
        if not unit.replicated:
            parts.setdefault(unit.part, []).append(unit)
    return parts
