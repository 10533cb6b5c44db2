"""Saves a run, now or in the background, and resumes one from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from data.hub import how_to_fetch
from data.loader import Datasets
from data.tokenizer_config import unpadded_vocab_size
from paro.checkpoint.agreement import with_claim
from paro.checkpoint.background import Background, HostCopy
from paro.checkpoint.boxes import boxed_states
from paro.checkpoint.claim import Claim
from paro.checkpoint.config import FREE_FIELDS, CheckpointConfig
from paro.checkpoint.directory import (
    newest_good,
    next_earlier,
    read_common,
    retire_checkpoint,
    set_aside,
)
from paro.checkpoint.lease import LeaseLostError
from paro.config.record import recorded_arguments
from paro.config.run import RunConfig
from paro.config.train import TrainConfig
from paro.distributed.control import Control
from paro.errors import RunError, StorageError, UserError, reading
from paro.optim.finite import not_finite
from paro.optim.loss_scale import start_loss_scale
from paro.optim.states import PARAM
from paro.quantities import count_text
from paro.report.log import Log
from paro.report.progress import ProgressFile
from paro.training.changed_flags import order_changes, schedule_change
from paro.training.resumed import FROM_NOTHING, Resumed, base_of
from paro.training.step import Training, TrainState
from paro.untrusted.schema import conform


class Saver:
    """Saves a run under --save, synchronously or in the background; every method is collective.

    Saves use their own process groups: with --async-save a thread issues collectives on them
    while the training thread uses the others.
    """

    def __init__(
        self,
        config: RunConfig,
        training: Training,
        log: Log,
        claim: Claim,
        *,
        progress: ProgressFile | None = None,
        order: Mapping[str, Any] | None = None,
        resumed: Resumed = FROM_NOTHING,
    ) -> None:
        # Imported here, and not when the first save stops training: DCP takes half a second.
        from paro.checkpoint.save import write_states

        assert config.checkpoint.save is not None, "nowhere to save"
        self._config = config
        self._training = training
        self._log = log
        self._progress = progress
        self._order = order
        self._resumed = resumed
        self._root = Path(config.checkpoint.save)
        self._background = Background()
        self._copy = HostCopy()
        self._write_states = write_states
        self._under_way: int | None = None
        # The newest iteration that is complete on every node.
        self._whole = resumed.saved_iteration(config)
        control = training.control
        self._ranks = with_claim(claim, control, config.runtime.timeout)
        if len(claim.folders) > 1:
            log.log0(
                f"--save {self._root} is another folder on {len(claim.folders)} sets of ranks: "
                "each saves what its ranks hold"
            )
        if config.checkpoint.start_over:
            self._set_aside()

    @property
    def failed(self) -> bool:
        """Whether a save in progress failed and --on-save-failure is stop, or the lease is lost."""
        lease = self._ranks.lease
        if lease is not None and lease.is_lost:
            return True
        return self._background.failed and self._config.checkpoint.on_save_failure == "stop"

    @property
    def under_way(self) -> bool:
        """Whether this rank's save thread is still writing."""
        return self._background.is_running

    def _set_aside(self) -> None:
        """Moves another run's checkpoints in --save aside, under the same name on every node."""
        number = max(self._ranks.everyone.gather(next_earlier(self._root)))

        def move() -> Path | None:
            self._ranks.check_lease()
            return set_aside(self._root, number)

        earlier = self._ranks.first_decides(move, f"--save {self._root}")
        if earlier is not None:
            self._log.log0(f"--start-over: what --save {self._root} held is in {earlier} now")

    def save(self, state: TrainState) -> bool:
        """Saves the run, or starts an async save; False if it failed and training continues."""
        if not self.settle():
            self._log.log0(f"trying again at iteration {state.iteration}")
        config, training = self._config, self._training
        self._refuse_not_finite(state)
        shards = training.optimizer.flat_shards(frozen=self._resumed.base is None)
        if config.checkpoint.no_save_optim:
            shards = (shard for shard in shards if shard.state == PARAM)
        states = boxed_states(shards, writers=self._ranks.near_ranks)
        if config.checkpoint.async_save:
            states = self._copy.take(states)
        write = partial(
            self._write_states,
            self._root,
            state.iteration,
            states,
            common_record(config, training, state, order=self._order, resumed=self._resumed),
            ranks=self._ranks,
            log=self._log.log0,
        )
        self._under_way = state.iteration
        job = partial(self._retire_and_write, self._proved_good(state), write)
        if config.checkpoint.async_save:
            self._note(state, is_async=True)
            self._background.start(partial(self._finish, job, state.iteration))
            return True
        try:
            job()
        except (UserError, StorageError) as error:  # raised on all ranks
            return self._give_up(error)
        self._whole = state.iteration
        self._note(state, is_async=False)
        return True

    def settle(self) -> bool:
        """Waits for an async save in progress; False if it failed and training continues.

        Raises `LeaseLostError` on all ranks if the folder is another run's by now.
        """
        is_async = self._background.is_started
        failure = self._background.wait()
        if failure is not None and not isinstance(failure, (UserError, StorageError)):
            raise failure
        with self._ranks.raise_on_all_ranks(name_rank=False), suppress(OSError):
            self._ranks.check_lease()  # a folder that is gone is the next save's to report
        if failure is None:
            self._whole = self._under_way if is_async else self._whole
            return True
        return self._give_up(failure)

    def way_back(self, state: TrainState) -> str:
        """Says how to load the last good iteration that was saved; collective."""
        self._background.wait()  # a failed save matters no more: what is on disk is named
        fine = state.iteration - state.expected.skipped_in_a_row
        good = self._ranks.first_decides(
            lambda: newest_good(self._root, last_fine=fine), f"--save {self._root}"
        )
        if good is None:
            return f"no good iteration is saved in {self._root}"
        return (
            f"the last good iteration that is saved is {good}: continue with "
            f"--load {self._root} --ckpt-step {good}"
        )

    def _proved_good(self, state: TrainState) -> int | None:
        """The last whole checkpoint, if training went on from it; None if it may be what is wrong.

        While steps are skipped nothing proves that what was saved before the first of them is good.
        """
        went_on = self._whole is not None and self._whole < state.iteration
        return self._whole if went_on and not state.expected.skipped_in_a_row else None

    def _retire_and_write(self, good: int | None, write: Callable[[], None]) -> None:
        """Writes a checkpoint, after the one before the last `good` one was removed."""
        interval = self._config.checkpoint.save_retain_interval
        if interval is not None and good is not None and self._ranks.is_first_near:
            # What could not be removed is no reason to stop; a lost lease ends the write below.
            with suppress(OSError, UserError, LeaseLostError):
                self._ranks.check_lease()
                retire_checkpoint(self._root, before=good, interval=interval)
        write()

    def _refuse_not_finite(self, state: TrainState) -> None:
        """Raises `RunError` on all ranks rather than save a state from which nothing can go on."""
        wrong = not_finite(self._training.optimizer.flat_shards(), self._training.control)
        if wrong is not None:
            raise RunError(
                f"iteration {state.iteration} is not saved: {wrong} is not finite; "
                f"{self.way_back(state)}"
            )

    def _note(self, state: TrainState, *, is_async: bool) -> None:
        if self._progress is not None:
            samples = state.consumed_train_samples
            self._progress.saved(state.iteration, samples, is_async=is_async)

    def _finish(self, write: Callable[[], None], iteration: int) -> None:
        """Runs on the save thread."""
        write()
        if self._progress is not None:
            self._progress.finished(iteration)

    def _give_up(self, error: UserError | StorageError) -> bool:
        message = f"iteration {self._under_way} is not saved: {error}"
        is_lost = isinstance(error, LeaseLostError)
        if is_lost or self._config.checkpoint.on_save_failure == "stop":
            raise type(error)(message) from error
        self._log.log0(f"{message}; training continues (--on-save-failure continue)")
        return False


