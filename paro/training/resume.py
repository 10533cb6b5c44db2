"""Records a run's state besides its tensors in checkpoints, and resumes a run from checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from data.hub import how_to_fetch
from data.tokenizer_config import unpadded_vocab_size
from model.config import LlamaConfig
from model.units import BY_VOCABULARY, parameter_shapes
from paro.checkpoint.base import as_base, stored_parameters
from paro.checkpoint.config import (
    CheckpointConfig,
    SavedRun,
    as_read,
    is_of_positions,
    saved_fields,
)
from paro.checkpoint.directory import BaseCheckpoint
from paro.checkpoint.in_memory.recovery import Recovery
from paro.config.record import recorded_arguments
from paro.config.train import TrainConfig
from paro.distributed.control import Control
from paro.errors import UserError, count_text, flag_of, reading
from paro.files.object_store import path_of
from paro.files.schema import conform
from paro.report.log import Log
from paro.schedule.loss_scale import start_loss_scale
from paro.training.changed_flags import schedule_change
from paro.training.groups_alone import GroupState, regrouped_lines, resume_group, wrong_state
from paro.training.step import Training, TrainState

if TYPE_CHECKING:
    from paro.config.run import RunConfig


def common_record(
    config: RunConfig,
    training: Training,
    resumed: Resumed,
    state: TrainState,
    groups: Sequence[GroupState] = (),
) -> dict[str, Any]:
    """Build the JSON record (common.json) of all that a checkpoint holds besides tensors."""
    lora = config.model.lora
    return {
        "model": saved_fields(config.model),
        "max_position_embeddings": config.model.max_position_embeddings,
        "init_method_std": config.model.init_method_std,
        "tokenizer": asdict(config.tokenizer),
        "vocab_size": config.vocab_size,
        "unpadded_vocab_size": resumed.unpadded_rows(config),
        "state": asdict(state),
        "schedule": asdict(config.schedule),
        "dynamic_loss_scale": config.loss_scale.dynamic,
        "global_batch_size": config.batches.global_batch_size,
        "order": resumed.order,
        "num_optimizer_steps": training.optimizer.num_steps,
        "num_averaged": training.optimizer.num_averaged,
        "groups_alone": training.groups_alone,
        "groups": [*map(asdict, groups)],
        "has_moments": not config.checkpoint.no_save_optim,
        "strategy": config.strategy.name,
        "world_size": training.control.world.size,
        "trainable": str(config.trainable) if lora is None else "adapters",
        "lora": None if lora is None else asdict(lora),
        "base": resumed.base,
        "token_ids": resumed.common.get("token_ids") or {},
        "arguments": recorded_arguments(config),
    }


def check_source(checkpoint: CheckpointConfig, train: TrainConfig, control: Control) -> None:
    """Raise `UserError` if no rank finds the folder of --load; collective.

    If --load and --save are the same folder, it may be missing: the first save creates it.
    """
    if checkpoint.load is None or (checkpoint.continues and not train.skip_train):
        return
    with control.raise_on_all_ranks(), reading(f"--load {checkpoint.load}"):
        exists = path_of(checkpoint.load).exists()
    if not any(control.gather(exists)):
        raise UserError(
            f"--load {checkpoint.load} does not exist: give a folder of checkpoints, or leave "
            f"--load out to begin with random weights{how_to_fetch(checkpoint.load)}"
        )


def load_run(config: RunConfig, training: Training, log: Log) -> Resumed:
    """Load model and optimizer from --load; return `FROM_NOTHING` if there is no checkpoint."""
    # Imported here because importing torch.distributed.checkpoint takes half a second.
    from paro.checkpoint.load import LoadRequest, load_checkpoint

    flags = config.checkpoint
    assert flags.load is not None, "nothing to load"
    moments = not (flags.finetune or flags.no_load_optim)
    model, positions = saved_fields(config.model), _new_positions(config)
    saved = load_checkpoint(
        flags.load,
        training.optimizer.flat_shards(),
        training.control,
        request=LoadRequest(
            iteration=flags.ckpt_step,
            moments=moments,
            model={name: model[name] for name in model if name not in positions},
            base=flags.base,
            lora=config.model.lora,
            groups_alone=None if flags.finetune else training.groups_alone,
            as_sent=config.train.skip_train,
        ),
        log=log.log0,
    )
    if saved is None:
        log.log0(f"--load {flags.load} holds no checkpoint: starting afresh")
        return FROM_NOTHING
    common = saved.common
    _check_finite(flags.load, common, training)
    begins = config.model.lora is not None and common.get("lora") is None
    group = None if flags.finetune else resume_group(common, training)
    num_steps = common.get("num_optimizer_steps", 0) if group is None else group.num_optimizer_steps
    counts = {"num_steps": num_steps, "num_averaged": common.get("num_averaged", 0)}
    with training.traffic.paused():
        training.optimizer.loaded(**(counts if moments and not begins else {}))
    training.exposed_timer.take()  # discard waits during loading: they belong to no step
    with training.control.raise_on_all_ranks():
        base = base_of(config, saved)
    if None in training.control.gather(base):
        base = None
    if base is not None:
        log.log0(
            f"checkpoints hold what trains; the rest is in {base['folder']}, iteration "
            f"{base['iteration']}, which they name as their base"
        )
    for line in regrouped_lines(f"--load {flags.load}", common, training):
        log.log0(line)
    _log_positions(positions, as_read(common.get("model", {}), LlamaConfig), log)
    state = None
    if common.get("parameters_only"):
        log.log0(f"--load {flags.load} is a converted model: training begins with it")
    elif begins:
        log.log0(f"--load {flags.load} has no adapters: training begins with new ones on it")
    elif flags.finetune:
        log.log0(f"--finetune: training begins with the parameters of --load {flags.load}")
    else:
        state = state_of(common, config, log, f"--load {flags.load}", restarts=flags.no_load_optim)
        if group is not None and not flags.no_load_optim:
            state = replace(state, loss_scale=group.loss_scale, expected=group.expected)
    return Resumed(state, base, common=common)


def _new_positions(config: RunConfig) -> dict[str, Any]:
    """Return the model's fields of positions that flags give to a training from parameters."""
    flags = config.command_line if config.checkpoint.finetune else {}
    return {
        name: value
        for name, value in saved_fields(config.model).items()
        if is_of_positions(name) and flags.get(name) is not None
    }


