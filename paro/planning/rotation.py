"""Sizes of LLaMA's units, and what decides the actions of a step, where weights rotate."""

# A pass carries every slice to every rank of the ring: d - 1 shifts of a slice. A matrix makes one
# pass in forward, one in backward, and its gradient one; one more if its block is recomputed. The
# embedding's backward reads no weight. A tied head uses the embedding's slices.

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate

from model.config import LlamaConfig
from model.units import PartSpec, UnitSpec, parameter_shapes, recomputed_groups, unit_specs
from paro.layout import halves_of, make_sliced_layout, make_whole_layout
from paro.planning.cost_model import unit_size
from paro.step.actions import number_buffers
from paro.step.rotating import RingShape
from paro.step.rotation_plan import PartShape, RotationShape
from paro.step.units import UnitSize
from paro.strategy import FLAG, Strategy

MUON_ROTATES = (
    "--optimizer muon needs whole matrices, and --paro-materialize rotate cuts them along columns "
    "too: leave one of them out"
)


def rotation_conflict(config: LlamaConfig) -> str | None:
    """Why a model's weights cannot rotate on any ranks; None if they can on some."""
    if config.fp8_format is not None:
        conflict = "has no fp8, whose scales are those of whole weights: leave --fp8-format"
    elif config.torch_compile is not None:
        conflict = "computes blocks in slices, which are not compiled: leave --torch-compile"
    elif config.keeps_core:
        conflict = "recomputes attention slice by slice and keeps nothing of it: leave "
        conflict += "--paro-recompute-keep"
    else:
        return None
    return f"--paro-materialize rotate {conflict} out, or gather parameters"


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
        common = math.gcd(heads, groups, world_size)
        some = ", ".join(str(d) for d in range(2, common + 1) if common % d == 0) or "none"
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
    shapes, units = parameter_shapes(config), []
    for spec, part in unit_parts(config):
        if spec.borrows:  # a tied head has the embedding's
            continue
        label, cuts = spec.label_of(part), spec.cuts_of(part)
        own = {name: shapes.pop(name) for name in cuts}  # what is left is replicated
        halves: tuple[int | None, ...] = (None,)
        if in_place:
            halves = halves_of(own, cuts=cuts, number=degree, shares=part.shares)
        for half in halves:
            layout = partial(
                make_sliced_layout, cuts=cuts, number=degree, world_size=world_size, half=half
            )
            name = label if half is None else f"{label} {half + 1}/2"
            units.append(replace(unit_size(name, own, layout, is_trained), part=label))
    whole = partial(make_whole_layout, world_size=world_size)
    return replace(unit_size("norms", shapes, whole, is_trained), replicated=True), *units


def unit_parts(config: LlamaConfig) -> list[tuple[UnitSpec, PartSpec]]:
    """The parts of all units in forward order, each with its unit."""
    return [(spec, part) for spec in unit_specs(config) for part in spec.parts]


def rotation_shape(
    config: LlamaConfig, units: tuple[UnitSize, ...], ring: RingShape, trained: frozenset[str]
) -> RotationShape:
    """What the actions of a step depend on; `units` are those of `rotating_units_of`."""
    numbers = number_buffers(units)
    halves: defaultdict[str, list[tuple[int, ...]]] = defaultdict(list)
    for unit, numbered in zip(units, numbers, strict=True):
        halves[unit.part].append(numbered.needed)
    specs, parts = unit_specs(config), unit_parts(config)
    names = (
        (spec.cuts_of(part), {f"{spec.name}.{name}" for name in part.replicated})
        for spec, part in parts
    )
    first_cut, first_replicated = (
        next((n for n, own in enumerate(of_parts) if not trained.isdisjoint(own)), len(parts))
        for of_parts in zip(*names, strict=True)
    )
    first = min(first_cut, first_replicated)
    starts = [*accumulate((len(spec.parts) for spec in specs), initial=0)]  # of units, and the end
    groups = recomputed_groups(specs, bisect_right(starts, first) - 1)
    return RotationShape(
        ring=ring,
        parts=tuple(
            PartShape(
                halves=tuple(halves[spec.label_of(part)]),
                backward_needs_weight=spec.backward_needs_weight,
                completes=not spec.borrows,
            )
            for spec, part in parts
        ),
        trainable=tuple(buffer for unit in numbers for buffer in unit.trainable),
        replicated=numbers[0].needed,
        first_trained=first,
        first_replicated=first_replicated,
        recomputed=tuple(range(starts[group[0]], starts[group[-1] + 1]) for group in groups),
    )
