"""When the loop evaluates, saves and exits; ramp-up and evaluation do not change the curve."""

from __future__ import annotations

import errno
import math
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from paro.errors import RunError
from paro.optim.optimizer import ParoOptimizer
from paro.report.log import Log
from paro.report.record import IterationRecord
from paro.report.report import open_report
from paro.report.watchdog import Observer
from paro.training.assembly import build_data, build_sources, run_facts
from paro.training.evaluation import evaluate
from paro.training.in_memory import InMemoryCheckpointer
from paro.training.loop import Loop
from paro.training.saving import Saver
from paro.training.step import TrainState
from tests.helpers.margins import assert_near
from tests.helpers.refusals import refused
from tests.helpers.streams import Failing
from tests.helpers.training import TINY, built


@dataclass
class Finished:
    """A finished loop and its events."""

    state: TrainState
    records: list[IterationRecord]
    evaluated: list[tuple[int, str | None]]
    losses: list[float]  # of the evaluations; NaN: there is none
    bits: list[float | None]  # per byte, of the same
    saved: list[int]


def run_loop(
    flags: str,
    *,
    save_interval: int | None = None,
    base: str = TINY,
    observers: Sequence[Observer] = (),
    snapshots: InMemoryCheckpointer | None = None,
    saved: dict[int, None] | None = None,
) -> Finished:
    """A finished loop, of which `saved` gets the iterations that are saved, also if it fails."""
    config, training = built(f"{base} --log-interval 1 {flags}")
    state = TrainState.at_start(config.loss_scale)
    report = open_report(
        config.report,
        run_facts(config, training),
        Log(),
        device=training.device,
        start_iteration=0,
        arguments={},
    )
    saved = {} if saved is None else saved
    saving = mock.Mock(spec=Saver, failed=False)
    saving.is_due = lambda at: save_interval is not None and at % save_interval == 0
    saving.save = saving.finish = lambda state: saved.setdefault(state.iteration)
    with (
        mock.patch.object(report, "iteration", wraps=report.iteration) as iterations,
        mock.patch.object(report, "validation", wraps=report.validation) as validations,
    ):
        Loop(
            training,
            state,
            build_sources(config, build_data(config), training, state),
            report,
            saving=saving,
            observers=observers,
            snapshots=snapshots,
        ).run()
    found = [call.args[0] for call in validations.call_args_list]
    return Finished(
        state,
        records=[call.args[0] for call in iterations.call_args_list],
        evaluated=[(each.iteration, each.data_set) for each in found],
        losses=[math.nan if each.lm_loss is None else each.lm_loss for each in found],
        bits=[each.bits_per_byte for each in found],
        saved=[*saved],
    )


def test_evaluates_and_saves_at_intervals_and_at_the_end() -> None:
    run = run_loop("--train-iters 7 --eval-interval 3 --eval-iters 2", save_interval=2)
    assert run.evaluated == [(3, None), (6, None), (7, "validation"), (7, "test")]
    assert run.saved == [2, 4, 6, 7]
    # A resumed run continues after the samples evaluated during training; none follow the end.
    assert run.state.consumed_valid_samples == 2 * 2


def test_no_local_copy_is_under_way_in_an_evaluation() -> None:
    """An evaluation may put averages in the place of masters, also at the end."""
    under_way: list[TrainState] = []
    copies = mock.Mock(start=under_way.append, wait=under_way.clear)

    def checked(*args: Any) -> object:
        assert not under_way
        return evaluate(*args)

    with mock.patch("paro.training.loop.evaluate", checked):
        run_loop("--train-iters 2 --eval-interval 1 --eval-iters 1", snapshots=copies)
    assert copies.discard.called


@pytest.mark.slow("trains and evaluates several times")
def test_evaluations_have_batches_of_their_own() -> None:
    base = TINY.replace("--micro-batch-size 1 ", "")
    plan = "--micro-batch-size 1 --train-iters 4 --eval-interval 2 --eval-iters 3"
    of_six = [
        run_loop(f"{plan} {words} --eval-global-batch-size 6", base=base)
        for words in (
            "--global-batch-size 2",
            "--global-batch-size 2 --eval-micro-batch-size 3",
            "--rampup-batch-size 1 1 2 --global-batch-size 2",
            "--step-batch-size-schedule 0:1,20:2",
        )
    ]
    # The same 18 samples at both evaluations and at the end, for any micro-batch size.
    for run in of_six:
        assert run.state.consumed_valid_samples == 2 * 3 * 6
        assert [at for at, _ in run.evaluated] == [2, 4, 4, 4]
    assert_near(of_six[1].losses, of_six[0].losses, 1e-6, "larger micro-batches")
    of_two = run_loop(f"{plan} --global-batch-size 2", base=base)
    assert of_two.state.consumed_valid_samples == 2 * 3 * 2
    assert of_two.losses != of_six[0].losses
    without = run_loop("--global-batch-size 2 --train-iters 4 --eval-iters 0")
    assert without.evaluated == []
    curves = [[r.lm_loss for r in run.records] for run in (without, of_two, of_six[0])]
    assert curves[0] == curves[1] == curves[2], "evaluations change no training"


