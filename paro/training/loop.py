"""The training loop: steps, evaluations, saves and reports, and the reasons to exit early."""

# An iteration is a step (paro/training/step.py), its report and then, if due, an evaluation, a
# snapshot in the node's memory and a checkpoint. The reasons of any rank to exit (a signal, the
# time limit, a failed save) are in the step's all-reduce, so all exit after the same iteration.

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime

from data.loader import Batch
from paro.errors import PeerError, RunError
from paro.optim.finite import not_finite
from paro.report.memory import allocator_bytes
from paro.report.record import IterationRecord, RankTimes, Validation
from paro.report.report import Report
from paro.report.watchdog import Observer
from paro.schedule.step_checks import (
    Expectation,
    StepChecksConfig,
    StepVerdict,
    most_grad_norm,
    most_loss,
    reason_to_stop,
)
from paro.topology import WaitKind
from paro.training.evaluation import evaluate
from paro.training.exit_signal import ExitReasons, ExitSignal
from paro.training.groups_alone import GroupsAlone
from paro.training.in_memory import InMemoryCheckpointer
from paro.training.replicas import check_replicas
from paro.training.saving import Saver
from paro.training.step import StepResult, Training, TrainState, last_iteration, train_step

_STARTED = time.monotonic()  # load time of the script, from which --exit-duration-in-mins counts


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutData:
    """A held-out data set, and the number of micro-batches that an evaluation reads of it."""

    name: str | None = None  # the data set's name in reports if there are several
    batches: Iterator[Batch]  # endless; each evaluation reads on where the last one ended
    num_micro_batches: int | None = None  # micro-batches of the whole set; None: by --eval-iters


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSources:
    """A rank's micro-batches of every split; `valid` and `test` may be empty."""

    train: Iterator[Batch]
    valid: tuple[HeldOutData, ...]
    test: tuple[HeldOutData, ...]


