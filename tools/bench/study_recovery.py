"""Kills ranks and whole nodes of trainings in an emulated cluster, and measures their recovery."""

# What must hold: every loss that is ever printed is that of the undisturbed training, at most one
# printed iteration is computed again after a failure, nothing is left at the end, and no rank opens
# the folder of another node. Baselines: checkpoints on disk at their best interval, and none.

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paro.distributed.user_errors import run_script
from tools.bench.recovery.cases import CASES, ITERATIONS, Case
from tools.bench.recovery.failures import Failure, Study, plot, tables
from tools.bench.recovery.watched import Watched
from tools.bench.shared.turns import ROOT, rows_in
from tools.cluster.counters import reset_traffic, traffic
from tools.cluster.launch import run
from tools.cluster.lifecycle import cluster
from tools.cluster.state import Cluster
from tools.shared.command_line import Parser
from tools.shared.picture import check_can_draw

DESCRIPTION = """\
Kills random ranks and whole nodes of trainings in an emulated cluster (needs root), inside updates,
all-gathers, copies, saves and recoveries too. Every kill is added to --json, so that a study can be
stopped and continued.

  python tools/bench/study_recovery.py --json recovery.json --folder runs/recovery
"""
_START_SECONDS = 300.0
_RECOVERY_SECONDS = 400.0
_WARM_UP_ITERATIONS = 4


@dataclass(slots=True)
class Disturbed:
    """One training of a case while it is disturbed."""

    study: Study
    case: Case
    training: Watched
    draw: random.Random

    def failures(self) -> Iterator[Failure]:
        """Cause failures until the training has ended or there are enough."""
        training, begun = self.training, 3
        training.agents.start_all()
        while self._reaches(begun):
            next_save = training.newest() + (self.case.save_interval or ITERATIONS)
            kinds = [
                kind
                for kind in self.study.wanted(self.case)
                if not kind.endswith("in save") or next_save < ITERATIONS
            ]
            if not kinds or training.newest() > ITERATIONS - 6:
                return
            failure = self._fail(self.draw.choice(kinds[:3]))
            if failure is None:
                return
            yield failure
            begun = training.newest() + 2
        raise TimeoutError(f"{self.case.name}: no progress: {training.text()[-3000:]}")

    def _reaches(self, iteration: int) -> bool:
        training = self.training
        return training.wait_until(lambda: training.newest() >= iteration, _START_SECONDS)

    def _fail(self, kind: str) -> Failure | None:
        training, case, study = self.training, self.case, self.study
        load = os.getloadavg()[0]
        num_seen = len(training.recoveries())
        where = self._strike(kind)
        if where is None:
            return None
        struck = time.monotonic()
        # What the other ranks print before they end was computed before the failure.
        training.wait_until(training.agents.none_is_left, _RECOVERY_SECONDS)
        known = training.newest()
        before = len(training.seen)
        self._bring_back(kind, where)
        if not training.wait_until(lambda: training.newest() > known, _RECOVERY_SECONDS):
            study.complaints.append(f"{case.name}: no iteration after {kind} at {where}")
            study.save()
            raise TimeoutError(f"{case.name}, {kind}: {training.text()[-3000:]}")
        after = training.seen[before:]
        recoveries = training.recoveries()
        recovered, seconds = recoveries[-1] if len(recoveries) > num_seen else (None, None)
        return Failure(
            case=case.name,
            kind=kind,
            where=where,
            seconds=next(seen.at for seen in after if seen.iteration > known) - struck,
            computed_again=len({seen.iteration for seen in after if seen.iteration <= known}),
            recovered=recovered,
            recovery_seconds=seconds,
            step_seconds=study.step_seconds[case.name],
            load=load,
        )

    def _strike(self, kind: str) -> int | None:
        """Kill as `kind` says; the rank or node, or None if the training ended before."""
        training, spec = self.training, self.training.agents.spec
        rank = self.draw.randrange(spec.nodes * spec.ranks_per_node)
        node = rank // spec.ranks_per_node
        what, _, point = kind.partition(" in ")
        if point:
            training.set_gate(point, rank, skip=self.draw.randrange(self.case.skips(point)))
            if point == "recovery":  # the first of two failures
                training.signal_rank((rank + 1) % (spec.nodes * spec.ranks_per_node))
            if not training.reaches_gate(_RECOVERY_SECONDS):
                training.open_gate()
                return None
        else:
            time.sleep(self.draw.uniform(0.0, 2.0 * self.study.step_seconds[self.case.name]))
        if not training.agents.running():
            return None
        training.agents.note_ranks()
        if what == "node":
            training.lose_node(node)
        elif what == "stop":
            training.signal_rank(rank, signal.SIGSTOP)
        else:
            training.signal_rank(rank)
        training.open_gate()
        return node if what == "node" else rank

    def _bring_back(self, kind: str, where: int) -> None:
        """Bring a lost node back with empty memory; without its rendezvous all start again."""
        training = self.training
        agents = training.agents
        if not kind.startswith("node"):
            return
        if where == 0:
            training.wait_until(lambda: not agents.running(), _RECOVERY_SECONDS)
            agents.start_all()
            return
        if self.case.least_nodes < agents.spec.nodes:
            known = training.newest()
            training.wait_until(lambda: training.newest() > known, _RECOVERY_SECONDS)
        agents.start(where)


