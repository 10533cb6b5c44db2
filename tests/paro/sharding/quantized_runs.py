"""Runs whose updates or gradients are sent quantized, recorded, and the arithmetic they equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paro.collectives.quantized import QuantizedSum
from paro.config.run import RunConfig
from paro.distributed.comm_stream import Event
from paro.distributed.world import World
from paro.layout import UnitLayout
from paro.quantization.blocks import dequantize_by_torch, hadamard
from paro.quantization.formats import ERROR_FORM, RangeFormat, error_bytes
from paro.sharding.shards import UnitShards
from paro.training.replicas import check_replicas
from paro.training.step import Training
from tests.helpers.training import TINY, Trained, configured, train

# Ranges of some quantized blocks on 8 ranks, and odd sizes, so that they end within parameters.
SIZES = "--hidden-size 60 --ffn-hidden-size 151 --vocab-size 211 --num-layers 2 --bf16"
FLAGS = f"{TINY} {SIZES} --train-iters 3 --global-batch-size 24"


def quantized_flags(cases: Sequence[tuple[str, int, str]], micro_batch: int) -> list[str]:
    """The flags of runs, each a strategy, the bits of parameters and gradients, and more flags."""
    same = f"{FLAGS} --micro-batch-size {micro_batch}"
    return [
        f"{same} --paro-strategy {strategy} --paro-inter-param-bits {bits} "
        f"--paro-inter-grad-bits {bits} {more}"
        for strategy, bits, more in cases
    ]


def quantized_run(more: str, *, group_size: int = 2) -> RunConfig:
    words = f"{FLAGS} --micro-batch-size 1 --paro-group-size {group_size} {more}"
    return configured(words, World(size=8, ranks_per_node=2))


@dataclass(frozen=True, slots=True)
class Update:
    """One update of one unit on one rank: its shards and where they are in the flat buffer."""

    before: Tensor
    after: Tensor
    param_start: int
    master: Tensor
    optim_start: int
    layout: UnitLayout
    quantized: bool


@dataclass(frozen=True, slots=True)
class Sum:
    """One sum of a unit's gradients on one rank: what it had, and its optimizer range after."""

    whole: Tensor
    start: int
    result: Tensor
    result_start: int
    ranges: RangeFormat
    errors: Tensor | None = None  # before: a row of values for each owner's chunk
    errors_after: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run on one rank: the updates of all units by name in every step, all quantized sums."""

    trained: Trained
    steps: list[dict[str, Update]]
    sums: list[Sum]


def record_all(runs: Sequence[str], group_size: int) -> list[Recorded]:
    return [record(flags, group_size) for flags in runs]


def record(flags: str, group_size: int) -> Recorded:
    """Trains on all ranks; after every update replicas must be equal."""
    steps: list[dict[str, Update]] = []
    sums: list[Sum] = []

    def before(training: Training) -> None:
        original = training.optimizer.step

        def step(**arguments: float) -> None:
            parts = [*training.optimizer._parts.values()]
            old = [part.unit.param_shard.clone() for part in parts]
            original(**arguments)
            training.model.wait_for_updated_params()
            check_replicas(training, iteration=len(steps))
            steps.append(
                {
                    part.unit.name: _update(part.unit, param, part.master)
                    for part, param in zip(parts, old, strict=True)
                }
            )

        training.optimizer.step = step  # type: ignore[method-assign,assignment]
        for unit in training.model.trainable_units:
            if unit.quantized_sum is not None:
                _record_sum(unit.quantized_sum, sums)

    return Recorded(train(flags, group_size=group_size, before=before), steps, sums)


def _record_sum(reduction: QuantizedSum, sums: list[Sum]) -> None:
    original, start, ranges = reduction.reduce, reduction.start, reduction.ranges

    def reduce(whole: Tensor, result: Tensor, *, after: Event) -> Event:
        after.wait()
        had, errors = whole.clone(), _errors(reduction)
        event = original(whole, result, after=after)
        event.wait()
        begin = start + (result.data_ptr() - whole.data_ptr()) // whole.itemsize
        sums.append(Sum(had, start, result.clone(), begin, ranges, errors, _errors(reduction)))
        return event

    reduction.reduce = reduce  # type: ignore[method-assign]


def _errors(reduction: QuantizedSum) -> Tensor | None:
    """Quantization errors, in fp32: a row of `ranges.numel` values for each owner's chunk."""
    if reduction.errors is None:
        return None
    ranges = reduction.ranges
    rows = torch.zeros(len(reduction.errors), -(-ranges.numel // 32) * 32)
    for index, (row, octets) in enumerate(zip(rows, reduction.errors, strict=True)):
        num_quantized = ranges.num_quantized(reduction.start + index * ranges.numel)
        whole = -(-num_quantized // 32) * 32
        dequantize_by_torch(octets[: error_bytes(num_quantized)], ERROR_FORM, row[:whole])
    return rows


def _update(unit: UnitShards, before: Tensor, master: Tensor) -> Update:
    return Update(
        before=before,
        after=unit.param_shard.clone(),
        param_start=unit.param_start,
        master=master.clone(),
        optim_start=unit.optim_start,
        layout=unit.layout,
        quantized=unit.quantized_update is not None,
    )


def expected(updates: Sequence[Update], bits: int | None) -> Tensor:
    """The whole parameters of a unit after an update, from all ranks' parameters and masters.

    Block by block, as the note in paro/quantization/formats.py says it; None: exactly.
    """
    first, layout = updates[0], updates[0].layout
    params = torch.full((layout.numel,), torch.nan, dtype=first.before.dtype)
    masters = torch.full((layout.numel,), torch.nan)
    for update in updates:
        _fill(params, update.param_start, update.before)
        _fill(masters, update.optim_start, update.master)
    result = masters.to(params.dtype)
    size = first.master.numel()
    for start in range(0, layout.numel, size) if bits is not None else ():
        in_slice = start % (layout.numel // layout.num_slices)
        num_quantized = _num_quantized(layout.matrix_stop - in_slice, size)
        part = slice(start, start + num_quantized)
        old = params[part].float()
        result[part] = (old + _rounded(masters[part] - old, bits, 2048)).to(params.dtype)
    return result


def _num_quantized(num_matrices: int, numel: int) -> int:
    """How many of the first elements of a range are quantized, of which so many are of matrices."""
    num_quantized = min(max(num_matrices, 0), numel)
    return num_quantized if num_quantized >= 2048 else 0


def _fill(whole: Tensor, start: int, values: Tensor) -> None:
    there = whole[start : start + values.numel()]
    assert (there.isnan() | (there == values)).all(), "replicas differ"
    there.copy_(values)


def check_updates(recorded: Sequence[Recorded], bits: int | None, *, first: int = 0) -> int:
    """Compares every unit of every rank bit for bit; returns how many updates were sent quantized.

    Before step `first` everything must be sent exactly.
    """
    num_quantized = 0
    for step in range(len(recorded[0].steps)):
        for name, one in recorded[0].steps[step].items():
            updates = [rank.steps[step][name] for rank in recorded]
            sent_bits = bits if one.quantized and step >= first else None
            wanted = expected(updates, sent_bits)
            num_quantized += sent_bits is not None
            for rank, update in enumerate(updates):
                start = update.param_start
                own = wanted[start : start + update.after.numel()]
                assert torch.equal(update.after, own), f"{name} on rank {rank} in step {step}"
    return num_quantized


def check_sums(recorded: Sequence[Recorded], bits: int) -> int:
    """Compares every rank's sums with the arithmetic, bit for bit; returns how many there were."""
    for sums in zip(*(rank.sums for rank in recorded), strict=True):
        ranges = sums[0].ranges
        starts = {one.start + i for one in sums for i in range(0, len(one.whole), ranges.numel)}
        for start in starts:
            contributing = [one for one in sums if 0 <= start - one.start < len(one.whole)]
            num_chunks = [one.whole[start - one.start :][: ranges.numel] for one in contributing]
            holders = [one for one in sums if 0 <= start - one.result_start < len(one.result)]
            num_quantized = _num_quantized(
                ranges.matrix_stop - start % ranges.slice_numel, ranges.numel
            )
            errors = [_error_of(one, start, num_quantized, bits) for one in contributing]
            wanted = _sum_of(num_chunks, errors, num_quantized, bits, again=len(holders) > 1)
            assert len(num_chunks) > 1, "nothing crosses groups"
            for one in holders:
                own = one.result[start - one.result_start :][: ranges.numel]
                assert torch.equal(own, wanted), f"the sum of the elements from {start}"
    return len(recorded[0].sums)


def _error_of(one: Sum, start: int, stop: int, bits: int) -> Tensor:
    """Quantization errors of a chunk before; checks those after."""
    whole = -(-stop // 32) * 32
    if one.errors is None or one.errors_after is None:
        return torch.zeros(whole)
    row, first = (start - one.start) // one.ranges.numel, start - one.start
    before, after = one.errors[row, :whole], one.errors_after[row, :whole]
    added = hadamard(one.whole[first : first + stop].float()) + before
    lost = added - _rounded(added, bits)
    for now, mean in zip(after.split(128), (0.8 * before + 0.2 * lost).split(128), strict=True):
        assert (now - mean).abs().max() <= 0.501 * mean.abs().max() / 127
    assert after.any() == added.any(), "nothing was lost"
    return before


def _sum_of(
    num_chunks: Sequence[Tensor],
    errors: Sequence[Tensor],
    stop: int,
    bits: int,
    *,
    again: bool,
) -> Tensor:
    """The sum of the ranks' chunks in their order, each quantized; `again`: also the sum."""
    total, exact = (
        torch.zeros(-(-stop // 32) * 32),
        torch.zeros(num_chunks[0].numel() - stop),
    )
    for chunk, error in zip(num_chunks, errors, strict=True):
        total += _rounded(hadamard(chunk[:stop].float()) + error, bits)
        exact += chunk[stop:].bfloat16()
    if again:
        total, exact = _rounded(total, bits), exact.bfloat16().float()
    return torch.cat([hadamard(total)[:stop] / 32, exact])


def _rounded(values: Tensor, bits: int, block: int = 128) -> Tensor:
    top, result = 2 ** (bits - 1) - 1, torch.zeros_like(values)
    for part, rounded in zip(values.split(block), result.split(block), strict=True):
        scale = part.abs().max() / top if part.numel() else 0
        if scale > 0:
            rounded.copy_((part / scale).round().clamp(-top, top) * scale)
    return result
