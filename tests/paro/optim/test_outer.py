"""Groups that train alone and meet every H steps train as models in turn, in one process, do."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from paro.config.sharding import outer_defaults
from paro.distributed.control import PlannedControl
from paro.distributed.world import World
from paro.optim.outer import OuterUnit
from paro.planning.run_memory import RunMemory
from paro.report.record import IterationRecord
from paro.schedule.movement import MovementStatistics
from paro.spec.outer_steps import OuterConfig
from paro.spec.states import ANCHOR, BEGUN, MASTER_OF_GROUP, MOMENTS, PARAM, of_group
from paro.topology import Sent
from paro.training.assembly import build_training
from paro.training.groups_alone import GroupsAlone
from paro.training.step import Training, train_step
from tests.helpers.ranks import run_ranks
from tests.helpers.refusals import refused
from tests.helpers.training import TINY, begun, built, configured, whole_states
from tests.paro.optim.models_in_turn import train_in_turn
from tests.paro.report.test_report import record

STEPS = 10
PLAIN = f"{TINY} --num-layers 2 --adam-eps 1e-4 --clip-grad 0.5 --train-iters {STEPS}"
FLAGS = f"{PLAIN} --paro-outer-bits 32"
MUON = "--optimizer muon --muon-fp32-matmul-prec highest"
INSIDE = ("NNN", "NNI", "NII", "INI", "III")  # strategies whose states stay inside a group
States = dict[str, Tensor]


def train_in_groups(cases: Sequence[str]) -> list[tuple[States, list[Sent]]]:
    """The states after each of several runs, replicas compared, and bytes of steps on this rank."""
    return [train_group(flags) for flags in cases]


def train_group(flags: str) -> tuple[States, list[Sent]]:
    config, training = built(flags)
    state, source = begun(config, training)
    sent = [train_step(training, state, source).sent for _ in range(config.train.train_iters)]
    states = states_of(training)
    training.close()
    return states, sent


def states_of(training: Training) -> States:
    """All states, those of every group included, once the messages in flight have arrived."""
    training.optimizer.outer.wait()
    return whole_states(training, replicas=True)


def masters_of(states: States, group: int) -> States:
    prefix = f"{of_group(MASTER_OF_GROUP, group)}."
    return {name.removeprefix(prefix): states[name] for name in states if name.startswith(prefix)}


CASES = (  # flags of the inner optimizer, flags of outer steps
    (
        "",
        "--paro-outer-steps 4 --paro-outer-lr 0.5 --no-paro-outer-nesterov --paro-outer-warmup 0",
    ),
    ("", "--paro-outer-steps 3 --paro-outer-delay 2 --paro-outer-warmup 2"),
    (
        "",
        "--paro-outer-steps 4 --paro-outer-fragments 2 --paro-outer-delay 1 --paro-outer-warmup 1",
    ),
    (MUON, "--paro-outer-steps 4 --paro-outer-warmup 0"),
)
LONG = f"--train-iters {4 * STEPS} --paro-outer-warmup 0 --paro-outer-steps"
LONG_CASES = (
    ("", f"{LONG} 10"),
    ("", f"{LONG} 10 --paro-outer-delay 2"),
    ("", f"{LONG} 10 --paro-outer-fragments 4 --paro-outer-delay 1"),
    ("", f"{LONG} 5 --paro-outer-fragments 4"),
    ("", f"{LONG} 4 --paro-outer-fragments 2"),
    (MUON, f"{LONG} 4 --paro-outer-delay 2"),
)


def compare(cases: Sequence[tuple[str, str, float]], world: int, group: int, batch: int) -> None:
    """Compares runs by their flags with models by flags of one process, and what is allowed."""
    shape = f"--global-batch-size {batch} --paro-group-size {group}"
    flags = [f"{FLAGS} {run} {shape}" for run, _, _ in cases]
    results, *_ = run_ranks(train_in_groups, world, flags)
    for run, (_, alone, allowed), (states, _) in zip(flags, cases, results, strict=True):
        config = configured(run, World(size=world))
        plain = f"{PLAIN} {alone} --train-iters {config.train.train_iters}"
        expected = train_in_turn(plain, batch, world, group, config.sharding.outer)
        for index, masters in enumerate(expected):
            trained = masters_of(states, index)
            assert trained.keys() == config.trained
            for key, values in trained.items():
                difference = float((values - masters[key]).abs().max())
                assert difference < allowed, f"{run}, group {index}: {key} {difference}"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "group", "batch", "cases"),
    [
        (4, 2, 4, CASES),
        (2, 2, 4, CASES[:1]),
        pytest.param(6, 2, 6, CASES, marks=pytest.mark.verify),
        pytest.param(8, 4, 16, CASES, marks=pytest.mark.verify),
        pytest.param(4, 2, 8, LONG_CASES, marks=pytest.mark.verify),
        pytest.param(8, 2, 16, LONG_CASES, marks=pytest.mark.verify),
    ],
)
def test_groups_train_as_models_in_turn_do(
    world: int, group: int, batch: int, cases: Sequence[tuple[str, str]]
) -> None:
    runs = [
        (f"{inner} {outer} --paro-strategy {strategy}", inner, 3e-6)
        for (inner, outer), strategy in zip(cases, cycle(INSIDE), strict=False)
    ]
    compare(runs, world, group, batch)


@pytest.mark.ranks
def test_rotating_weights_and_adapters_train_as_models_in_turn_do() -> None:
    """The norm of parameters in the log is that of a group's own."""
    lora = "--lora-rank 2 --lora-alpha 4"
    two_rounds = "--paro-outer-steps 2 --paro-outer-delay 1 --paro-outer-warmup 2 --train-iters 7"
    runs = [
        (f"{more} {two_rounds} --paro-strategy III --log-params-norm", alone, allowed)
        for more, alone, allowed in (
            ("--paro-materialize rotate", "", 2e-6),
            (lora, lora, 2e-6),
            ("--fp16", "--fp16", 1e-3),
        )
    ]
    compare(runs, 4, 2, 4)


