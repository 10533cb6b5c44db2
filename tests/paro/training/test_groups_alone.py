"""Groups that train alone, continued: as they were, or from the parameters they agreed on."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import HashStore

from data.batch import Batch
from paro.checkpoint.chunks import chunked_states
from paro.checkpoint.in_memory.folder import SnapshotFolder
from paro.config.run import RunConfig
from paro.distributed.world import World
from paro.layout import Chunk
from paro.report.log import Log
from paro.report.report import open_report
from paro.spec.states import ANCHOR, MASTER_OF_GROUP, OUTER_MOMENTUM, PARAM, of_other_group
from paro.training.assembly import build_data, build_sources, run_facts
from paro.training.evaluation import evaluate
from paro.training.exit_signal import ExitReasons
from paro.training.groups_alone import GroupsAlone
from paro.training.in_memory import InMemoryCheckpointer
from paro.training.loop import Loop
from paro.training.replicas import check_replicas
from paro.training.resume import FROM_NOTHING, load_run
from paro.training.step import Training, TrainState, train_step
from tests.helpers.ranks import run_ranks
from tests.helpers.training import begun, built, save_run, whole_states
from tests.paro.optim.test_outer import FLAGS, PLAIN, States, states_of, train_group

SAVED, STEPS = 5, 8


def _source_of(config: RunConfig, training: Training, state: TrainState) -> Iterator[Batch]:
    return build_sources(config, build_data(config, state), training, state).train


def interrupt(cases: Sequence[str], folder: str) -> list[tuple[States, States]]:
    """States of runs without an interruption, and of runs continued from a save after 5 steps.

    In the first neither the save nor an evaluation after it changes what the run does.
    """
    results = []
    for index, flags in enumerate(cases):
        saved = f"{flags} --save {folder}/{index} --load {folder}/{index}"
        config, training = built(saved)
        state, source = begun(config, training)
        for _ in range(SAVED):
            train_step(training, state, source)
        save_run(config, training, state=state)
        evaluate(training, _source_of(config, training, state), 1)
        for _ in range(STEPS - SAVED):
            train_step(training, state, source)
        whole = states_of(training)
        training.close()
        if index == 0:
            straight, _ = train_group(flags)
            assert all(torch.equal(straight[name], whole[name]) for name in whole), "a save"
        config, training = built(saved)
        resumed = load_run(config, training, Log(rank=0, world_size=1))
        assert resumed.state is not None
        source = _source_of(config, training, resumed.state)
        for _ in range(STEPS - SAVED):
            train_step(training, resumed.state, source)
        results.append((whole, states_of(training)))
        training.close()
    return results


RESUMED = (
    "--paro-strategy III --paro-outer-steps 3 --paro-outer-fragments 2 --paro-outer-warmup 2 "
    "--paro-outer-bits 4",
    "--paro-strategy NNI --paro-outer-steps 4 --paro-outer-delay 2 --paro-outer-warmup 0",
    "--paro-strategy INI --bf16 --paro-outer-steps 2 --paro-outer-warmup 6 --paro-outer-bits 16",
)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "which", [slice(0, 2), pytest.param(slice(2, 3), marks=pytest.mark.verify)]
)
def test_a_resumed_run_equals_one_that_was_not_interrupted(tmp_path: Path, which: slice) -> None:
    """Also between the begin and the end of a round, and in the warm-up."""
    base = f"{FLAGS} --paro-group-size 2 --train-iters {STEPS}"
    cases = [f"{base} {more}" for more in RESUMED[which]]
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
    training.optimizer.outer.wait()
    states = whole_states(training, replicas=True)
    return math.hypot(*(float(states[n].norm()) for n in states if n.startswith(f"{PARAM}.")))


@pytest.mark.ranks
@pytest.mark.parametrize(
    "which", [slice(0, 5, 4), pytest.param(slice(1, 4), marks=pytest.mark.verify)]
)
def test_runs_with_other_settings_continue_from_the_parameters_that_groups_agreed_on(
    tmp_path: Path, which: slice
) -> None:
    """Replicas are compared after each step, also while a round is in flight."""
    base = f"{PLAIN} --paro-group-size 2 --paro-strategy III --override-opt_param-scheduler"
    outer = f"{base} --paro-outer-steps 4 --paro-outer-warmup 0"
    cases = [
        (base, f"{outer} --paro-outer-delay 2"),
        (f"{outer} --paro-outer-delay 2", outer),
        (f"{outer} --paro-outer-delay 2", f"{outer} --paro-outer-delay 2 --no-load-optim"),
        (f"{outer} --paro-outer-delay 2", f"{outer} --paro-outer-delay 2 --finetune"),
        (f"{outer} --paro-outer-delay 2", base),
    ]
    norms, *_ = run_ranks(continue_otherwise, 4, cases[which], str(tmp_path))
    for (_, after), (start, end) in zip(cases[which], norms, strict=True):
        assert end < 1.1 * start, f"{after}: {start} to {end}"


@pytest.mark.parametrize("name", ["signalled", "late", "unsaved"])
def test_all_groups_stop_for_the_reason_that_one_of_them_has(name: str) -> None:
    training = Mock()
    training.control.gather = lambda own: [own, ExitReasons(**{name: True})]
    groups = GroupsAlone(training)
    agreed = ExitReasons(stop_after=7)
    assert groups.reasons_of_all(agreed, 6) == ExitReasons()
    assert groups.reasons_of_all(agreed, 7) == agreed._replace(**{name: True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Three groups of two ranks, each rank on its own node, that end after so many steps each."""

    flags: str
    steps: tuple[int, int, int]
    copied: tuple[int, int, int] = (99, 99, 99)  # the last steps of which there are copies
    lost: tuple[int, ...] = ()  # the ranks that are lost with their memory
    returned: int | None = None  # the group that then begins as ...
    donor: int = 0
    samples: str = ""  # ... and is said to lose a part of these