@dataclass(eq=False)
class Loop:
    """The training from `state` to the end of the run, or to the first reason to exit early.

    With --skip-train it only runs the evaluation that ends a run.
    """

    training: Training
    state: TrainState
    sources: BatchSources
    report: Report
    _: KW_ONLY
    saving: Saver | None
    snapshots: InMemoryCheckpointer | None = None
    export: Callable[[], None] | None = None  # writes the folder of --save-hf; collective
    observers: Sequence[Observer] = ()
    start: int = 0  # the iteration after which the furthest of groups that train alone starts

    def __post_init__(self) -> None:
        self._is_first = True
        self._times: list[RankTimes] = []  # this rank's of each step since the last log line
        self._signal = ExitSignal()
        self._states = self.training.optimizer.state_bytes()
        self._groups = GroupsAlone(self.training, self.start)

    def run(self) -> bool:
        """Train, save the final state and evaluate it; return False if the run exited early."""
        config = self.training.config
        if config.skip_train:
            self.report.log.log0("skipping training (--skip-train is on) ...")
            self._evaluate_at_end()
            self._end()
            return True
        self._signal.catch(config)
        if config.manual_gc:
            gc.disable()
            gc.collect()
        self.report.log.log0(f"training ... datetime: {datetime.now()}")
        reason = None
        last = last_iteration(config, self.training.batches, self.state)
        if self.state.iteration >= last:
            flag = "--train-iters" if config.train_samples is None else "--train-samples"
            self.report.log.log0(
                f"the run is complete with iteration {self.state.iteration}: nothing is left to "
                f"train (raise {flag} to train on)"
            )
        while self.state.iteration < last and reason is None:
            result = self._iteration()
            if self.snapshots is not None and self._groups.is_behind(self.state.iteration):
                self.snapshots.start(self.state)
                continue
            every = config.check_weight_hash_across_dp_replicas_interval
            if every is not None and self.state.iteration % every == 0:
                check_replicas(self.training, iteration=self.state.iteration)
            self._evaluate_if_due()
            if self.snapshots is not None:  # after the evaluation, which changes the state
                self.snapshots.start(self.state)
            if self.saving is not None and self.saving.is_due(self.state.iteration):
                self._begin("saving")
                self.training.model.wait_for_updated_params()
                self.saving.save(self.state)
            reason = self._reason_to_leave(result)
        if self.saving is not None:
            self.training.model.wait_for_updated_params()
            self.saving.finish(self.state)
        if self.export is not None and self.state.iteration >= last:
            self._begin("exporting")
            self.export()
        if reason is not None:
            self.report.log.log0(f"[exiting program after {reason}] datetime: {datetime.now()}")
        else:
            self._evaluate_at_end()
        self._end()
        if self.snapshots is not None and (reason is None or self.saving is not None):
            self.snapshots.discard()
        return reason is None

    def _begin(self, what: str) -> None:
        for observer in self.observers:
            observer.begins(what, self.state.iteration)

    def _noted(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield batches unchanged; notify observers of each one, as a step may take minutes."""
        for batch in batches:
            for observer in self.observers:
                observer.progressed()
            yield batch

    def _end(self) -> None:
        for observer in self.observers:
            observer.ends()

    def _iteration(self) -> StepResult:
        self._begin("training")
        training, state = self.training, self.state
        scale, expected = state.loss_scale.scale, state.expected
        batch_size = training.batches.batch_size_at(state.consumed_train_samples)
        begin = time.perf_counter()
        result = train_step(training, state, self._noted(self.sources.train), reasons=self._reasons)
        collect_every = training.config.manual_gc_interval if training.config.manual_gc else 0
        if collect_every > 0 and state.iteration % collect_every == 0:
            gc.collect()
        seconds = time.perf_counter() - begin
        self._add_times(result, seconds)
        due = self.report.is_due(state.iteration) and not self._groups.is_behind(state.iteration)
        record = IterationRecord(
            iteration=state.iteration,
            consumed_samples=state.consumed_train_samples,
            global_batch_size=batch_size,
            lm_loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=training.schedule.lr_at(state.scheduled_samples),
            decoupled_learning_rate=training.schedule.decoupled_lr_at(state.scheduled_samples),
            loss_scale=scale,
            iteration_time_ms=seconds * 1000.0,
            skipped=result.skipped,
            has_tokens=result.verdict not in (StepVerdict.NO_TOKENS, StepVerdict.ASKED),
            intra_bytes=result.sent.intra,
            inter_bytes=result.sent.inter,
            num_zeros=result.num_zeros,
            params_norm=result.params_norm,
            z_loss=result.z_loss,
            data_wait_ms=result.data_wait_seconds * 1000.0,
            exposed=result.exposed,
            held=self._peak_bytes(),
            allocator=allocator_bytes(training.device),
        )
        if self._signal.name is not None:
            self.report.interrupted()
        for each in self._groups.records(record, due=due):
            self.report.iteration(each)
        if result.skipped and result.verdict not in (StepVerdict.OVERFLOW, StepVerdict.NOT_FINITE):
            self.report.log.log_last(_skip_line(record, result.verdict, expected, training.checks))
        if (left_out := self._groups.left_out_line(state.iteration)) is not None:
            self.report.log.log_last(left_out)
        if result.origin is not None:
            self.report.log.log_last(f" iteration {state.iteration} is not finite: {result.origin}")
        if due:
            self._report_ranks(record)
        interval = self.report.config.log_memory_interval
        # Memory is logged after the first iteration, when every buffer has been allocated once.
        if self._is_first or (interval and state.iteration % interval == 0):
            self.report.memory(iteration=state.iteration)
        self._is_first = False
        self._stop_if_wrong(result)
        return result

    def _stop_if_wrong(self, result: StepResult) -> None:
        """End a diverging run without saving, so that it resumes from an earlier, good state.

        Raises `RunError` on all ranks: the verdict is the same on all of them. A group that trains
        alone ends without the others, whose ranks then miss it.
        """
        training, state = self.training, self.state
        reason = reason_to_stop(
            training.checks, state.expected, result.verdict, iteration=state.iteration
        )
        if reason is None:
            return
        control = training.control_of_step(state.iteration - 1)
        finite = control.gather(result.rank_times.loss_is_finite)
        first = training.control.world.rank - control.world.rank
        ranks = [str(first + rank) for rank, is_finite in enumerate(finite) if not is_finite]
        where = f"; the loss is not finite on ranks {', '.join(ranks)}" if ranks else ""
        if self._groups.are_alone(state.iteration):  # the first rank of the group says so
            if self.snapshots is not None:
                self.snapshots.forget()
            text = f"the group of rank {training.control.world.rank}: {reason}{where}"
            if control.world.rank:
                raise PeerError(text)
            error = RunError(f"{text}; nothing is saved")
            error.on_this_rank = True
            raise error
        wrong = not_finite(training.optimizer.flat_shards(), training.control)
        where += "" if wrong is None else f"; {wrong} is not finite"
        back = "nothing is saved: there was no --save"
        if self.saving is not None:
            back = self.saving.resume_hint(state)
        if self.snapshots is not None:
            self.snapshots.discard()  # a restart from these snapshots would diverge again
        raise RunError(f"{reason}{where}; {back}")

    def _peak_bytes(self) -> dict[str, int]:
        """Return the bytes of model states, and the peak bytes of unsharded buffers, by kind."""
        counters = self.training.model.context.counters
        peaks = {
            **self._states,
            "whole-parameters": counters.whole_params.peak_bytes,
            "whole-gradients": counters.whole_grads.peak_bytes,
        }
        slices = counters.slices.peak_bytes  # 0 unless weights rotate
        return peaks | ({"slices-under-way": slices} if slices else {})

    def _add_times(self, result: StepResult, seconds: float) -> None:
        self._times.append(replace(result.rank_times, step=seconds))
        timers = self.training.timers
        timers.add("interval-time", seconds, level=1)
        for kind in WaitKind:
            exposed = getattr(result.rank_times.exposed, kind.value)
            timers.add(f"paro-{kind.value}-exposed", exposed, level=1)

    def _report_ranks(self, record: IterationRecord) -> None:
        """Log times per rank; collective with --timing-log-level above 0 or --log-straggler."""
        config, timers = self.report.config, self.training.timers.take()
        if config.timing_log_level > 0 or config.log_straggler:
            times = sum(self._times, RankTimes())
            everywhere = self.training.control.gather((timers, times))
            self.report.ranks(
                record,
                timers=[timers for timers, _ in everywhere],
                times=[times for _, times in everywhere],
                iterations=len(self._times),
            )
        self._times = []

    def _evaluate_if_due(self) -> None:
        config, state = self.training.config, self.state
        if not config.eval_interval or state.iteration % config.eval_interval != 0:
            return
        if self._evaluate(self.sources.valid, begin=state.consumed_valid_samples):
            state.consumed_valid_samples += self._samples_per_evaluation

    def _evaluate_at_end(self) -> None:
        begin = self.state.consumed_valid_samples
        self._evaluate(self.sources.valid, begin=begin, data_set="validation")
        self._evaluate(self.sources.test, begin=0, data_set="test")

    @property
    def _samples_per_evaluation(self) -> int:
        return self.training.config.eval_iters * self.training.batches.eval_batch

    def _evaluate(
        self, sets: tuple[HeldOutData, ...], *, begin: int, data_set: str | None = None
    ) -> bool:
        """Evaluate every set; return whether a later evaluation continues where this one ended.

        A set that is not read as a whole is read from the sample after the first `begin`.
        """
        training = self.training
        if training.config.eval_iters == 0:
            return False
        if self.snapshots is not None:
            self.snapshots.wait()  # it reads masters, which averages replace meanwhile
        part = f"{begin + 1} to {begin + self._samples_per_evaluation}"
        for held_out in sets:
            self._begin("evaluating")
            number = held_out.num_micro_batches
            if number is None:
                number = training.config.eval_iters * training.batches.num_eval_micro_batches
            evaluation = evaluate(training, self._noted(held_out.batches), number)
            done, samples = self.state.iteration, self.state.consumed_train_samples
            read = part if held_out.num_micro_batches is None else "all"
            name = f"validation-{held_out.name}" if held_out.name else data_set
            nats, bits, ema_loss = evaluation
            self.report.validation(Validation(done, samples, nats, read, bits, name, ema_loss))
        return any(held_out.num_micro_batches is None for held_out in sets)

    def _reasons(self) -> ExitReasons:
        """Return this rank's reasons to exit, once its last snapshot is complete."""
        if self.snapshots is not None:
            with self.training.timers.measure("non-persistent-save"):
                self.snapshots.wait()  # see [Note: snapshots]
        minutes = self.training.config.exit_duration_in_mins
        reasons = ExitReasons(
            signalled=self._signal.name is not None,
            late=minutes is not None and time.monotonic() - _STARTED > minutes * 60.0,
            unsaved=self.saving is not None and self.saving.failed,
        )
        return self._groups.reasons(reasons, self.state.iteration + 1)

    def _reason_to_leave(self, result: StepResult) -> str | None:
        config, iteration = self.training.config, self.state.iteration
        reasons = self._groups.reasons_of_all(result.reasons, iteration)
        if reasons.unsaved:
            assert self.saving is not None, "nothing can have failed"
            self.saving.settle()  # waits for it on all ranks, then logs or raises the failure
        if reasons.signalled:
            return f"receiving {self._signal.name or 'a signal on another rank'}."
        if reasons.late:
            return f"{config.exit_duration_in_mins} minutes"
        if config.exit_interval and iteration % config.exit_interval == 0:
            return f"iteration {iteration}"
        return None


def _skip_line(
    record: IterationRecord, verdict: StepVerdict, expected: Expectation, checks: StepChecksConfig
) -> str:
    """Say why a step is skipped, of which samples; `expected` is from the steps before it."""
    first, last = record.consumed_samples - record.global_batch_size + 1, record.consumed_samples
    line = f" iteration {record.iteration} is skipped: {verdict.value} |"
    if verdict in (StepVerdict.SPIKY_LOSS, StepVerdict.LARGE_GRADS):
        line += (
            f" lm loss: {record.lm_loss:.6E}, usual {expected.loss:.6E}, "
            f"at most {most_loss(checks, expected):.6E} | "
            f"grad norm: {record.grad_norm:.3f}, usual {expected.grad_norm:.3f}, "
            f"at most {most_grad_norm(checks, expected):.3f} |"
        )
    return f"{line} samples: {first} to {last} |"
