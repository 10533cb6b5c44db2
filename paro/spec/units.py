"""The units of a run with their flat buffers, and the properties from which steps are scheduled."""

# In: a model, a strategy and the names that train. Out: units, as FSDP2's `fully_shard` makes them
# (the parameters that are all-gathered together: the embedding, a block, the head), each with a
# flat buffer of trained and one of frozen parameters; and the step shape, the properties of units
# by which paro/step schedules the all-gathers and reductions that FSDP2 starts in hooks.
#
# With --paro-materialize rotate (rotated tensor parallelism) nothing is all-gathered. Each of d
# ranks stores 1/d of every matrix, its slice, and slices go round a ring of the ranks in d - 1
# shifts: once in forward, once in backward, once more if a block is recomputed; gradients go round
# once. A unit is then a part of the model that computes slice by slice: the embedding, a block's
# attention or MLP, the head. Backward of the embedding reads no weight: its slices do not move. A
# tied head computes with the slices of the embedding. All norms form one more unit, replicated on
# every rank.

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

from model.config import LlamaConfig
from model.units import PartSpec, UnitSpec, parameter_shapes, recomputed_groups, unit_specs
from paro.layout import (
    EMPTY,
    Shape,
    Unit,
    UnitLayout,
    halves_of,
    make_sliced_layout,
    make_whole_layout,
)
from paro.spec.muon_rounds import prepare_for_muon
from paro.spec.run_spec import RunSpec
from paro.step.actions import ActionKind, StepShape, number_buffers
from paro.step.rotating import RotatingShape, RotationShape
from paro.step.schedule import LISTED_MICRO_BATCHES, step_schedule
from paro.step.slices import RingShape


def _make_unit(
    name: str,
    shapes: Mapping[str, Shape],
    make_layout: Callable[[Mapping[str, Shape]], UnitLayout],
    is_trained: Callable[[str], bool],
) -> Unit:
    """Return a unit, with separate flat buffers of its trained and its frozen parameters."""
    of_trained = {name: shape for name, shape in shapes.items() if is_trained(name)}
    of_frozen = {name: shape for name, shape in shapes.items() if name not in of_trained}
    trainable, frozen = (make_layout(each) if each else EMPTY for each in (of_trained, of_frozen))
    return Unit(name=name, trainable=trainable, frozen=frozen)


def _rotating_units(run: RunSpec) -> tuple[Unit, ...]:
    """Return the units of a run whose weights rotate: all norms, embedding, attentions, MLPs, head.

    Names are as in `blocks.0.attention`. In place, slices may be sent in halves, each a unit:
    `blocks.0.mlp 1/2` and `blocks.0.mlp 2/2`.
    """
    is_trained, degree = run.trained.__contains__, run.strategy.params
    shapes, units = parameter_shapes(run.model), []
    for spec, part in unit_parts(run.model):
        if spec.borrows:  # a tied head has no slices of its own
            continue
        label, cuts = spec.label_of(part), spec.cuts_of(part)
        sliced = {name: shapes.pop(name) for name in cuts}  # the rest of `shapes` is replicated
        halves: tuple[int | None, ...] = (None,)
        if run.materialize.in_place:
            halves = halves_of(sliced, cuts=cuts, number=degree, shares=part.shares)
        for half in halves:
            layout = partial(
                make_sliced_layout, cuts=cuts, number=degree, world_size=run.world_size, half=half
            )
            name = label if half is None else f"{label} {half + 1}/2"
            units.append(replace(_make_unit(name, sliced, layout, is_trained), part=label))
    whole = partial(make_whole_layout, world_size=run.world_size)
    return replace(_make_unit("norms", shapes, whole, is_trained), replicated=True), *units


def unit_parts(config: LlamaConfig) -> list[tuple[UnitSpec, PartSpec]]:
    """Return (unit, part of it that computes slice by slice) for all parts, in forward order."""
    return [(spec, part) for spec in unit_specs(config) for part in spec.parts]


