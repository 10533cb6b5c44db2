"""Sizes of LLaMA's units, and how often they are sent round the ring, where weights rotate."""

# A pass carries every slice to every rank of the ring: d - 1 shifts of a slice. A matrix makes one
# pass in forward, one in backward, and its gradient one; one more if its block is recomputed. The
# embedding's backward reads no weight. A tied head uses the embedding's slices.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from model.config import LlamaConfig
from model.units import parameter_shapes, unit_specs
from paro.layout import halves_of, make_sliced_layout, make_whole_layout
from paro.planning.cost_model import UnitSize, unit_size
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

    def sized(label: str) -> Iterator[UnitSize]:
        cuts, shares = parts[label]
        own = {name: shapes.pop(name) for name in cuts}  # what is left is replicated
        halves: tuple[int | None, ...] = (None,)
        if in_place:
            halves = halves_of(own, cuts=cuts, number=degree, shares=shares)
        for half in halves:
            layout = partial(
                make_sliced_layout, cuts=cuts, number=degree, world_size=world_size, half=half
            )
            yield replace(
                unit_size(label, own, layout, is_trained),
                name=label if half is None else f"{label} {half + 1}/2",
                part=label,
                gathers_per_micro_batch=gathers[label],
                reductions_per_micro_batch=reductions[label],
            )

    units = [unit for label in parts for unit in sized(label)]
    norms = unit_size(
        "norms", shapes, partial(make_whole_layout, world_size=world_size), is_trained
    )
    return (replace(norms, replicated=True), *units)


def units_by_part(units: Iterable[UnitSize]) -> dict[str, list[UnitSize]]:
    """The units of every part: one, or one for each half of its slices."""
    parts: dict[str, list[UnitSize]] = {}
    for unit in units:
        if not unit.replicated:
            parts.setdefault(unit.part, []).append(unit)
    return parts
