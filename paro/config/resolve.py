"""Resolves flags: checkpoints, ranks and the planner decide settings that flags leave open."""

# `configure` (run.py) has these decided in order, each with a line in the log:
#
#   1. With --use-checkpoint-args the sizes, the tokenizer and Muon's settings are those of --load.
#   2. A run that resumes with the same world size keeps its strategy and quantization bit widths.
#   3. With --paro-elastic groups, degrees and collectives become what these ranks can have
#      (elastic.py).
#   4. The machine file supplies the group size, unless --paro-group-size does (sharding.py).
#   5. auto of context parallelism: as in the resumed run, or without a machine file by heads.
#   6. The planner decides all that is left (`OpenChoices`). If the machine has yet to be measured,
#      a placeholder is used and planning is deferred until then (`RunConfig.open`).

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from data.tokenizer_config import saved_tokenizer
from paro.arguments.megatron import changed_parts, ignored_lines
from paro.arguments.needed import missing_flags
from paro.arguments.parser import non_default, take
from paro.checkpoint.config import CheckpointConfig, is_of_positions
from paro.config.context_parallel import (
    AUTO,
    ContextParallelConfig,
    data_parallel_size_of,
    fastest_config,
    possible_configs,
    preferred_config,
    with_micro_batches,
)
from paro.config.elastic import nodes_line
from paro.config.parts import take_batches
from paro.config.sharding import (
    ShardingConfig,
    ShardingFlags,
    TrainingTask,
    check_measurable,
    inter_bits_notices,
)
from paro.distributed.process_group import RuntimeConfig
from paro.distributed.world import World
from paro.errors import UserError, check_multiple, flag_of
from paro.files.schema import conform
from paro.machine.files import MEASURE, why_unmeasurable
from paro.machine.machine import Machine
from paro.planning.description import bits_text, describe
from paro.planning.estimator import Estimator
from paro.planning.planner import plan
from paro.planning.remedies import why_nothing_fits
from paro.precision import PrecisionConfig
from paro.quantization.formats import FULL_BITS
from paro.schedule.batch_schedule import BatchSchedule
from paro.spec.context_layout import SIZE_FLAG, TYPE_FLAG
from paro.spec.optim_config import MuonConfig
from paro.strategy import FLAG, Strategy, parse_strategy

_MUON_LR = 0.005  # learning rates below this are typical of AdamW, too small for Muon
# Arguments that have no effect unless the run saves, uses a WSD schedule, and so on.
_SAVING = ("save_interval", "async_save", "no_save_optim", "on_save_failure")
_WSD = ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples")
_LOWEST = ("min_lr", "decoupled_min_lr")
_MUON = tuple(asdict(MuonConfig()))


class Decision(NamedTuple):
    """The planner's choice: fields of RunConfig, log lines, and values for flags that said auto."""

    sharding: ShardingConfig
    strategy: Strategy
    precision: PrecisionConfig
    batches: BatchSchedule
    lines: tuple[str, ...]
    flags: dict[str, object]


def with_saved(
    args: Namespace, world: World
) -> tuple[Namespace, tuple[str, ...], dict[str, object]]:
    """Fill in flags from --load; also return log lines, and the parts read of the checkpoint."""
    notices = (*changed_parts(args), *ignored_lines(args))
    checkpoint = take(CheckpointConfig, args)
    takes = checkpoint.use_checkpoint_args or checkpoint.use_checkpoint_opt_param_scheduler
    common = checkpoint.saved.common if takes and checkpoint.saved is not None else {}
    if checkpoint.use_checkpoint_args:
        if common:
            args = with_saved_muon(with_checkpoint_args(args, common), checkpoint)
        else:
            notices += (f"--load {args.load} holds no checkpoint: its sizes are the flags'",)
        if missing := missing_flags(args, loaded=True):
            raise UserError(*missing)
    args, lines = keeping_choice(args, world, checkpoint)
    notices += (*flags_without_effect(args), *lines)
    return args, notices, {"checkpoint": checkpoint, "common": common}