def _log_positions(here: Mapping[str, Any], there: Mapping[str, Any], log: Log) -> None:
    for name, value in here.items():
        if there[name] != value:
            flag = flag_of(name)
            log.log0(f"positions rotate otherwise: {flag} is {there[name]} there, {value} here")


def _check_finite(source: str, common: Mapping[str, Any], training: Training) -> None:
    """Raise `UserError` on all ranks if a state that was loaded has NaN or infinity."""
    if (wrong := wrong_state(training)) is not None:
        raise UserError(
            f"--load {source}: in iteration {common['iteration']} {wrong} is not finite: give "
            "an earlier one with --ckpt-step"
        )


def state_of(
    common: Mapping[str, Any], config: RunConfig, log: Log, source: str, *, restarts: bool = False
) -> TrainState:
    """Return the state to resume from; `UserError` for a changed schedule that no flag allows.

    Lines about changes name `source`. If the schedule `restarts`, the loss scale restarts too.
    """
    saved: TrainState = conform(common.get("state"), TrainState, f"{source}: state in common.json")
    is_dynamic = config.loss_scale.dynamic and common.get("dynamic_loss_scale", True)
    if restarts or not is_dynamic:
        saved = replace(saved, loss_scale=start_loss_scale(config.loss_scale))
    before, now = common.get("world_size"), config.world.size
    if before not in (None, now):
        log.log0(f"{source}: saved by {count_text(before, 'rank')}, continued by {now}")
    batch_size = common.get("global_batch_size", config.batches.global_batch_size)
    if batch_size != config.batches.global_batch_size:
        log.log0(
            f"the global batch was {batch_size} and is {config.batches.global_batch_size} now: "
            f"data continue after sample {saved.consumed_train_samples}"
        )
    entries = common.get("vocab_size", config.vocab_size)
    is_null = config.tokenizer.tokenizer_type == "NullTokenizer"
    if is_null and entries != config.vocab_size:
        log.log0(
            f"NullTokenizer had {entries} entries and has {config.vocab_size} now, the end of "
            f"documents counted: give --vocab-size {entries} to continue with the same data"
        )
    if restarts:
        return replace(saved, scheduled_samples=0)
    change = schedule_change(common, config.schedule, config.train, config.batches)
    if change is not None and not config.checkpoint.override_opt_param_scheduler:
        raise UserError(
            f"{source}: the schedule changed: {change}: give --override-opt_param-scheduler to "
            "take the flags', or --use-checkpoint-opt_param-scheduler to keep the checkpoint's"
        )
    return saved


