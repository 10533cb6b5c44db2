"""The dry run: what one rank would hold, compute, send and read, without starting the launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from data.gpt_dataset import open_checked
from data.indexed_dataset import bin_path, idx_path
from model.units import flops_per_token
from paro.arguments.parser import non_default
from paro.config.checks import check_overwriting
from paro.config.record import model_lines, precision_line, recorded_arguments
from paro.config.run import RunConfig
from paro.distributed.control import PlannedControl
from paro.errors import UserError, count_text, reading
from paro.files.object_store import is_url
from paro.launch.placement import placement_lines
from paro.launch.prediction import checkpoint_bytes, remedy_of, upload_text
from paro.planning.description import bits_text, describe, seconds_text, spent_text
from paro.planning.estimator import Estimate
from paro.planning.listing import step_lines
from paro.planning.planner import TIE, SearchResult
from paro.planning.planner import plan as search
from paro.planning.remedies import why_nothing_fits
from paro.planning.search_space import MEMORY_MARGIN, PlanRequest
from paro.report.log import print_line
from paro.report.log_line import arguments_block
from paro.spec.offload import offloaded
from paro.text import align, size_text
from paro.topology import Sent
from paro.training.assembly import build_training
from paro.training.export import plan_export
from paro.training.in_memory import every_text, in_memory_bytes
from paro.training.resume import FROM_NOTHING, Resumed, base_of
from paro.training.step import Training, TrainState, samples_in_full_precision


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrediction:
    """The prediction of a run, with rank 0 built on the meta device: shapes without storage."""

    config: RunConfig
    training: Training
    request: PlanRequest | None  # planner's request; None unless --paro-machine names a device
    launch: Estimate | None  # step time and memory on that device; None with --skip-train
    other_bits: Estimate | None = None  # estimate with 16 bits if `launch` quantizes, or vice versa
    consumed: int = 0  # training samples that a resumed run has consumed; 0 for a new run

    @property
    def num_micro_batches(self) -> int:
        return self.config.batches.num_micro_batches_at(self.consumed)

    @property
    def device_bytes(self) -> int | None:
        """The memory of a device; None without --device-memory-gb and --paro-machine."""
        gigabytes = self.config.launch.device_memory_gb
        if self.request is not None:
            return self.request.device_bytes
        return None if gigabytes is None else round(gigabytes * 1e9)

    @property
    def fits(self) -> bool:
        return self.device_bytes is None or self.config.memory.total <= self.device_bytes


def predict_run(config: RunConfig) -> RunPrediction:
    """Build rank 0 on the meta device and predict its run; `UserError` if the build fails."""
    control = PlannedControl(config.world, torch.device("meta"))
    # The kernels of the run's device type are assumed.
    training = replace(build_training(config, control), device=torch.device(config.device_type))
    estimator, request, launch, other_bits = config.estimator, None, None, None
    if estimator is not None:
        request = replace(estimator.request, memory_margin=MEMORY_MARGIN)
        if config.trained:
            candidate = request.candidate(config.strategy)
            launch, other_bits = estimator.estimate(candidate), estimator.other_bits(candidate)
    return RunPrediction(
        config=config,
        training=training,
        request=request,
        launch=launch,
        other_bits=other_bits,
        consumed=config.checkpoint.resumed_samples if config.batches.changes else 0,
    )


def run_dry(config: RunConfig) -> None:
    """Print a summary and the details; `UserError` if the launch would fail."""
    plan = predict_run(config)
    result = None if plan.request is None or plan.launch is None else search(plan.request)
    details: list[str] = []
    mistakes: list[str] = []
    for section in (_batch, _model, _units, _memory, _step, _data, _checkpoints):
        try:
            details.extend(section(plan))  # also those before a mistake
        except UserError as mistake:
            mistakes.append(str(mistake))
    if not plan.fits:
        mistakes.append(_why_not(plan, result))
    recorded = recorded_arguments(config)
    print_line(
        *_answer(plan, result, mistakes),
        arguments_block({name: recorded[name] for name in non_default(config.arguments)}),
        "> all other arguments have their defaults",
        *config.notices,
        *details,
    )
    if plan.launch is not None and result is not None:
        print_line(f"> plan: {plan.launch.candidate.describe()} {spent_text(plan.launch)}")
        for line in describe(result, chose="of all candidates that fit the best is"):
            print_line(f"> {line}")
    if mistakes:
        raise UserError("; ".join(mistakes))


# The summary


def _answer(
    plan: RunPrediction, result: SearchResult | None, mistakes: Sequence[str]
) -> Iterator[str]:
    """Yield the first lines: whether the run starts and fits, bytes sent, and the step time."""
    world, runtime, memory = plan.config.world, plan.config.runtime, plan.config.memory
    nodes = f"{count_text(world.num_nodes, 'node')} of {world.ranks_per_node}"
    yield f"> dry run of {count_text(world.size, 'rank')} on {nodes}, {runtime.distributed_backend}"
    for mistake in mistakes:
        yield f"> the launch would fail: {mistake}"
    if not mistakes:
        yield "> the launch is sound; nothing was started and nothing written"
    yield f"> memory of a rank: {size_text(memory.total)} at most, at {memory.name}"
    if plan.device_bytes is None:
        yield "> --device-memory-gb GB, or --paro-machine NAME, would say whether that fits"
    elif plan.fits:
        yield f"> fits into the {plan.device_bytes / 1e9:g} GB of a device"
    yield from _traffic(plan)
    yield from _time(plan, result)


def _traffic(plan: RunPrediction) -> Iterator[str]:
    """Yield lines about bytes that rank 0 sends, also in rounds, and the mean if ranks differ."""
    memories, run = plan.config.memories, plan.config.spec
    rank0, mean = (memories.sent(run, plan.num_micro_batches, rank) for rank in (0, None))
    yield f"> sent by a rank in a step: {_sent_text(rank0)}"
    warmup = samples_in_full_precision(plan.training)
    if run.precision.quantizes and mean.inter and warmup:
        yield f">   with codes; in the first {warmup:,} samples more, without codes"
    if (outer := run.outer) is not None:
        sent = memories.sent_in_rounds(run, rank=0)
        parts = count_text(outer.outer_fragments, "fragment")
        yield f">   and in {outer.outer_steps} steps for outer steps, {parts}: {_sent_text(sent)}"
        if outer.outer_warmup:
            yield f">   in the first {outer.outer_warmup} steps, all synchronous, ranks send more"
    if plan.launch is not None and (timed := plan.launch.outer_round) is not None:
        yield (
            f">   a round takes {timed.seconds:.3g} s, of which {timed.exposed:.3g} s are exposed: "
            f"{timed.seconds_a_step / plan.launch.seconds:.1%} of the time"
        )
    if rank0 != mean:
        yield f">   those are rank 0's; on average a rank sends {_sent_text(mean)}"


def _sent_text(sent: Sent) -> str:
    inside, between = (size_text(size) if size else "nothing" for size in (sent.intra, sent.inter))
    return f"{inside} inside its group, {between} between groups"


def _time(plan: RunPrediction, result: SearchResult | None) -> Iterator[str]:
    machine, launch = plan.config.sharding.machine, plan.launch
    if machine is None:
        yield "> --paro-machine NAME would say how long a step takes, and what is faster"
    elif machine.device is None:
        yield f"> machine {machine.name} names no device, without which no step can be timed"
    elif launch is None:
        yield "> steps that train nothing are not timed"
    else:
        yield (
            f"> a step on machine {machine.name} takes {seconds_text(launch.seconds)}, "
            f"{launch.tokens_per_second:,.0f} tokens/s, MFU {launch.mfu:.1%}"
        )
        if plan.other_bits is not None:
            yield f"> {bits_text(launch, plan.other_bits)}"
        best = None if result is None else result.best
        gain = 0.0 if best is None else launch.seconds / best.seconds - 1
        if best is not None and gain > TIE:
            yield f"> {gain:.1%} faster there, and it fits: {best.candidate.describe()}"
        elif plan.fits and result is not None:
            yield (
                f"> of {result.num_candidates} candidates, which differ in {result.searched}, none "
                "that fits is faster there"
            )


def _why_not(plan: RunPrediction, result: SearchResult | None) -> str:
    """Say how much memory a launch that does not fit needs, and changes that make it fit."""
    assert plan.device_bytes is not None, "it fits"
    if result is not None and plan.request is not None and result.best is None:
        return why_nothing_fits(plan.request, result)
    gigabytes, request = plan.config.launch.device_memory_gb, plan.request
    whose = f"the {plan.device_bytes / 1e9:g} GB of a device"
    if request is not None:
        whose += f" of {request.machine.name}"
    if gigabytes is not None:
        whose = f"--device-memory-gb {gigabytes:g}"
    limit, memory = plan.device_bytes, plan.config.memory
    advice = remedy_of(plan.config, lambda other: other.total <= limit)
    if result is not None and result.best is not None:
        advice += f"; the fastest that fits is {result.best.candidate.describe()}"
    return f"a rank needs {size_text(memory.total)} at {memory.name}, more than {whose}: {advice}"


def _batch(plan: RunPrediction) -> Iterator[str]:
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


def _model(plan: RunPrediction) -> Iterator[str]:
    """Yield the lines about the model, the placement of its states, and their types."""
    seq_length = plan.config.data.seq_length
    yield from model_lines(plan.config)
    full, causal = (
        flops_per_token(plan.config.model, seq_length, plan.config.trained, causal=causal)
        for causal in (False, True)
    )
    tokens = plan.config.batches.batch_size_at(plan.consumed) * seq_length
    yield (
        f"> FLOPs: {full:.4e} a token with attention counted in full, {causal:.4e} with it halved; "
        f"{full * tokens / plan.config.world.size:.4e} a rank and step"
    )
    yield from placement_lines(plan.config, plan.training)
    yield f"> precision: {precision_line(plan.config)}"


def _units(plan: RunPrediction) -> Iterator[str]:
    """Yield a line for each size of unit on rank 0; units of equal size share a line."""
    units = plan.training.model.units
    yield f"> rank 0 on the meta device, {len(units)} units: elements of each state that it holds"
    by_sizes: dict[tuple[int, ...], list[str]] = {}
    for unit in units:
        held = (
            unit.layout.numel,
            unit.param_shard.numel(),
            unit.grad_shard.numel(),
            unit.optim_grad.numel() if unit.trainable else 0,
        )
        by_sizes.setdefault(held, []).append(unit.name)
    rows: list[tuple[str, ...]] = [("unit", "whole", "params", "grads", "optimizer")]
    for sizes, names in by_sizes.items():
        name = ", ".join(names) if len(names) < 3 else f"{names[0]} .. {names[-1]}"
        rows.append((name, *(f"{size:,}" for size in sizes)))
    yield from align(rows).splitlines()


def _memory(plan: RunPrediction) -> Iterator[str]:
    memory = plan.config.memory
    yield f"> memory at {memory.name}: {size_text(memory.total)}"
    for name, num_bytes in memory.parts().items():
        if num_bytes:
            yield f"    {name:<17}  {size_text(num_bytes, like=memory.total):>9}"
    on_host = offloaded(plan.config.memories.specs(plan.config.spec)).host_bytes
    if on_host and plan.config.spec.device_type == "cuda":
        yield f">   and {size_text(on_host)} of host memory, which are read and written every step"


def _data(plan: RunPrediction) -> Iterator[str]:
    """Open and check the corpora on this machine; list the others by name."""
    config = plan.config
    if not config.tokenizer_is_here:
        yield f"> tokenizer: none on this machine; a vocabulary of {config.vocab_size:,} instead"
    if config.data.mock_data:
        yield "> data: synthetic tokens"
    blends = [*config.data.blends().values(), *(each.blend for each in config.data.phases())]
    for prefix in dict.fromkeys(prefix for blend in blends for prefix in blend.prefixes):
        with reading(prefix):
            is_here = idx_path(prefix).exists() or bin_path(prefix).exists()
        if not is_here:
            yield f"> data: {prefix} is not on this machine and was not checked"
            continue
        corpus = open_checked(config.data, prefix, config.vocab_size, config.tokenizer)
        yield (
            f"> data: {prefix} holds {corpus.num_tokens:,} tokens in {corpus.num_documents:,} "
            f"documents, {'with' if corpus.has_checksums else 'without'} checksums"
        )


def _checkpoints(plan: RunPrediction) -> Iterator[str]:
    checkpoint, resumed = plan.config.checkpoint, FROM_NOTHING
    if checkpoint.load is not None:
        what = "no checkpoint on this machine"
        if (saved := checkpoint.saved) is not None:
            resumed = Resumed(base=base_of(plan.config, saved), common=saved.common)
            what = f"holds {saved.manifest.directory.name}"
        yield f"> --load {checkpoint.load}: {what}"
        yield from (f"> {line}" for line in (saved.passed_over if saved else ()))
    if checkpoint.save is not None:
        every = checkpoint.save_interval
        when = "at the end" if every is None else f"every {every} iterations"
        has_base, has_moments = resumed.base is not None, not checkpoint.no_save_optim
        num_bytes = checkpoint_bytes(plan.config.spec, has_base=has_base, has_moments=has_moments)
        yield f"> --save {checkpoint.save}: {size_text(num_bytes)} a checkpoint, {when}"
        if is_url(checkpoint.save):
            seconds = None if plan.launch is None else plan.launch.seconds
            upload = upload_text(num_bytes, plan.config.world.num_nodes, checkpoint, seconds)
            yield f">   {upload}"
        if resumed.base is not None:
            yield f">   without what is frozen, which is in {resumed.base['folder']}"
        check_overwriting(checkpoint, plan.config.train)
    if checkpoint.save_hf is not None:
        start = TrainState.at_start(plan.config.loss_scale)
        export = plan_export(plan.config, plan.training, resumed, start)
        size = f"{size_text(export.num_bytes)} in {count_text(len(export.files), 'file')}"
        yield f"> --save-hf {checkpoint.save_hf}: {size} at the end"
    interval = plan.config.in_memory_interval
    if interval is not None:
        size = size_text(in_memory_bytes(plan.config.world.ranks_per_node, plan.training))
        yield f"> local copies {every_text(interval)}: {size} of the memory of each node"


def _step(plan: RunPrediction) -> Iterator[str]:
    """Yield the actions of a step, for --show-step."""
    if not plan.config.launch.show_step:
        return
    memories, run, memory = plan.config.memories, plan.config.spec, plan.config.memory
    if not run.trained:
        yield "> no step to show: --skip-train trains nothing"
        return
    tally, sender = memories.tally(run), memories.sender(run, rank=0)
    other_bytes = memory.allocated - memory.allocations.total
    yield from step_lines(tally, plan.num_micro_batches, sender, other_bytes=other_bytes)