def common_record(
    config: RunConfig,
    training: Training,
    state: TrainState,
    *,
    order: Mapping[str, Any] | None,
    resumed: Resumed,
) -> dict[str, Any]:
    """What a checkpoint holds besides tensors, as JSON."""
    lora = config.model.lora
    return {
        "model": _model_fields(config),
        "max_position_embeddings": config.model.max_position_embeddings,
        "init_method_std": config.model.init_method_std,
        "tokenizer": asdict(config.tokenizer),
        "vocab_size": config.vocab_size,
        "unpadded_vocab_size": resumed.unpadded_rows(config),
        "state": asdict(state),
        "schedule": asdict(config.schedule),
        "dynamic_loss_scale": config.loss_scale.dynamic,
        "global_batch_size": config.batches.global_batch_size,
        "order": order,
        "num_optimizer_steps": training.optimizer.num_steps,
        "has_moments": not config.checkpoint.no_save_optim,
        "strategy": config.strategy.name,
        "world_size": training.control.world.size,
        "trainable": str(config.trainable) if lora is None else "adapters",
        "lora": None if lora is None else asdict(lora),
        "base": resumed.base,
        "token_ids": resumed.token_ids or {},
        "arguments": recorded_arguments(config),
    }


def check_source(checkpoint: CheckpointConfig, train: TrainConfig, control: Control) -> None:
    """Raises `UserError` if no rank finds the folder of --load; collective.

    A folder that is also --save may be missing: it is created by the first save.
    """
    if checkpoint.load is None or (checkpoint.continues and not train.skip_train):
        return
    with control.raise_on_all_ranks(), reading(f"--load {checkpoint.load}"):
        exists = Path(checkpoint.load).exists()
    with control.raise_on_all_ranks():
        if not any(control.gather(exists)):
            raise UserError(
                f"--load {checkpoint.load} does not exist: give a folder of checkpoints, or leave "
                f"--load out to begin with random weights{how_to_fetch(checkpoint.load)}"
            )


