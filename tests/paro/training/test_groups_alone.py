"""Groups that train alone, continued: as they were, or from the parameters they agreed on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from data.batch import Batch
from paro.config.run import RunConfig
from paro.report.log import Log
from paro.spec.states import PARAM
from paro.training.assembly import build_data, build_sources
from paro.training.evaluation import evaluate
from paro.training.exit_signal import Reasons
from paro.training.groups_alone import GroupsAlone
from paro.training.replicas import check_replicas
from paro.training.resume import load_run
from paro.training.step import Training, TrainState, train_step
from tests.helpers.ranks import run_ranks
from tests.helpers.training import begun, built, save_run, whole_states
from tests.paro.optim.test_outer import FLAGS, PLAIN, States, states_of, train_group

SAVED, STEPS = 5, 8


def _source_of(config: RunConfig, training: Training, state: TrainState) -> Iterator[Batch]:
    return build_sources(config, build_data(config, state), training, state).train


def interrupt(cases: Sequence[str], folder: str) -> list[tuple[States, States]]:
    """States of runs without an interruption, and of runs continued from a save after 5 steps.

    Neither the save nor an evaluation after it changes what the interrupted run does.
    """
    results = []
    for index, flags in enumerate(cases):
        saved = f"{flags} --save {folder}/{index} --load {folder}/{index}"
        whole, _ = train_group(flags)
        config, training = built(saved)
        state, source = begun(config, training)
        for _ in range(SAVED):
            train_step(training, state, source)
        save_run(config, training, state=state)
        evaluate(training, _source_of(config, training, state), 1)
        for _ in range(STEPS - SAVED):
            train_step(training, state, source)
        after = states_of(training)
        training.close()
        assert all(torch.equal(whole[name], after[name]) for name in whole), f"{flags}: a save"
        config, training = built(saved)
        resumed = load_run(config, training, Log(rank=0, world_size=1))
        assert resumed.state is not None
        source = _source_of(config, training, resumed.state)
        for _ in range(STEPS - SAVED):
            train_step(training, resumed.state, source)
        results.append((whole, states_of(training)))
        training.close()
    return results


@pytest.mark.ranks
def test_a_resumed_run_equals_one_that_was_not_interrupted(tmp_path: Path) -> None:
    """Also between the begin and the end of a round, and in the warm-up."""
    cases = [
        f"{FLAGS} --num-layers 2 --paro-group-size 2 --train-iters {STEPS} {more}"
        for more in (
            "--paro-strategy NNI --paro-outer-steps 4 --paro-outer-delay 2 --paro-outer-warmup 0",
            "--paro-strategy III --paro-outer-steps 3 --paro-outer-fragments 2 "
            "--paro-outer-warmup 2 --paro-outer-bits 4",
            "--paro-strategy INI --bf16 --paro-outer-steps 2 --paro-outer-warmup 6 "
            "--paro-outer-bits 16",
        )
    ]
    results, *_ = run_ranks(interrupt, 4, cases, str(tmp_path))
    for flags, (whole, resumed) in zip(cases, results, strict=True):
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(whole[name], resumed[name]) for name in whole), flags


def continue_otherwise(cases: Sequence[tuple[str, str]], folder: str) -> list[tuple[float, float]]:
    """Norms of the parameters at a save after 5 steps, and 5 steps after it with other flags."""
    starts: dict[str, tuple[str, float]] = {}  # by the flags before: the folder and the norm
    norms = []
    for before, after in cases:
        if before not in starts:
            starts[before] = (f"{folder}/{len(starts)}", 0.0)
            config, training = built(f"{before} --save {starts[before][0]}")
            state, source = begun(config, training)
            for _ in range(SAVED):
                train_step(training, state, source)
            save_run(config, training, state=state)
            starts[before] = (starts[before][0], _norm(training))
            training.close()
        saved, start = starts[before]
        config, training = built(f"{after} --load {saved}")
        loaded = load_run(config, training, Log(rank=0, world_size=1)).state
        state = loaded or TrainState.at_start(config.loss_scale)
        source = _source_of(config, training, state)
        for _ in range(5):
            train_step(training, state, source)
            check_replicas(training, iteration=state.iteration)
        norms.append((start, _norm(training)))
        training.close()
    return norms


def _norm(training: Training) -> float:
    """The norm of the parameters that all groups agree on."""
    if training.optimizer.outer is not None:
        training.optimizer.outer.wait()
    states = whole_states(training, replicas=True)
    return math.hypot(*(float(states[n].norm()) for n in states if n.startswith(f"{PARAM}.")))


@pytest.mark.ranks
def test_runs_with_other_settings_continue_from_the_parameters_that_groups_agreed_on(
    tmp_path: Path,
) -> None:
    """Replicas are compared after each step, also while a round is in flight."""
    base = (
        f"{PLAIN} --num-layers 2 --paro-group-size 2 --paro-strategy III "
        "--override-opt_param-scheduler"
    )
    outer = f"{base} --paro-outer-steps 4 --paro-outer-warmup 0"
    cases = [
        (base, f"{outer} --paro-outer-delay 2"),
        (f"{outer} --paro-outer-delay 2", outer),
        (f"{outer} --paro-outer-delay 2", f"{outer} --paro-outer-delay 2 --no-load-optim"),
        (f"{outer} --paro-outer-delay 2", f"{outer} --paro-outer-delay 2 --finetune"),
        (f"{outer} --paro-outer-delay 2", base),
    ]
    norms, *_ = run_ranks(continue_otherwise, 4, cases, str(tmp_path))
    for (_, after), (start, end) in zip(cases, norms, strict=True):
        assert end < 1.1 * start, f"{after}: {start} to {end}"


@pytest.mark.parametrize("name", ["signalled", "late", "unsaved"])
def test_all_groups_stop_for_the_reason_that_one_of_them_has(name: str) -> None:
    training = Mock()
    training.control.gather = lambda own: [own, Reasons(**{name: True})]
    groups = GroupsAlone(training)
    agreed = Reasons(stop_after=7)
    assert groups.reasons_of_all(agreed, 6) == Reasons()
    assert groups.reasons_of_all(agreed, 7) == agreed._replace(**{name: True})
