"""The details that a dry run prints: batch, model, placement, units, memory, step, data, saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from data.fingerprint import check_tokenizer
from data.gpt_dataset import check_vocabulary
from data.indexed_dataset import IndexedDataset, bin_path, idx_path
from model.flops import flops_per_token
from paro.checkpoint.directory import common_of, find_checkpoint
from paro.config.checks import check_overwriting
from paro.config.record import model_line, precision_line, trained_lines
from paro.planning.cost_model import model_state_bytes
from paro.planning.listing import step_lines
from paro.planning.search.run_memory import RunMemory
from paro.sharding.shards import UnitShards
from paro.text import count_text, size_text
from paro.training.local_copies import every_text, local_copies_bytes
from paro.training.memory_check import checkpoint_bytes, plan_of
from paro.training.placement import placement_lines
from paro.training.planned_run import PlannedRun
from paro.training.resume import base_of


def _batch(plan: PlannedRun) -> Iterator[str]:
    batches, seq_length = plan.config.batches, plan.config.data.seq_length
    size = batches.batch_size_at(plan.consumed)
    yield (
        f"> global batch of {size} x {seq_length} = {size * seq_length:,} tokens: "
        f"{count_text(batches.data_parallel_size, 'data-parallel rank')} x "
        f"{count_text(plan.num_micro_batches, 'micro-batch')} x "
        f"{count_text(batches.micro_batch_size, 'sample')}"
    )
    for begin, larger in batches.step_batch_size_schedule or ():
        if begin > plan.consumed:
            count = count_text(larger // batches.samples_per_micro_batch, "micro-batch")
            yield f">   from {begin * seq_length:,} tokens on {larger} samples, {count}"
    if batches.rampup_batch_size is not None and size != batches.global_batch_size:
        largest = batches.global_batch_size
        count = count_text(largest // batches.samples_per_micro_batch, "micro-batch")
        yield f">   and ramps up to {largest} samples, {count}"
    if (batches.eval_batch, batches.eval_micro_batch) != (size, batches.micro_batch_size):
        count = count_text(batches.num_eval_micro_batches, "micro-batch")
        per_rank = count_text(batches.eval_micro_batch, "sample")
        yield f">   in evaluations {batches.eval_batch} samples, {count} x {per_rank}"
    iterations = plan.config.train.train_iters
    tokens = batches.samples_after(iterations) * seq_length
    yield f"> {iterations:,} iterations, {tokens:,} tokens in all"


def _model(plan: PlannedRun) -> Iterator[str]:
    model, seq_length = plan.config.model, plan.config.data.seq_length
    yield model_line(plan.config)
    yield from trained_lines(plan.config)
    trained = plan.config.trained
    full = flops_per_token(model, seq_length, trained, causal=False)
    causal = flops_per_token(model, seq_length, trained, causal=True)
    tokens = plan.config.batches.batch_size_at(plan.consumed) * seq_length
    yield (
        f"> FLOPs: {full:.4e} a token with attention counted in full, {causal:.4e} with it halved; "
        f"{full * tokens / plan.config.world.size:.4e} a rank and step"
    )


def _placement(plan: PlannedRun) -> Iterator[str]:
    yield from placement_lines(plan.config, plan.training)
    states = model_state_bytes(plan.config.strategy, plan.units, plan.config.precision)
    held = plan.training.optimizer.model_state_bytes()
    assert held == states.total, f"rank 0 holds {held} bytes, the formula says {states.total}"
    yield f"> precision: {precision_line(plan.config)}"


def _units(plan: PlannedRun) -> Iterator[str]:
    """The units of rank 0 as they were built, units of equal size in one line."""
    units = plan.training.model.units
    yield f"> rank 0 on the meta device, {len(units)} units: elements of each state that it holds"
    by_sizes: dict[tuple[int, ...], list[str]] = {}
    for unit in units:
        by_sizes.setdefault(_held_by(unit), []).append(unit.name)
    rows: list[tuple[str, ...]] = [("unit", "whole", "params", "grads", "optimizer")]
    for sizes, names in by_sizes.items():
        name = ", ".join(names) if len(names) < 3 else f"{names[0]} .. {names[-1]}"
        rows.append((name, *(f"{size:,}" for size in sizes)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        right = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        yield "  ".join((name.ljust(widths[0]), *right))


def _held_by(unit: UnitShards) -> tuple[int, int, int, int]:
    """Elements of the whole unit, and of its parameters, gradients and optimizer on this rank."""
    return (
        unit.layout.numel,
        unit.param_shard.numel(),
        unit.grad_shard.numel(),
        unit.optim_grad.numel() if unit.trainable else 0,
    )


def _memory(plan: PlannedRun) -> Iterator[str]:
    memory = plan.memory
    yield f"> memory at {memory.name}: {size_text(memory.total)}"
    for name, num_bytes in memory.parts().items():
        if num_bytes:
            yield f"    {name:<17}  {size_text(num_bytes, like=memory.total):>9}"


def _data(plan: PlannedRun) -> Iterator[str]:
    """Opens and checks the corpora on this machine; lists the others by name."""
    config = plan.config
    if config.data.mock_data:
        yield "> data: synthetic tokens"
    blends = config.data.blends().values()
    for prefix in dict.fromkeys(prefix for blend in blends for prefix in blend.prefixes):
        if not (idx_path(prefix).exists() or bin_path(prefix).exists()):
            yield f"> data: {prefix} is not on this machine and was not checked"
            continue
        corpus = IndexedDataset(prefix)
        check_tokenizer(prefix, config.tokenizer)
        check_vocabulary(corpus, config.vocab_size)
        yield (
            f"> data: {prefix} holds {corpus.num_tokens:,} tokens in {corpus.num_documents:,} "
            f"documents, {'with' if corpus.has_checksums else 'without'} checksums"
        )


def _checkpoints(plan: PlannedRun) -> Iterator[str]:
    checkpoint, base = plan.config.checkpoint, None
    if checkpoint.load is not None:
        found = find_checkpoint(checkpoint.load, checkpoint.ckpt_step)
        if found is not None:
            base = base_of(plan.config, common_of(found))
        what = "no checkpoint on this machine" if found is None else f"holds {found.name}"
        yield f"> --load {checkpoint.load}: {what}"
    if checkpoint.save is not None:
        every = checkpoint.save_interval
        when = "at the end" if every is None else f"every {every} iterations"
        size = size_text(checkpoint_bytes(plan.config, has_base=base is not None))
        yield f"> --save {checkpoint.save}: {size} a checkpoint, {when}"
        if base is not None:
            yield f">   without what is frozen, which is in {base['folder']}"
        check_overwriting(checkpoint, plan.config.train)


def _local_copies(plan: PlannedRun) -> Iterator[str]:
    interval = plan.config.local_copies_interval
    if interval is not None:
        size = size_text(local_copies_bytes(plan.config, plan.training))
        yield f"> local copies {every_text(interval)}: {size} of the memory of each node"


def _step(plan: PlannedRun) -> Iterator[str]:
    """The actions of a step, for --show-step."""
    config, memory = plan.config, plan.memory
    if not config.launch.show_step:
        return
    if not config.trained:
        yield "> no step to show: --skip-train trains nothing"
        return
    run = plan_of(config, plan.training.device.type)
    yield from step_lines(
        RunMemory(config.sharding.machine).tally(run),
        plan.training.model.context.topology,
        plan.num_micro_batches,
        overlaps=config.sharding.prefetch_units > 0,
        updated_ahead=config.sharding.updated_ahead,
        other_bytes=memory.allocated - memory.allocations.total,
    )


SECTIONS: tuple[Callable[[PlannedRun], Iterable[str]], ...] = (
    _batch,
    _model,
    _placement,
    _units,
    _memory,
    _step,
    _data,
    _checkpoints,
    _local_copies,
)