def undisturbed(case: Case, study: Study, folder: Path) -> None:
    """Train a case once without a failure, for its losses and the time of a step."""
    if case.name in study.undisturbed:
        return
    with cluster(case.spec) as made:
        training = Watched(made.spec, case.flags(folder), folder)
        try:
            training.agents.start_all()
            training.wait_until(lambda: not training.agents.running(), 3600.0)
            if not training.agents.ended_well():
                raise RuntimeError(training.text()[-3000:])
        finally:
            training.agents.end()
    times = [seen.at for seen in training.seen]
    steps = sorted(later - sooner for sooner, later in itertools.pairwise(times))
    study.step_seconds[case.name] = steps[len(steps) // 2]
    study.undisturbed[case.name] = [[seen.loss, seen.grad_norm] for seen in training.seen]
    study.save()


def judge(case: Case, study: Study, training: Watched) -> None:
    """Compare every printed loss with the undisturbed one, and look for leftovers."""
    truth = study.undisturbed[case.name]
    for seen in training.seen:
        want = truth[seen.iteration - 1]
        study.losses_compared += 1
        if not case.agrees([seen.loss, seen.grad_norm], want):
            study.complaints.append(
                f"{case.name}: iteration {seen.iteration} is {seen.loss} {seen.grad_norm}, "
                f"undisturbed {want}"
            )
    missing = set(range(1, ITERATIONS + 1)) - {seen.iteration for seen in training.seen}
    # The rank that prints may be killed in an update of which the others kept the result.
    if not missing <= {iteration for iteration, _ in training.recoveries()}:
        study.complaints.append(f"{case.name}: iterations {sorted(missing)} are missing")
    study.complaints += [f"{case.name}: {left} is left" for left in training.left_over()]
    study.save()


def disturb(case: Case, study: Study, folder: Path, draw: random.Random) -> None:
    """Train a case once, with failures."""
    with cluster(case.spec) as made:
        training = Watched(made.spec, case.flags(folder), folder, least_nodes=case.least_nodes)
        try:
            for failure in Disturbed(study, case, training, draw).failures():
                study.failures.append(failure)
                study.save()
                print(json.dumps(asdict(failure)), flush=True)
            training.wait_until(lambda: not training.agents.running(), 3600.0)
            if not training.agents.ended_well():
                study.complaints.append(f"{case.name}: failed: {training.text()[-1000:]}")
            judge(case, study, training)
        finally:
            training.agents.end()


def measure_copies(case: Case, folder: Path) -> dict[str, float]:
    """Measure a step's time and NIC bytes with a copy, by those without one.

    The time is the median of pairs of neighbors in a training that copies every second iteration;
    the bytes are those of a training with copies and one without.
    """
    with cluster(case.spec) as made:
        times, with_copies = _train_quietly(made, case, folder, "--non-persistent-save-interval 2")
        _, without = _train_quietly(made, case, folder, None)
    # The copy of iteration 2 is written while 3 computes.
    pairs = zip(times[_WARM_UP_ITERATIONS::2], times[_WARM_UP_ITERATIONS + 1 :: 2], strict=False)
    return {
        "step_ratio": median(copying / plain for copying, plain in pairs),
        "nic_bytes_ratio": with_copies / without,
    }


def _train_quietly(
    made: Cluster, case: Case, folder: Path, copies: str | None
) -> tuple[list[float], int]:
    """Return the milliseconds of every iteration, and the bytes that all NICs sent."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    metrics = folder / "metrics.jsonl"
    own = "" if copies is None else f"{case.own_flags} {copies}"
    flags = [*case.flags(folder, own), "--metrics-file", str(metrics)]
    reset_traffic(made)
    if run(made, [str(ROOT / "pretrain_llama.py"), *flags]) != 0:
        raise RuntimeError(f"{case.name}: the training failed")
    times = [row["iteration_time_ms"] for row in rows_in(metrics) if "iteration_time_ms" in row]
    assert len(times) == ITERATIONS, f"{len(times)} iterations"
    return times, traffic(made).sent


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="study_recovery.py", description=DESCRIPTION)
    add = parser.add_argument
    add("--json", type=Path, required=True, metavar="FILE", help="figures; continued if it exists")
    add("--folder", type=Path, required=True, metavar="DIR", help="of the trainings; is emptied")
    add("--steady", action="store_true", help="also measure what copies cost; on a quiet machine")
    add("--plot", type=Path, metavar="FILE", help="draw the figures (png, svg, pdf)")
    args = parser.parse_args(argv)
    check_can_draw(args.plot)
    study, draw = Study.read(args.json), random.Random(time.time_ns())
    for case in CASES:
        undisturbed(case, study, args.folder)
    for case in CASES:
        while study.wanted(case):
            disturb(case, study, args.folder, draw)
    for case in CASES if args.steady else ():
        if case.own_flags and case.name not in study.steady:
            study.steady[case.name] = measure_copies(case, args.folder)
            study.save()
    print(tables(study))
    print(f"{study.losses_compared:,} losses compared; complaints: {study.complaints or 'none'}")
    if args.plot is not None:
        plot(study, args.plot)
    if study.complaints:
        raise SystemExit(1)


if __name__ == "__main__":
    run_script("study_recovery.py", main)
