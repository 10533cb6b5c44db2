"""The study of optimizers: what it trains next, when a loss is reached, and its report."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from paro.arguments.parser import parse_args
from tools.bench.shared.trainings import ABLATED, Found, Losses
from tools.bench.study_optimizers import (
    ADAMW,
    FIRST,
    IN_PARTS,
    LIKE,
    MUON,
    RATES,
    ROUNDED,
    SEEDS,
    SHORTER,
    Job,
    jobs_for,
    plot,
    report,
    steps_to,
)

BEST = {ADAMW: RATES[1], MUON: RATES[5], SHORTER: RATES[5], IN_PARTS: RATES[5], ROUNDED: RATES[1]}
# AdamW's losses, at the best rate.
ABOVE = {ADAMW: 0.0, MUON: -0.5, SHORTER: 0.125, IN_PARTS: -0.4, ROUNDED: 0.001}


def losses_of(job: Job) -> Losses:
    """Loses 1 nat every 100 iterations of 400, with a bowl over learning rates and seeds apart."""
    off = math.log2(job.lr / BEST[job.variant]) ** 2 + ABOVE[job.variant] + job.seed / 100
    held_out = [(at, 8.0 - at / 100 + off) for at in (100, 200, 300, 400, 400)]
    return Losses(loss=[(1, 9.0)], held_out=held_out, seconds=1.0)


@pytest.fixture(scope="module")
def found() -> Found:
    """All trainings, one round after the other as the study asks for them."""
    done: Found = {}
    rounds = []
    while missing := [job for job in jobs_for(done) if job.name not in done]:
        rounds.append(missing)
        done |= {job.name: losses_of(job) for job in missing}
    swept, *beyond, last = rounds
    assert [job.lr for job in swept if job.variant == MUON] == list(FIRST)
    # AdamW's best one lies below the first sweep, at its edge once tried.
    assert [[(job.variant, job.lr) for job in each] for each in beyond] == [
        [(ADAMW, RATES[1])],
        [(ADAMW, RATES[0])],
    ]
    assert {(job.variant, job.lr) for job in last} == set(BEST.items())
    assert {job.seed for job in last if job.variant == ROUNDED} == set(SEEDS)
    return done


def test_the_report_compares_seed_by_seed(found: Found, tmp_path: Path) -> None:
    lines = report(found).splitlines()
    assert f"| {RATES[1]:g} | **4.0100** |  |" in lines
    assert f"| {RATES[5]:g} | 20.0100 | **3.5100** |" in lines
    assert f"| {RATES[8]:g} |" not in report(found)
    zeros = ", ".join(["+0.0000"] * 3)
    of_adamw = "4.0100, 4.0200, 4.0300 | 4.0200 | 0.0200"
    assert f"| AdamW | {RATES[1]:g} | {of_adamw} | {zeros} | +0.0000 |" in lines
    apart = ", ".join(["+0.0010"] * 3)
    assert [line for line in lines if line.endswith(f"| 0.0200 | {apart} | +0.0010 |")]
    assert lines[-1].endswith("steps: 0.875, 0.875, 0.875; mean 0.875, most - least 0.000")
    plot(found, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 5_000


def test_a_study_under_way_reports_what_is_done(found: Found) -> None:
    assert len(report({}).splitlines()) == 6
    swept = {job.name: found[job.name] for job in jobs_for({})}
    assert f"| Muon | {RATES[5]:g} | 3.5100 | 3.5100 | 0.0000 |" in report(swept)


@pytest.mark.parametrize(
    ("loss", "step"), [(9.0, 10), (7.0, 10), (6.0, 15), (5.0, 20), (4.0, 27.5), (2.9, None)]
)
def test_steps_to_a_loss_are_interpolated(loss: float, step: float | None) -> None:
    assert steps_to(loss, [(10, 7.0), (20, 5.0), (30, 3.0 + 2 / 3), (30, 3.0 + 2 / 3)]) == (
        None if step is None else pytest.approx(step)
    )


def test_flags_are_those_of_a_run() -> None:
    for variant in LIKE:
        flags = Job(variant, 1e-3, 2).flags(400, 20)
        ablated = [ABLATED, "whole-matrices"]
        script = ablated if variant == IN_PARTS else ["pretrain_llama.py"]
        assert flags[: len(script)] == script
        args = parse_args([*flags[len(script) :], "--mock-data"])
        assert (args.lr, args.min_lr, args.seed) == (1e-3, 1e-4, 2)
        assert args.train_iters == (300 if variant == SHORTER else 400)
        assert args.optimizer == ("muon" if LIKE[variant] == MUON else "adam")
        assert (args.exp_avg_dtype == args.exp_avg_sq_dtype == "bf16") is (variant == ROUNDED)
