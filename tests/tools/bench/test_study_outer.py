"""The study of outer steps: what it trains, with flags that a run takes, and its report."""

from __future__ import annotations

import pytest

from paro.arguments.parser import parse_args
from tools.bench.shared.trainings import Found, Losses
from tools.bench.study_outer import CASES, FIRST, RATES, SEEDS, Case, jobs_for, report


def test_sweeps_come_first_and_then_every_case_with_a_best_rate() -> None:
    done: Found = {}
    rounds = []
    while missing := [job for job in jobs_for(done) if job.name not in done]:
        rounds.append(missing)
        for job in missing:
            loss = 4.0 + abs(job.lr - RATES[1]) + 0.1 * bool(job.case.outer)
            curve = [(100, 5.0), (800, loss)]
            done[job.name] = Losses(loss=[(1, 9.0)], held_out=curve, seconds=1.0)
    first, rest = rounds
    assert {job.case.name for job in first} == {"synchronous", FIRST, "synchronous Muon"}
    assert {job.lr for job in rest} == {RATES[1]}
    assert len(done) <= 60
    lines = report(done).splitlines()
    assert f"| {FIRST} | 0.002 | 4.1000, 4.1000, 4.1000 | +0.1000 |" in lines
    assert len(SEEDS) == 3


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_run_takes_the_flags_of_every_case(case: Case) -> None:
    words = case.words(1e-3, 1, 800, 100)
    flags = words[words.index("pretrain_llama.py") + 1 :]
    args = parse_args([*flags, "--mock-data", "--tokenizer-model", "x"])
    assert (args.paro_outer_steps is not None) == bool(case.outer)