def flags_without_effect(args: Namespace) -> tuple[str, ...]:
    """List a line for each flag that has no effect for lack of another flag or of iterations."""
    changed = set(non_default(vars(args)))
    style, size = f"--lr-decay-style is {args.lr_decay_style}", args.context_parallel_size
    last = math.inf if args.train_iters is None else args.train_iters
    warmup, skipped = args.paro_outer_warmup, max(args.iterations_to_skip, default=0)
    over, over_all = (x is not None for x in (args.yarn_mscale, args.yarn_mscale_all_dim))
    lines = []
    for line, is_used, names in (
        ("nothing will be saved: {} no effect without --save DIR", args.save, _SAVING),
        (f"{{}} no effect without --lr-decay-style WSD: {style}", style.endswith("WSD"), _WSD),
        ("{} no effect without --context-parallel-size", size != 1, ("cp_comm_type",)),
        ("{} no effect without --optimizer muon", args.optimizer == "muon", _MUON),
        ("{} no effect with --lr-decay-style constant", not style.endswith("constant"), _LOWEST),
        ("{} no effect without --qk-layernorm", args.qk_layernorm, ("apply_wd_to_qk_layernorm",)),
        ("{} no effect without --yarn-mscale-all-dim", over_all, ("yarn_mscale",)),
        ("{} no effect without --yarn-mscale", over, ("yarn_mscale_all_dim",)),
        (f"{{}} no effect beyond --train-iters {last}", skipped <= last, ("iterations_to_skip",)),
        (
            f"{{}} no effect: all ranks are synchronous for the {warmup} steps of "
            f"--paro-outer-warmup, and --train-iters is {last}",
            last > warmup,
            ("paro_outer_steps",),
        ),
    ):
        flags = [flag_of(name) for name in names if name in changed]
        if flags and not is_used:
            lines.append(line.format(f"{', '.join(flags)} {'has' if len(flags) == 1 else 'have'}"))
    return (*lines, *_scale_notice(args))


def _scale_notice(args: Namespace) -> list[str]:
    """Return a warning if Muon's update scale does not fit a learning rate typical of AdamW."""
    if args.optimizer != "muon" or args.muon_extra_scale_factor != 1.0:
        return []
    mode = f"--muon-scale-mode {args.muon_scale_mode}"
    if args.use_mup and args.muon_scale_mode == "spectral":
        other = "--muon-scale-mode unit_rms_norm has updates that follow the width"
        return [f"--use-mup changes no learning rate of Muon's matrices, with {mode}: {other}"]
    if args.muon_scale_mode == "spectral":
        return [
            f"{mode}: an update is 4 to 5 times as large as AdamW's at the same --lr; "
            "--muon-extra-scale-factor 0.2 makes it as large"
        ]
    if args.lr is not None and args.lr < _MUON_LR:
        return [f"{mode} wants a --lr of about 0.02, and {args.lr:g} is of AdamW's size"]
    return []