ROUNDS = "--paro-outer-steps 4 --paro-outer-warmup 0 --paro-strategy III --paro-group-size 2"


@pytest.mark.ranks
def test_a_round_sends_the_bytes_of_the_formula() -> None:
    large = f"{PLAIN} --num-layers 3 --hidden-size 64 --ffn-hidden-size 96 {ROUNDS}"
    large += " --paro-outer-steps 2 --train-iters 5"
    bits = (32, 16, 8, 4)
    flags = [f"{large} --paro-outer-bits {each}" for each in bits]
    results, *_ = run_ranks(train_in_groups, 4, flags)
    inter, lost = {}, {}
    for each, run, (states, sent) in zip(bits, flags, results, strict=True):
        spec = configured(run, World(size=4)).spec
        memory = RunMemory(None)
        inter[each] = sum(sent, Sent()).inter
        assert inter[each] == 2 * memory.sent_in_rounds(spec, 0).inter
        assert memory.sent(spec, 1, 0).inter == 0
        lost[each] = max(
            float((states[name] - states[name.replace(ANCHOR, PARAM)]).abs().max())
            for name in states
            if name.startswith(ANCHOR)
        )
    # What the anchor lacks of the reference, which masters have moved away from by about 0.01.
    assert lost[32] < lost[16] < lost[8] < lost[4] < 0.01
    numel = sum(unit.numel for unit in RunMemory(None).units(spec))
    assert inter[16] == 2 * 2 * 2 * numel // 2 // 2  # rounds, messages, bytes; m = 2, (g - 1) / g
    assert inter[32] == 2 * inter[16]
    assert 0.5 < inter[8] / inter[16] < 0.58
    assert 0.25 < inter[4] / inter[16] < 0.34


def test_outer_states_take_the_bytes_that_are_predicted() -> None:
    for more in ("", "--paro-outer-delay 2", "--paro-outer-bits 4 --bf16", "--paro-outer-bits 32"):
        for strategy in INSIDE:
            run = f"{PLAIN} --hidden-size 64 {ROUNDS} {more} --paro-strategy {strategy}"
            config = configured(f"{run} --dry-run --world-size 8", World(size=8))
            training = build_training(config, PlannedControl(config.world, torch.device("meta")))
            spec = config.spec
            states = RunMemory(None).of(spec).allocations.states
            assert training.optimizer.model_state_bytes() == states
            for unit in training.optimizer.outer.units:
                assert storage_bytes(unit) == unit.num_bytes, "another buffer is kept alive"


def storage_bytes(unit: OuterUnit) -> int:
    """The bytes of all that a unit refers to, but of the inner optimizer's and the norm."""
    parts = [unit, unit.quantized_update or unit]
    tensors = [each for part in parts for each in vars(part).values() if isinstance(each, Tensor)]
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}
    for other in (unit.master, unit.gradient_norm):
        del storages[other.untyped_storage()._cdata]
    return sum(each.nbytes() for each in storages.values())


def lose_a_group(cases: Sequence[tuple[str, float]]) -> list[tuple[States, str | None]]:
    """The states and the line after a round before which a value of group 1's states moves."""
    results = []
    for flags, moved in cases:
        config, training = built(flags)
        (state, source), outer = begun(config, training), training.optimizer.outer
        outer.usual = [MovementStatistics(num_rounds=100, mean=0.2, variance=0.01)]
        for step in range(1, 5):
            if step == 4 and outer.group == 1:
                for part in training.optimizer._parts.values():
                    for values in part.states.values():
                        values.detach()[:1] += moved
            train_step(training, state, source)
        line = GroupsAlone(training).left_out_line(state.iteration)
        results.append((states_of(training), line))
        training.close()
    return results