def load_run(config: RunConfig, training: Training, log: Log) -> Resumed:
    """Fills the run from --load; `FROM_NOTHING` itself if there is no checkpoint."""
    # Imported here because DCP takes half a second.
    from paro.checkpoint.load import Loading, load_checkpoint

    flags = config.checkpoint
    assert flags.load is not None, "nothing to load"
    moments = not (flags.finetune or flags.no_load_optim)
    common = load_checkpoint(
        flags.load,
        training.optimizer.flat_shards(),
        training.control,
        wanted=Loading(
            iteration=flags.ckpt_step,
            moments=moments,
            model=_model_fields(config),
            base=flags.base,
            lora=config.model.lora,
            as_sent=config.train.skip_train,
        ),
        log=log.log0,
    )
    if common is None:
        log.log0(f"--load {flags.load} holds no checkpoint: starting afresh")
        return FROM_NOTHING
    wrong = not_finite(training.optimizer.flat_shards(), training.control)
    if wrong is not None:
        raise UserError(
            f"--load {flags.load}: in iteration {common['iteration']} {wrong} is not finite: give "
            "an earlier one with --ckpt-step"
        )
    begins = config.model.lora is not None and common.get("lora") is None
    num_steps = common.get("num_optimizer_steps", 0) if moments and not begins else 0
    with training.traffic.paused():
        training.optimizer.loaded(num_steps=num_steps)
    training.exposure.take()  # waits while loading belong to no step
    with training.control.raise_on_all_ranks():
        base = base_of(config, common)
    if None in training.control.gather(base):
        base = None
    if base is not None:
        log.log0(
            f"checkpoints hold what trains; the rest is in {base['folder']}, iteration "
            f"{base['iteration']}, which they name as their base"
        )
    state = None
    if common.get("parameters_only"):
        log.log0(f"--load {flags.load} is a converted model: training begins with it")
    elif begins:
        log.log0(f"--load {flags.load} has no adapters: training begins with new ones on it")
    elif flags.finetune:
        log.log0(f"--finetune: training begins with the parameters of --load {flags.load}")
    else:
        state = _state_of_load(common, config, log)
    rows = unpadded_vocab_size(common)
    return Resumed(state, base, token_ids=common.get("token_ids"), unpadded_vocab_size=rows)


def tell_order(config: RunConfig, loaded: TrainState, datasets: Datasets, log: Log) -> None:
    """Logs which flags changed the order of training samples since the checkpoint was saved."""
    assert config.checkpoint.load is not None, "nothing was loaded"
    common = read_common(config.checkpoint.load, loaded.iteration)
    assert common is not None, "nothing was loaded"
    for line in order_changes(common, config, datasets):
        log.log0(line)


def state_of(common: Mapping[str, Any], config: RunConfig, log: Log, source: str) -> TrainState:
    """The state to continue from, whose `source` is named in lines about what changed."""
    saved: TrainState = conform(common.get("state"), TrainState, f"{source}: state in common.json")
    if not (config.loss_scale.dynamic and common.get("dynamic_loss_scale", True)):
        saved = replace(saved, loss_scale=start_loss_scale(config.loss_scale))
    before, now = common.get("world_size"), config.given["world_size"]
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
    return saved


def _state_of_load(common: Mapping[str, Any], config: RunConfig, log: Log) -> TrainState:
    """The same for --load; with --no-load-optim the schedule and the loss scale begin anew."""
    source = f"--load {config.checkpoint.load}"
    state = state_of(common, config, log, source)
    if config.checkpoint.no_load_optim:
        return replace(state, loss_scale=start_loss_scale(config.loss_scale), scheduled_samples=0)
    check_schedule(common, config, source)
    return state


def check_schedule(common: Mapping[str, Any], config: RunConfig, source: str) -> None:
    """Raises `UserError` for a changed schedule, unless a flag says which one to use."""
    change = schedule_change(common, config)
    if change is not None and not config.checkpoint.override_opt_param_scheduler:
        raise UserError(
            f"{source}: the schedule changed: {change}: give --override-opt_param-scheduler to "
            "take the flags', or "
            "--use-checkpoint-opt_param-scheduler to keep the checkpoint's"
        )


def _model_fields(config: RunConfig) -> dict[str, Any]:
    fields = asdict(config.model)
    return {name: fields[name] for name in fields if name not in FREE_FIELDS}