@dataclass(frozen=True, slots=True)
class OpenChoices:
    """The settings that flags leave open, and all that the planner needs to choose them."""

    task: TrainingTask
    sharding_flags: ShardingFlags
    bits: tuple[ShardingConfig, PrecisionConfig, tuple[str, ...]]  # result of `take_inter_bits`
    args: Namespace  # of which the batch sizes are taken
    checkpoint: CheckpointConfig
    runtime: RuntimeConfig

    def decide(self) -> Decision:
        """Let the planner choose settings that flags leave open; `UserError` if nothing fits.

        Before the machine is measured, auto is a placeholder that no other flag contradicts.
        """
        strategy, is_unmeasured = self.sharding_flags.strategy, self.sharding_flags.is_unmeasured
        sharding, precision, notices = self.bits
        if sharding.machine is not None and self.runtime.by_nccl:
            order = self.runtime.paro_nccl_launch_order
            sharding = replace(sharding, machine=replace(sharding.machine, launch_order=order))
        world, context, size = sharding.world, sharding.context, self.args.micro_batch_size
        flags: dict[str, object] = {}
        lines: tuple[str, ...] = ()
        if context.auto:
            context, size, lines = self._context_of(sharding)
            flags = context.flags | {"micro_batch_size": size}
        batches = self._batches_of(context, size)
        sharding = replace(sharding, context=context)
        if sharding.elastic:
            lines += nodes_line(batches, world, context.context_parallel_size)
        lines += notices
        if is_unmeasured:
            # The placeholder strategy: III can rotate, NNN replicates every state.
            letters = "III" if sharding.materialize == "rotate" else "NNN"
            stand_in = parse_strategy(letters, world_size=world.size, group_size=world.group_size)
            return Decision(sharding, strategy or stand_in, precision, batches, lines, flags)
        if strategy is None or sharding.inter_bits is not None:
            request = self.task._replace(precision=precision).plan_request(batches, sharding)
            if strategy is None:
                result = plan(request, request.as_given())
                if result.best is None:
                    raise UserError(f"{FLAG} auto: {why_nothing_fits(request, result)}")
                strategy, precision = result.best.candidate.strategy, result.best.precision
                lines += (*describe(result),)
            else:
                estimate, other = Estimator(request).estimate_bits(request.candidate(strategy))
                precision = estimate.precision
                lines += () if other is None else (f"planner: {bits_text(estimate, other)}",)
        if sharding.inter_bits is None:
            lines += inter_bits_notices(precision, world.group_size, strategy, world.size)
        return Decision(sharding, strategy, precision, batches, lines, flags)

    def on_measured(self, machine: Machine) -> Decision:
        """Let the planner choose by a machine that was just measured; `UserError`."""
        sharding, precision, lines = self.bits
        bits = replace(sharding, machine=machine), precision, lines
        sharding_flags = self.sharding_flags._replace(is_unmeasured=False)
        return replace(self, sharding_flags=sharding_flags, bits=bits).decide()

    def _batches_of(self, context: ContextParallelConfig, size: int) -> BatchSchedule:
        world = self.sharding_flags.sharding.world
        num_ranks = data_parallel_size_of(world, context.context_parallel_size)
        return take_batches(self.args, num_ranks, size)

    def _context_of(
        self, sharding: ShardingConfig
    ) -> tuple[ContextParallelConfig, int, tuple[str, ...]]:
        """Choose the context-parallel configuration and micro-batch size if a flag is auto.

        Also returns log lines. While the machine is unmeasured, the first candidate is chosen.
        """
        strategy, is_unmeasured = self.sharding_flags.strategy, self.sharding_flags.is_unmeasured
        flag, size = sharding.context.auto[0], self.args.micro_batch_size
        world, machine, task = sharding.world, sharding.machine, self.task
        configs = [*possible_configs(sharding.context, task.context_limits(sharding))]
        if not configs:  # check_context says why
            return sharding.context, size, ()
        if len(configs) == 1:
            line = f"{flag} auto: {configs[0].describe()}: nothing else is possible"
            return configs[0], size, (line,)
        saved = self.checkpoint.resumed_arguments
        for config in configs if saved.get("world_size") == world.size else ():
            if all(saved.get(name) == value for name, value in config.flags.items()):
                saved_size = int(saved.get("micro_batch_size", 0)) if flag == SIZE_FLAG else size
                with suppress(UserError):  # the batch is no multiple any more
                    self._batches_of(config, saved_size)
                    line = f"{flag} auto: as in --load {self.checkpoint.load}"
                    return config, saved_size, (line,)
        is_timed = is_unmeasured or (machine is not None and machine.device is not None)
        if flag == TYPE_FLAG and not is_timed:
            config = preferred_config(configs, world.group_size)
            line = f"{flag} auto: {config.describe()}; --paro-machine would compare times"
            return config, size, (line,)
        if machine is None and not is_unmeasured:
            check_measurable([f"{flag} auto"], world, task.launch.dry_run)
            raise UserError(
                f"{flag} auto: give --paro-machine, a shipped name, a file or {MEASURE}"
            )
        sizes = self.args.global_batch_size, self.args.step_batch_size_schedule
        if flag == SIZE_FLAG and sizes == (None, None):
            raise UserError(f"{flag} auto compares steps of one batch: give --global-batch-size")

        def whole(config: ContextParallelConfig, size: int) -> BatchSchedule:
            made = self._batches_of(config, size)
            total = made.global_batch_size
            check_multiple("--global-batch-size", total, size, made.data_parallel_size)
            return made

        candidates = with_micro_batches(configs, size, whole, grows=flag == SIZE_FLAG)
        (config, size), batches = next(iter(candidates.items()))
        if is_unmeasured:
            return config, size, ()
        request = task.plan_request(batches, replace(sharding, context=config))
        space = request.as_given(None if strategy is None else (strategy,))
        return fastest_config(flag, request, candidates, space)