ALONE = "--paro-outer-steps 4 --paro-outer-warmup"
LOSSES = {
    "ranks alone": Loss(flags=f"III {ALONE} 1", steps=(6, 7, 8)),
    "a group": Loss(
        flags=f"III {ALONE} 1",
        steps=(6, 7, 8),
        lost=(2, 3),
        returned=1,
        donor=2,
        samples="31 to 48 its share, 3 to 4 of every 6",
    ),
    "copies since the round": Loss(
        flags=f"III {ALONE} 1 --optimizer muon",
        steps=(6, 7, 8),
        copied=(4, 99, 99),
        returned=0,
        donor=2,
        samples="31 to 48 its share, 1 to 2 of every 6",
    ),
    "a group, with a delay": Loss(
        flags=f"NNN {ALONE} 0 --paro-outer-delay 2 --paro-outer-bits 4",
        steps=(7, 7, 6),
        lost=(2, 3),
        returned=1,
        samples="25 to 42",
    ),
    "a group, in the warm-up": Loss(flags=f"NNI {ALONE} 9", steps=(3, 3, 3), lost=(4, 5)),
    "one rank of a group that has replicas": Loss(
        flags=f"NNN {ALONE} 1 --paro-outer-delay 2", steps=(8, 7, 7), lost=(3,)
    ),
}


MORE = ("ranks alone", "a group", "a group, in the warm-up")  # under `make verify`


def lose_copies(names: Sequence[str], root: Path) -> list[tuple[States, States, list[str]]]:
    """The last states of runs in memory, by the definition, and recovered; and what was printed."""
    return [lose_copy(LOSSES[name], root / name) for name in names]


def lose_copy(loss: Loss, root: Path) -> tuple[States, States, list[str]]:
    flags = (
        f"{PLAIN} --num-layers 1 --paro-group-size 2 --non-persistent-ckpt-type local "
        f"--eval-interval 1 --eval-iters 1 --check-weight-hash-across-dp-replicas-interval 1 "
        f"--log-interval 1 --paro-strategy {loss.flags}"
    )
    config, training = built(flags)
    outer = training.optimizer.outer
    group, rank, log = outer.group, training.control.world.rank, Log()
    folder = SnapshotFolder(root / f"node{rank}", training.control, (rank,))
    folder.path.mkdir(parents=True, exist_ok=True)
    copies = InMemoryCheckpointer(config, folder, log)
    copies.begin(training, FROM_NOTHING)
    state, source = begun(config, training)
    for _ in range(loss.steps[group]):
        train_step(training, state, source)
        copies.wait()
        if state.iteration <= loss.copied[group]:
            copies.start(state)
    copies.wait()
    state = begin_as_defined(training, state, loss)
    source = _source_of(config, training, state)
    while state.iteration < config.train.train_iters:
        train_step(training, state, source)
    defined = states_of(training)
    training.close()
    if rank in loss.lost:
        shutil.rmtree(folder.path)
        folder.path.mkdir()
    config, training = built(flags)
    lines: list[str] = []
    printing = Mock(log0=lines.append, log_last=lines.append)
    copies = InMemoryCheckpointer(
        config, SnapshotFolder(folder.path, training.control, (rank,)), printing
    )
    resumed = copies.recover(training)
    assert resumed is not None
    assert resumed.state is not None
    copies.begin(training, resumed)
    facts = run_facts(config, training)
    device, start = training.device, resumed.start
    report = open_report(
        config.report, facts, printing, device=device, start_iteration=start, arguments={}
    )
    sources = build_sources(config, build_data(config, resumed.state), training, resumed.state)
    Loop(training, resumed.state, sources, report, saving=None, snapshots=copies, start=start).run()
    recovered = states_of(training)
    training.close()
    return defined, recovered, lines


