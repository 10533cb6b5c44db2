"""Sizes of LLaMA's units, and how often they are sent round the ring, where weights rotate."""

# A pass carries every slice to every rank of the ring: d - 1 shifts of a slice. A matrix makes one
# pass in forward, one in backward, and its gradient one; one more if its block is recomputed. The
# embedding's backward reads no weight. A tied head uses the embedding's slices.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from model.config import (
    MLP_CUTS,
    VOCABULARY_CUTS,
    LlamaConfig,
    attention_cuts,
    attention_norms,
    parameter_shapes,
)
from model.lora_config import down_name, up_name
from paro.layout import Shape, UnitLayout, halves_of, make_layout, make_sliced_layout, whole_box
from paro.planning.cost_model import UnitSize
from paro.strategy import FLAG, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """A part of the model and the matrices that it reads."""

    unit: str
    matrices: Mapping[str, int]  # and biases: name to the dim along which it is cut
    norms: tuple[str, ...]  # and adapters: what it reads whole
    shares: int | None = None  # it can only be cut between these (query groups)
    returns: bool = True  # backward reads them
    recomputed: bool = False


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
    passes: dict[str, int] = {}
    reductions: dict[str, int] = {}
    uses: dict[str, _Use] = {}
    reached = False  # whether backward reaches the part
    for use in _uses(config):
        reached = reached or any(map(is_trained, (*use.matrices, *use.norms)))
        num_passes = 1 + (reached and use.returns) + (reached and use.recomputed)
        passes[use.unit] = passes.get(use.unit, 0) + num_passes
        reductions[use.unit] = reductions.get(use.unit, 0) + 1
        uses[use.unit] = use

    def layout(use: _Use, half: int | None, *, trained: bool) -> UnitLayout:
        own: dict[str, Shape] = {n: shapes[n] for n in use.matrices if is_trained(n) is trained}
        if not own:
            return UnitLayout((), 0, 0)
        return make_sliced_layout(
            own, cuts=use.matrices, number=degree, world_size=world_size, half=half
        )

    def halves(use: _Use) -> tuple[int | None, ...]:
        if not in_place:
            return (None,)
        own = {name: shapes[name] for name in use.matrices}
        return halves_of(own, cuts=use.matrices, number=degree, shares=use.shares)

    units = [
        UnitSize(
            name=name if half is None else f"{name} {half + 1}/2",
            part=name,
            trainable_numel=(trainable := layout(use, half, trained=True)).numel,
            frozen_numel=layout(use, half, trained=False).numel,
            gathers_per_micro_batch=passes[name],
            reductions_per_micro_batch=reductions[name],
            num_slices=trainable.num_slices,
            matrix_stop=trainable.decayed_stop,
        )
        for name, use in uses.items()
        for half in halves(use)
    ]
    cut = {name for use in uses.values() for name in use.matrices}
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


def _uses(config: LlamaConfig) -> list[_Use]:
    def named(prefix: str, cuts: Mapping[str, int]) -> dict[str, int]:
        return {f"{prefix}.{name}": dim for name, dim in cuts.items()}

    uses = [
        _Use(
            unit="embedding",
            matrices=named("embedding", VOCABULARY_CUTS),
            norms=(),
            returns=False,
        )
    ]
    recompute = config.recompute
    for layer in range(config.num_layers):
        recomputed = recompute is not None and recompute.first_layer(layer) is not None
        for part, cuts, norms in (
            ("attention", attention_cuts(config), attention_norms(config)),
            ("mlp", MLP_CUTS, ("mlp_norm",)),
        ):
            uses.append(
                _Use(
                    unit=f"blocks.{layer}.{part}",
                    matrices=named(f"blocks.{layer}", cuts),
                    norms=tuple(
                        f"blocks.{layer}.{name}" for name in (*norms, *_adapters_of(cuts, config))
                    ),
                    shares=config.num_query_groups if part == "attention" else None,
                    recomputed=recomputed,
                )
            )
    holder = "embedding" if config.tie_embeddings_and_output_weights else "head"
    uses.append(_Use(unit=holder, matrices=named(holder, VOCABULARY_CUTS), norms=("head.norm",)))
    return uses


def _adapters_of(weights: Iterable[str], config: LlamaConfig) -> Iterable[str]:
    targets = config.lora.targets if config.lora is not None else ()
    return (of(name) for name in weights if name in targets for of in (down_name, up_name))


def units_by_part(units: Iterable[UnitSize]) -> dict[str, list[UnitSize]]:
    """The units of every part: one, or one for each half of its slices."""
    parts: dict[str, list[UnitSize]] = {}
    for unit in units:
        if not unit.replicated:
            parts.setdefault(unit.part, []).append(unit)
    return parts