_BITS = ("paro_inter_param_bits", "paro_inter_grad_bits")


def keeping_choice(
    args: Namespace, world: World, checkpoint: CheckpointConfig
) -> tuple[Namespace, tuple[str, ...]]:
    """Fill in the saved strategy and bit widths of a run resumed on as many ranks; add a log line.

    With --paro-machine the planner chooses strategy and bit widths again.
    """
    if AUTO not in (args.paro_strategy, args.paro_inter_bits) or args.paro_machine is not None:
        return args, ()
    before = checkpoint.resumed_arguments
    group_size = args.paro_group_size or world.ranks_per_node
    ranks = before.get("world_size"), before.get("paro_group_size")
    if ranks != (world.size, group_size):
        return args, ()
    choice: dict[str, Any] = {}
    if args.paro_strategy == AUTO:
        choice["paro_strategy"] = str(before["paro_strategy"])
    if args.paro_inter_bits == AUTO:
        choice |= {name: before[name] for name in _BITS if before.get(name) in (4, 8, FULL_BITS)}
        choice["paro_inter_bits"] = None
    can_measure = not why_unmeasurable(world.size, group_size, dry_run=args.dry_run)
    flags = [f"{flag_of(n)} {v}" for n, v in choice.items() if v is not None]
    line = (
        f"the run continues with {', '.join(flags)}, as its checkpoint in {checkpoint.load} does; "
        f"--paro-machine {MEASURE if can_measure else 'NAME'} chooses anew"
    )
    return Namespace(**(vars(args) | choice)), (line,)


def with_checkpoint_args(args: Namespace, common: Mapping[str, Any]) -> Namespace:
    """Fill in the model sizes of a checkpoint, and its tokenizer if no flag gives one."""
    model = dict(common.get("model", {}))
    rows = model.pop("vocab_size")

    def is_kept(name: str) -> bool:  # a finetuning may rotate positions otherwise
        return bool(args.finetune and is_of_positions(name) and getattr(args, name) is not None)

    values = {n: value for n, value in model.items() if hasattr(args, n) and not is_kept(n)}
    values |= {
        "llama_preset": None,
        "padded_vocab_size": rows,
        "group_query_attention": model["num_query_groups"] != model["num_attention_heads"],
    }
    values |= {n: common[n] for n in ("max_position_embeddings", "init_method_std") if n in common}
    longest = values.get("max_position_embeddings")
    if longest is not None and args.seq_length > longest:
        raise UserError(
            f"--seq-length {args.seq_length} is above --max-position-embeddings {longest}, which "
            "--use-checkpoint-args takes from --load: shorten it, or give the model's flags instead"
        )
    if not any((args.tokenizer_type, args.vocab_file, args.merge_file)):
        saved = saved_tokenizer(common)
        values |= {name: value for name, value in saved.items() if value is not None}
    return Namespace(**(vars(args) | values))


def with_saved_muon(args: Namespace, checkpoint: CheckpointConfig) -> Namespace:
    """Fill in Muon and its saved settings if the run resumes Muon's optimizer states."""
    saved = checkpoint.resumed_arguments
    continues = not checkpoint.no_load_optim and saved.get("lora_rank") == args.lora_rank
    if saved.get("optimizer") != "muon" or not continues:
        return args
    plain = asdict(MuonConfig())
    settings = {name: saved[name] for name in plain if name in saved}
    settings = asdict(conform(settings, MuonConfig, f"--load {checkpoint.load}: arguments"))
    values = {name: settings[name] for name, value in plain.items() if getattr(args, name) == value}
    return Namespace(**(vars(args) | values | {"optimizer": "muon"}))
