"""Flags filled from the checkpoint of --load: model sizes, tokenizer and schedules."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.tokenizer_config import saved_tokenizer
from paro.checkpoint.config import CheckpointConfig
from paro.checkpoint.directory import common_of, find_checkpoint, newest_whole
from paro.checkpoint.manifest import read_manifest
from paro.config.inter_bits import AUTO
from paro.distributed.world import World
from paro.errors import UserError
from paro.machine.files import MEASURE, why_unmeasurable
from paro.quantization.formats import FULL_BITS
from paro.schedule.lr_schedule import ScheduleConfig
from paro.spec.optim_config import MuonConfig
from paro.untrusted.schema import conform

_BITS = ("paro_inter_param_bits", "paro_inter_grad_bits")


def saved_common(checkpoint: CheckpointConfig) -> dict[str, Any] | None:
    """Return the checkpoint's common.json if a --use-checkpoint-* flag needs it, else None."""
    if not (checkpoint.use_checkpoint_args or checkpoint.use_checkpoint_opt_param_scheduler):
        return None
    directory = _directory(checkpoint)
    return None if directory is None else common_of(directory)


def resumed_samples(checkpoint: CheckpointConfig) -> int:
    """Return the training samples consumed before the run continues; 0 for a new run."""
    directory = None if checkpoint.finetune else _directory(checkpoint)
    state = {} if directory is None else common_of(directory).get("state", {})
    return int(state.get("consumed_train_samples", 0))


def resumed_arguments(checkpoint: CheckpointConfig) -> Mapping[str, Any]:
    """Return the arguments of the run that continues; none for a new one."""
    directory = None if checkpoint.finetune else _directory(checkpoint)
    manifest = None if directory is None else read_manifest(directory)
    return {} if manifest is None else manifest.arguments


def keeping_choice(
    args: Namespace, world: World, checkpoint: CheckpointConfig
) -> tuple[Namespace, tuple[str, ...]]:
    """Return the flags with what a run that continues on as many ranks had chosen; and a log line.

    --paro-machine asks to choose again.
    """
    if AUTO not in (args.paro_strategy, args.paro_inter_bits) or args.paro_machine is not None:
        return args, ()
    before = resumed_arguments(checkpoint)
    group_size = args.paro_group_size or world.ranks_per_node
    ranks = before.get("world_size"), before.get("paro_group_size")
    if ranks != (world.size, group_size):
        return args, ()
    kept: dict[str, Any] = {}
    if args.paro_strategy == AUTO:
        kept["paro_strategy"] = str(before["paro_strategy"])
    if args.paro_inter_bits == AUTO:
        kept |= {name: before[name] for name in _BITS if before.get(name) in (4, 8, FULL_BITS)}
        kept["paro_inter_bits"] = None
    can_measure = not why_unmeasurable(world.size, group_size, dry_run=args.dry_run)
    flags = [f"--{n.replace('_', '-')} {v}" for n, v in kept.items() if v is not None]
    line = (
        f"the run continues with {', '.join(flags)}, as its checkpoint in {checkpoint.load} does; "
        f"--paro-machine {MEASURE if can_measure else 'NAME'} chooses anew"
    )
    return Namespace(**(vars(args) | kept)), (line,)


def _directory(checkpoint: CheckpointConfig) -> Path | None:
    load, step = checkpoint.load, checkpoint.ckpt_step
    if load is None:
        return None
    return newest_whole(load) if step is None else find_checkpoint(load, step)


def with_checkpoint_args(args: Namespace, common: dict[str, Any]) -> Namespace:
    """Return the flags with the checkpoint's model sizes, and its tokenizer if the flags
    give none."""
    model = dict(common.get("model", {}))
    rows = model.pop("vocab_size")
    taken = {name: value for name, value in model.items() if hasattr(args, name)}
    taken |= {
        "llama_preset": None,
        "padded_vocab_size": rows,
        "group_query_attention": model["num_query_groups"] != model["num_attention_heads"],
    }
    for name in ("max_position_embeddings", "init_method_std"):
        if name in common:
            taken[name] = common[name]
    longest = taken.get("max_position_embeddings")
    if longest is not None and args.seq_length > longest:
        raise UserError(
            f"--seq-length {args.seq_length} is above --max-position-embeddings {longest}, which "
            "--use-checkpoint-args takes from --load: shorten it, or give the model's flags instead"
        )
    if not any((args.tokenizer_type, args.vocab_file, args.merge_file)):
        saved = saved_tokenizer(common)
        taken |= {name: value for name, value in saved.items() if value is not None}
    return Namespace(**(vars(args) | taken))


def with_saved_muon(args: Namespace, checkpoint: CheckpointConfig) -> Namespace:
    """Return the flags with Muon, and its settings that none gives, where its states
    are continued."""
    saved = resumed_arguments(checkpoint)
    continues = not checkpoint.no_load_optim and saved.get("lora_rank") == args.lora_rank
    if saved.get("optimizer") != "muon" or not continues:
        return args
    plain = asdict(MuonConfig())
    known = {name: saved[name] for name in plain if name in saved}
    kept = asdict(conform(known, MuonConfig, f"--load {checkpoint.load}: arguments"))
    taken = {name: kept[name] for name, value in plain.items() if getattr(args, name) == value}
    return Namespace(**(vars(args) | taken | {"optimizer": "muon"}))


def with_checkpoint_schedule(schedule: ScheduleConfig, common: dict[str, Any]) -> ScheduleConfig:
    """Return the checkpoint's schedule, or `schedule` for a converted model, which has none."""
    saved = common.get("schedule")
    if saved is None:
        return schedule
    kept: ScheduleConfig = conform(saved, ScheduleConfig, "--load: schedule in common.json")
    return kept