def test_leaves_when_its_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    run = run_loop("--train-iters 1000000 --exit-duration-in-mins 0.005 --eval-iters 0")
    assert 1 <= run.state.iteration < 1000000
    assert run.saved == [run.state.iteration]
    assert "[exiting program after 0.005 minutes] datetime" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGHUP"])
def test_a_signal_ends_the_step_in_which_it_comes(name: str) -> None:
    number = signal.Signals[name]

    @dataclass
    class Signals(Observer):
        """Sends the exit signal in the second micro-batch of the third step."""

        heard: list[tuple[str, int]] = field(default_factory=list)

        def begins(self, what: str, iteration: int) -> None:
            self.heard.append((what, iteration))

        def progressed(self) -> None:
            self.heard.append(self.heard[-1])
            if self.heard.count(("training", 2)) == 3:
                signal.raise_signal(number)

    before, signals = signal.signal(number, signal.SIG_DFL), Signals()
    flags = "--train-iters 9 --global-batch-size 8 --micro-batch-size 2 --eval-iters 0"
    leaving = "--exit-signal-handler --exit-signal SIGUSR1"
    run = run_loop(f"{flags} {leaving}", observers=[signals])
    signal.signal(number, before)
    assert run.saved == [run.state.iteration] == [3]
    assert signals.heard.count(("training", 1)) == 1 + 4


def test_under_nohup_a_closed_terminal_does_not_end_a_run() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run_loop("--train-iters 1 --eval-iters 0 --exit-signal-handler")
    assert signal.signal(signal.SIGHUP, before) is signal.SIG_IGN


def test_a_standard_output_that_nobody_reads_costs_no_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Failing(errno.EPIPE))
    monkeypatch.setattr(sys, "stderr", Failing(errno.EPIPE))
    run = run_loop("--train-iters 3 --eval-interval 2 --eval-iters 1", save_interval=2)
    sys.stdout.close()  # which stands for it
    assert run.saved == [2, 3]


def test_evaluation_goes_on_micro_batch_by_micro_batch() -> None:
    class Counts(Observer):
        num = 0

        def progressed(self) -> None:
            self.num += 1

    counts = Counts()
    flags = "--train-iters 9 --global-batch-size 8 --micro-batch-size 2 --eval-iters 3 --skip-train"
    run_loop(flags, observers=[counts])
    assert counts.num == 2 * 3 * 4  # of validation and test


def spoil(monkeypatch: pytest.MonkeyPatch, iterations: range, value: float) -> None:
    """Replaces the gradient norm of some iterations."""
    square_sum, calls = ParoOptimizer.local_square_sum, iter(range(1, 1000))

    def spoiled(self: ParoOptimizer) -> Tensor:
        found = square_sum(self)
        return torch.full_like(found, value) if next(calls) in iterations else found

    monkeypatch.setattr(ParoOptimizer, "local_square_sum", spoiled)


def test_steps_that_are_not_finite_are_skipped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, range(2, 4), math.nan)
    run = run_loop("--train-iters 5 --eval-iters 0 --exit-after-skipped-iterations 3")
    assert [record.skipped for record in run.records] == [False, True, True, False, False]
    assert run.state.expected.skipped_in_a_row == 0
    assert run.state.scheduled_samples == 3


def test_a_loss_that_is_not_finite_stops_the_run_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil(monkeypatch, range(3, 100), math.nan)
    words = "--train-iters 9 --eval-iters 0 --check-for-nan-in-loss-and-grad"
    refused(lambda: run_loop(words), "iteration 3 has a loss or gradient", status=1)


def test_replicas_are_compared_before_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def compare(_: object, *, iteration: int) -> None:
        compared.append(iteration)
        if iteration == 6:
            raise RunError("a replica differs")

    monkeypatch.setattr("paro.training.loop.check_replicas", compare)
    saved: dict[int, None] = {}
    flags = "--train-iters 9 --eval-iters 0 --check-weight-hash-across-dp-replicas-interval 2"
    with pytest.raises(RunError):
        run_loop(flags, save_interval=3, saved=saved)
    assert compared == [2, 4, 6]
    assert [*saved] == [3], "the save of iteration 6 comes after"


def test_a_leap_is_skipped_and_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paro.schedule.step_checks._WARMUP_STEPS", 3)
    spoil(monkeypatch, range(6, 7), 1e9)
    run = run_loop("--train-iters 7 --eval-iters 0 --check-for-large-grads")
    assert [record.iteration for record in run.records if record.skipped] == [6]
    printed = capsys.readouterr().out
    assert " iteration 6 is skipped: large gradients | lm loss: " in printed