class Resumed(NamedTuple):
    """The state that a run starts from, the checkpoint that it came with, and the data's order."""

    state: TrainState | None = None  # the state to resume from; None: start at iteration 0
    base: BaseCheckpoint | None = None  # checkpoint with the frozen parameters; None: save them too
    recovery: Recovery | None = None  # the in-memory checkpoint that was loaded; None: --load
    common: Mapping[str, Any] = MappingProxyType({})  # common.json of the loaded checkpoint
    order: Mapping[str, Any] | None = None  # what orders the training samples of this run

    @property
    def start(self) -> int:
        """The iteration after which the run starts, the furthest of groups that train alone."""
        if self.recovery is not None:
            return self.recovery.furthest_iteration
        return 0 if self.state is None else self.state.iteration

    @property
    def trained_on(self) -> frozenset[str] | None:
        """The fingerprints of the tokenizers of the training data that --load names, if any."""
        corpora = (self.common.get("order") or {}).get("corpora", ()) if not self.recovery else ()
        return frozenset(filter(None, (corpus.get("tokenizer") for corpus in corpora))) or None

    def unpadded_rows(self, config: RunConfig) -> int:
        """Count the model's vocabulary rows that are not padding.

        The count is the loaded checkpoint's, else --padded-vocab-size; at least the tokenizer's
        number of ids if the vocabulary rows train.
        """
        if (frozen := self.frozen_rows(config.model, config.trained)) is not None:
            return frozen
        rows = unpadded_vocab_size(self.common)
        if rows is None:
            rows = config.padded_vocab_size or 0
        return min(max(rows, config.vocab_size), config.model.vocab_size)

    def frozen_rows(self, model: LlamaConfig, trained: frozenset[str]) -> int | None:
        """Count the loaded model's vocabulary rows if embedding or output layer is frozen.

        Ids without a row can never be learnt then. None if all rows train or nothing was loaded.
        """
        frozen = parameter_shapes(model).keys() - trained
        rows = unpadded_vocab_size(self.common)
        if rows is None or frozen.isdisjoint(BY_VOCABULARY):
            return None
        return min(rows, model.vocab_size)


FROM_NOTHING = Resumed()


def base_of(config: RunConfig, saved: SavedRun) -> BaseCheckpoint | None:
    """Return the checkpoint that keeps frozen parameters `saved`, so that saves leave them out.

    None unless all frozen parameters are in one folder that this run neither writes nor removes.
    """
    flags = config.checkpoint
    is_part = config.trainable.is_part(config.model)
    if flags.save_frozen or config.save_folder is None or not is_part:
        return None
    named: BaseCheckpoint | None = saved.common.get("base")
    if named is None:
        return None if flags.saves_where_it_loads else as_base(saved.manifest)
    if not stored_parameters(saved.manifest.directory) <= config.trained:
        return None
    folder = named["folder"] if flags.base is None else str(path_of(flags.base).resolve())
    return BaseCheckpoint(folder=folder, iteration=named["iteration"], checksum=named["checksum"])