def begin_as_defined(training: Training, state: TrainState, loss: Loss) -> TrainState:
    """Change the states of a lost group, or the outer ones of a lost rank, as a recovery should."""
    outer, optimizer = training.optimizer.outer, training.optimizer
    donor = training.control.gather((state, optimizer.num_steps))[2 * loss.donor]
    whole = states_of(training)
    returns, is_lost = loss.returned == outer.group, training.control.world.rank in loss.lost
    for name, chunked in chunked_states(optimizer.flat_shards()).items():
        kind, _, parameter = name.partition(".")
        if not (returns or (is_lost and kind in (PARAM, OUTER_MOMENTUM))):
            continue
        source = whole[of_other_group(name, loss.donor)]
        if kind.startswith((MASTER_OF_GROUP, PARAM)):
            source = whole[f"{ANCHOR}.{parameter}"]
        for offsets, values in chunked.chunks.items():
            values.copy_(
                source[
                    Chunk(offsets, values.shape).index_in(Chunk((0,) * source.dim(), source.shape))
                ]
            )
            if kind == OUTER_MOMENTUM:
                values.zero_()
    if not returns:
        return state
    optimizer.loaded(num_steps=donor[1])
    return deepcopy(donor[0])


@pytest.mark.ranks
@pytest.mark.parametrize(
    "names",
    [
        [name for name in LOSSES if name not in MORE],
        pytest.param(MORE, marks=pytest.mark.verify),
    ],
)
def test_a_lost_group_begins_with_the_anchor_and_the_others_continue_as_they_were(
    names: Sequence[str], tmp_path: Path
) -> None:
    """Each from its own iteration; evaluations and log lines are of iterations that none had."""
    results, *_ = run_ranks(lose_copies, 6, names, tmp_path)
    for name, (defined, recovered, lines) in zip(names, results, strict=True):
        loss = LOSSES[name]
        assert defined.keys() == recovered.keys()
        differs = [key for key in defined if not torch.equal(defined[key], recovered[key])]
        assert not differs, f"{name}: {differs}"
        lost = [line for line in lines if "is lost: it continues after" in line]
        assert len(lost) == (len(loss.lost) > 1 or loss.returned is not None), name
        message = f"of samples {loss.samples}" if loss.samples else "of samples"
        assert all((message in line) == bool(loss.samples) for line in lost), lost
        printed = [
            int(line.split("iteration")[1].split("/")[0]) for line in lines if "/      10" in line
        ]
        assert printed == list(range(max(loss.steps) + 1, 11)), name


@pytest.mark.parametrize(
    ("start", "counted", "stop_after"),
    [
        (0, (5, 7), 8),  # the group that asks is behind the other
        (9, (7, None), 11),  # the other starts after 9, and has counted nothing yet
        (9, (12, 10), 14),
    ],
)
def test_groups_stop_after_a_step_that_none_has_passed(
    start: int, counted: tuple[int, int | None], stop_after: int
) -> None:
    store, groups = HashStore(), []
    for group in range(2):
        outer = Mock(group=group, num_groups=2)
        training = Mock(group_control=Mock(world=World()))
        training.control.store, training.optimizer.outer = store, outer
        groups.append(GroupsAlone(training, start))
        iteration = counted[group]
        if iteration is not None:
            assert groups[group].reasons(ExitReasons(), iteration).stop_after == 0
    asked = groups[0].reasons(ExitReasons(signalled=True), (counted[0] or 0) + 1)
    other = groups[1].reasons(ExitReasons(), (counted[1] or start) + 1)
    assert asked.stop_after == other.stop_after == stop_after
