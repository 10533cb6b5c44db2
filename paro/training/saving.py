"""Saves a run under --save, now or in the background."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from typing import TYPE_CHECKING

from paro.checkpoint.agreement import LockedFolders, ranks_that_save
from paro.checkpoint.background import Background, HostCopy
from paro.checkpoint.chunks import chunked_states
from paro.checkpoint.directory import newest_good, retire_checkpoint, set_aside
from paro.checkpoint.folder_lock import LockLostError
from paro.distributed.world import read_job_id
from paro.errors import RunError, StorageError, UserError
from paro.files.object_store import path_of, store_timeout
from paro.files.waits import LimitedWait
from paro.report.earlier import next_number
from paro.report.log import Log
from paro.report.record import RunFacts
from paro.report.run_files import ProgressFile
from paro.spec.states import EMA, PARAM
from paro.training.groups_alone import record_of_groups, wrong_state
from paro.training.resume import FROM_NOTHING, Resumed, common_record
from paro.training.step import Training, TrainState

if TYPE_CHECKING:
    from paro.config.run import RunConfig


@dataclass(eq=False)
class Saver:
    """The checkpoint writer of a run under --save, synchronous or in the background.

    Every method but `is_due` and `failed` is collective.

    Saves have their own process groups: with --async-save the save thread issues collectives on
    these groups while the training thread uses the run's groups. `facts` go to progress.txt.
    """

    config: RunConfig
    training: Training
    log: Log
    locked: InitVar[LockedFolders]
    _: KW_ONLY
    facts: RunFacts | None = None
    resumed: Resumed = FROM_NOTHING

    def __post_init__(self, locked: LockedFolders) -> None:
        # Imported here, since torch.distributed.checkpoint would delay the first save by 0.5 s.
        from paro.checkpoint.save import write_states

        config, log, resumed = self.config, self.log, self.resumed
        assert config.checkpoint.save is not None, "nowhere to save"
        self._progress: ProgressFile | None = None
        if config.report.log_progress and self.facts is not None:
            start = 0 if resumed.state is None else resumed.state.consumed_train_samples
            folder, job = config.checkpoint.save, read_job_id()
            self._progress = ProgressFile(folder, self.facts, log, start_samples=start, job_id=job)
        self._root = path_of(config.checkpoint.save)
        self.background = Background()
        self._copy = HostCopy()
        # The iteration of the last save, which may be in progress (None: it failed); and the newest
        # iteration whose checkpoint is complete on every node.
        # A state that was loaded from --save need not be saved again.
        is_saved = config.checkpoint.continues and resumed.recovery is None
        loaded = resumed.state if is_saved else None
        self._saved = self._whole = None if loaded is None else loaded.iteration
        self._ranks = ranks_that_save(locked, self.training.control, config.runtime.timeout)
        self._write_states = partial(write_states, self._root, ranks=self._ranks, log=log.log0)
        if len(locked.folders) > 1:
            log.log0(
                f"--save {self._root} is another folder on {len(locked.folders)} sets of ranks: "
                "each saves what its ranks hold"
            )
        if config.checkpoint.start_over:  # under the same name on every node
            number = max(self._ranks.everyone.gather(next_number(self._root)))
            move = partial(set_aside, self._root, number, self._ranks.check_lock)
            if (earlier := self._ranks.first_decides(move, f"--save {self._root}")) is not None:
                log.log0(f"--start-over: what --save {self._root} held is in {earlier} now")

    @property
    def failed(self) -> bool:
        """True if a save failed and --on-save-failure is stop, or the folder's lock is lost."""
        lock = self._ranks.lock
        if lock is not None and lock.lost is not None:
            return True
        return self.background.failed and self.config.checkpoint.on_save_failure == "stop"

    def is_due(self, iteration: int) -> bool:
        interval = self.config.checkpoint.save_interval
        return interval is not None and iteration % interval == 0

    def save(self, state: TrainState) -> None:
        """Save the run, in the background with --async-save, unless this iteration is saved."""
        if self._saved == state.iteration:
            return
        if not self.settle():
            self.log.log0(f"trying again at iteration {state.iteration}")
        config, training = self.config, self.training
        training.optimizer.outer.wait()
        # That of a group which trains alone may have NaN: the next round leaves the group out.
        if (wrong := wrong_state(training)) is not None:
            raise RunError(
                f"iteration {state.iteration} is not saved: {wrong} is not finite; "
                f"{self.resume_hint(state)}"
            )
        groups = record_of_groups(training, state)
        shards = training.optimizer.flat_shards(frozen=self.resumed.base is None)
        if config.checkpoint.no_save_optim:
            shards = (shard for shard in shards if shard.state in (PARAM, EMA))
        states = chunked_states(shards, writers=self._ranks.folder_ranks)
        if config.checkpoint.async_save:
            states = self._copy.take(states)
        common = common_record(config, training, self.resumed, state, groups)
        write = partial(self._write_states, state.iteration, states, common)
        self._saved = state.iteration
        # The last complete checkpoint is good if a later step succeeded from its state. While steps
        # are skipped, a checkpoint saved just before them may hold a diverged state.
        went_on = self._whole is not None and self._whole < state.iteration
        good = self._whole if went_on and not state.expected.skipped_in_a_row else None
        job = partial(self._write, good, state.iteration, write)
        is_async = config.checkpoint.async_save
        if not is_async:
            self.background.run(job)
            if not self.settle():
                return
        if self._progress is not None:
            samples = state.consumed_train_samples
            self._progress.saved(state.iteration, samples, is_async=is_async)
        if is_async:
            self.background.start(job)

    def finish(self, state: TrainState) -> None:
        """Save the final state; raise if the save fails, whatever --on-save-failure says."""
        self.settle()
        self.save(state)
        self.settle()
        if self._saved != state.iteration:
            raise StorageError(f"the run ends unsaved at iteration {state.iteration}")

    def settle(self) -> bool:
        """Wait for an async save in progress; False if a save failed and training continues.

        Raises `LockLostError` on all ranks if another run has taken the folder's lock.
        """
        failure = self.background.wait()
        if failure is None:
            quietly = suppress(OSError)  # such as a missing folder: the next save reports it
            with self._ranks.raise_on_all_ranks(name_rank=False), quietly, store_timeout(5):
                self._ranks.check_lock()
            return True
        if not isinstance(failure, (UserError, StorageError)):
            raise failure
        message = f"iteration {self._saved} is not saved: {failure}"
        is_lost = isinstance(failure, LockLostError)
        if is_lost or self.config.checkpoint.on_save_failure == "stop":
            raise type(failure)(message) from failure
        self.log.log0(f"{message}; training continues (--on-save-failure continue)")
        self._saved = None
        return False

    def resume_hint(self, state: TrainState) -> str:
        """Say how to load the last good iteration that was saved; collective."""
        self.background.wait()  # ignore a failed save: the hint names what is on disk
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

    def _write(self, good: int | None, iteration: int, write: Callable[[], None]) -> None:
        """Remove the checkpoint before the last `good` checkpoint, then write a new checkpoint.

        With --async-save it runs on the save thread.
        """
        interval = self.config.checkpoint.save_retain_interval
        # Other ranks wait meanwhile, for the limit at most.
        with store_timeout(LimitedWait.limit_seconds / 3):
            if interval is not None and good is not None and self._ranks.is_first_of_folder:
                # A failed removal does not stop the run; a lost lock makes the write below fail.
                with suppress(OSError, UserError, LockLostError):
                    self._ranks.check_lock()
                    retire_checkpoint(self._root, before=good, interval=interval)
            write()
        self._whole = iteration
        if self.config.checkpoint.async_save and self._progress is not None:
            self._progress.finished(iteration)