def _rotation_shape(run: RunSpec, units: Sequence[Unit]) -> RotationShape:
    """Return the shape of a run's steps where weights rotate."""
    config = run.config
    ring = RingShape(
        num_steps=run.strategy.params,
        in_place=run.materialize.in_place,
        shares_scratch=run.precision.compute == run.precision.wire,
    )
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
        next((n for n, each in enumerate(of_parts) if not run.trained.isdisjoint(each)), len(parts))
        for of_parts in zip(*names, strict=True)
    )
    first = min(first_cut, first_replicated)
    starts = [*accumulate((len(spec.parts) for spec in specs), initial=0)]  # each unit's first part
    groups = recomputed_groups(specs, bisect_right(starts, first) - 1)
    return RotationShape(
        ring=ring,
        parts=tuple(
            RotatingShape(
                halves=tuple(halves[spec.label_of(part)]),
                backward_needs_weight=spec.backward_needs_weight,
            )
            for spec, part in parts
        ),
        trainable=tuple(buffer for unit in numbers for buffer in unit.trainable),
        replicated=numbers[0].needed,
        first_trained=first,
        first_replicated=first_replicated,
        recomputed=tuple(range(starts[group[0]], starts[group[-1] + 1]) for group in groups),
    )


def units_of(
    config: LlamaConfig,
    *,
    world_size: int,
    is_trained: Callable[[str], bool] = lambda _name: True,
) -> tuple[Unit, ...]:
    """Return the model's units, padded for every degree that divides `world_size`.

    They are embedding, blocks and head. A parameter trains unless `is_trained(name)` is false.
    """
    layout = partial(make_whole_layout, world_size=world_size)
    return tuple(
        replace(
            _make_unit(spec.name, spec.parameters, layout, is_trained),
            borrows=spec.borrows,
            backward_needs_weight=spec.backward_needs_weight,
        )
        for spec in unit_specs(config)
    )


def units_of_run(run: RunSpec) -> tuple[Unit, ...]:
    """Return the units of a run; for Muon each has its matrices and the size of its bucket.

    Where weights rotate a block is two units (three in place), and all norms form one more unit.
    """
    if run.materialize.rotates:
        units = _rotating_units(run)
    else:
        trains = run.trained.__contains__
        units = units_of(run.model, world_size=run.world_size, is_trained=trains)
    return prepare_for_muon(units, run.bucket_size) if run.precision.optimizer == "muon" else units


def shape_of_run(run: RunSpec, units: Sequence[Unit]) -> StepShape | RotationShape:
    """Return the properties of a run's units from which its steps are scheduled."""
    if run.materialize.rotates:
        return _rotation_shape(run, units)
    # The loss writes gradients of an untied output weight in forward.
    writes = units[-1].trainable.numel and not run.model.tie_embeddings_and_output_weights
    shape = StepShape(
        units=number_buffers(units),
        gathers=run.strategy.params > 1,
        reduces=run.strategy.grads > 1,
        prefetch_units=run.prefetch_units,
        grads_in_forward=frozenset({len(units) - 1} if writes else ()),
    )
    return replace(shape, recomputed=recomputed_groups(unit_specs(run.config), shape.first_trained))


def registered_param_buffers(run: RunSpec, units: Sequence[Unit]) -> dict[bool, tuple[int, int]]:
    """Return the memory to register with NCCL for unsharded parameters that copy engines gather.

    The result maps trainable (True) or frozen (False) parameters to the bytes of their largest
    buffer, and the largest number of their buffers that are unsharded at once.
    """
    if not run.copy_engine:
        return {}
    unsharded, most, largest = Counter[bool](), Counter[bool](), Counter[bool]()
    specs, signs = run.specs(units), {ActionKind.GATHER: 1, ActionKind.RELEASE: -1}
    num_micro_batches = min(run.num_micro_batches, LISTED_MICRO_BATCHES)
    step = step_schedule(shape_of_run(run, units), num_micro_batches, run.updated_ahead)
    for kind, number, *_ in step.actions():
        if kind in signs:
            trains, gathers = specs[number].buffer.trains, specs[number].sent_by(ActionKind.GATHER)
            unsharded[trains] += signs[kind]
            most |= unsharded
            largest |= Counter({trains: sum(gather.num_bytes for gather in gathers)})
    return {trains: (largest[trains], number) for trains, number in most.items()}