@pytest.mark.ranks
def test_a_group_that_moves_too_far_is_left_out_and_takes_the_others_parameters() -> None:
    flags = f"{FLAGS} {ROUNDS} --paro-group-size 1"
    cases = [(flags, math.nan), (flags, 10.0), (flags, 0.0)]
    (*without, whole), *_ = run_ranks(lose_a_group, 3, cases)
    for states, line in without:
        left_out, others = masters_of(states, 1), [masters_of(states, each) for each in (0, 2)]
        for name, values in left_out.items():
            assert values.isfinite().all()
            assert all(torch.equal(values, each[name]) for each in others)
            assert torch.equal(values, states[f"{ANCHOR}.{name}"])
            assert torch.equal(values, without[0][0][f"{ANCHOR}.{name}"])
        assert "group 1" in line
    for (states, _), keeps_moments in zip(without, (False, True), strict=True):
        prefixes = tuple(of_group(moment, 1) for moment in MOMENTS)
        moments = [bool(states[name].any()) for name in states if name.startswith(prefixes)]
        assert set(moments) == {keeps_moments}
    states, line = whole
    assert line is None
    assert any(not torch.equal(states[name], without[0][0][name]) for name in states)


def measure_a_round(flags: str) -> tuple[States, States, IterationRecord]:
    """The states at the start and after a slow round of 4 steps, merged one later; its record."""
    config, training = built(flags)
    (state, source), groups = begun(config, training), GroupsAlone(training)
    start, outer_step = states_of(training), OuterUnit._step
    with patch.object(OuterUnit, "_step", lambda unit: time.sleep(0.1) or outer_step(unit)):
        for step in range(1, 6):
            made = train_step(training, state, source)
            own = replace(record(step), lm_loss=made.loss, z_loss=made.z_loss)
            records = [*groups.records(own, due=step == 5)]
    after = states_of(training)
    training.close()
    return start, after, records[-1]


@pytest.mark.ranks
def test_a_record_has_the_loss_of_each_group_and_how_far_groups_are_apart() -> None:
    flags = f"{FLAGS} {ROUNDS} --paro-outer-delay 1 --z-loss-weight 0.1"
    (start, after, found), *others = run_ranks(measure_a_round, 4, flags)
    losses = [others[rank][2].lm_loss for rank in (0, 1)]
    assert len(set(found.groups.lm_losses)) == 2
    assert found.lm_loss == pytest.approx(sum(found.groups.lm_losses) / 2)
    assert losses == [found.lm_loss] * 2
    assert [others[rank][2].z_loss for rank in (0, 1)] == [found.z_loss] * 2
    moved = [
        torch.cat([
            (start[name] - after[name.replace(ANCHOR, of_group(BEGUN, group))]).flatten()
            for name in sorted(start)
            if name.startswith(ANCHOR)
        ]).double()
        for group in (0, 1)
    ]  # fmt: skip
    mean = (moved[0] + moved[1]) / 2
    norms = [float(each.norm()) for each in moved]
    cosine = sum(float(each @ mean) for each in moved) / float(mean.norm()) / sum(norms)
    assert found.groups.outer_grad_norm == pytest.approx(float(mean.norm()), rel=1e-5)
    assert found.groups.outer_grad_cosine == pytest.approx(cosine, rel=1e-5)
    assert found.groups.num_left_out == 0


def test_rounds_begin_and_end_in_turn() -> None:
    outer = OuterConfig(outer_steps=6, outer_fragments=3, outer_delay=1, outer_warmup=10)
    begun_after = {i: outer.begins(i) for i in range(9, 24) if outer.begins(i) is not None}
    assert begun_after == {12: 0, 14: 1, 16: 2, 18: 0, 20: 1, 22: 2}
    assert {i - 1: outer.merges(i) for i in range(9, 24) if outer.merges(i) is not None} == {
        12: 0, 14: 1, 16: 2, 18: 0, 20: 1, 22: 2
    }  # fmt: skip
    five = OuterConfig(outer_steps=10, outer_fragments=5)
    assert [five.fragment_of(unit, 8) for unit in range(8)] == [0, 2, 3, 4, 2, 3, 4, 1]
    assert outer_defaults(2, "adam") == (0.6, 0.9)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--paro-outer-steps 4 --paro-strategy 1,2,8", "give --paro-strategy NII"),
        ("--paro-outer-steps 0", "must be at least 1"),
        ("--paro-outer-steps 4 --paro-outer-fragments 5", "one round begins in a step at most"),
        ("--paro-outer-steps 4 --paro-outer-fragments 2 --paro-outer-delay 2", "give less"),
        ("--paro-outer-steps 4 --paro-outer-momentum 1", "must be in [0, 1)"),
        ("--paro-outer-steps 4 --paro-outer-lr 0", "must be a positive number"),
        ("--paro-outer-delay 2", "needs --paro-outer-steps"),
        ("--paro-outer-steps 4 --paro-inter-grad-bits 4", "contradict each other"),
        ("--paro-outer-steps 4 --paro-elastic", "as many ranks as before ... give one of them"),
        ("--paro-outer-steps 4 --paro-group-size 4 --paro-survive 2", "give more groups"),
        ("--paro-outer-steps 4 --context-parallel-size 4 --seq-length 16", "between groups"),
    ],
)
def test_groups_that_cannot_train_alone_are_refused(flags: str, message: str) -> None:
    strategy = "" if "--paro-strategy" in flags else "--paro-strategy III"
    run = f"{PLAIN} --global-batch-size 8 --paro-group-size 2 {strategy} {flags}"
    refused(lambda: configured(run, World(size=8, ranks_per_node=2)), message)
