"""Plans a training run on any machine: strategies, the best candidate, gains from upgrades."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

if not __package__:  # run as a script: the repository's packages are next to tools/
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paro.distributed.user_errors import run_script
from paro.errors import UserError, about, contradiction
from paro.machine.files import machine_to_json
from paro.machine.machine import Machine
from paro.planning.description import describe
from paro.planning.estimator import Estimate, Estimator
from paro.planning.planner import (
    best_first,
    best_that_fits,
    plan,
)
from paro.planning.remedies import MOST_RANKS_TRIED, why_nothing_fits
from paro.planning.search_space import PlanRequest
from paro.planning.step_costs import simulate
from paro.report.log import print_line
from tools.planning import tables
from tools.planning.failures import expected, failures_of, failures_table
from tools.planning.launch import launch_lines, why_not
from tools.planning.longest import longest_table
from tools.planning.made_machine import described
from tools.planning.outer import outer_lines
from tools.planning.pictures import chrome_trace, draw_front, draw_scaling, draw_timeline
from tools.planning.request import (
    device_flag,
    machine_of,
    make_parser,
    plan_request_of_args,
    with_context,
)
from tools.shared.output import write_json, write_text
from tools.shared.picture import check_outputs

FILES = ("--json", "--trace", "--machine-file")
PICTURES = ("--plot", "--timeline", "--scaling")


def main(argv: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else argv
    args = make_parser().parse_args(words)
    check_outputs(args, *FILES, pictures=PICTURES)
    if args.longest_sequence:
        for flag in (*FILES, *PICTURES, "--why-not", "--mtbf-hours"):
            if getattr(args, flag.removeprefix("--").replace("-", "_")) is not None:
                raise contradiction("--longest-sequence, which makes no plan,", flag)
        print_line(longest_table(args))
        return
    args, lines = with_context(args)
    if lines:
        print_line(*lines, "")
    request = plan_request_of_args(args)
    if args.mtbf_hours is not None:
        failures_of(args, request)  # its mistakes, before the plan takes time
    if args.why_not is not None:
        with about("--why-not: "):
            request.strategy(args.why_not)
    report(args, request, words)


def report(args: Namespace, request: PlanRequest, words: Sequence[str]) -> None:
    """Print the plan and write the files; `UserError` at the end if nothing fits."""
    print_line(tables.title(request), "")
    if args.gpu is not None:
        print_line(described(request.machine), "")
    if args.machine_file is not None:
        write_text(args.machine_file, machine_to_json(request.machine))
    rotated = tables.rotated_rows(request) if request.materialize.rotates else ()
    rows = best_first((*tables.letter_rows(request), *rotated))
    if any(row.fits for row in rows):
        notes = (*tables.on_bytes(request), *tables.infeasible_notes(request, rows), tables.NODES)
        print_line(tables.rows_table(request, rows), *notes, "")
    else:
        print_line(*tables.nothing_fits(request, rows), "")
    result = plan(request)
    print_line(*describe(result))
    if args.why_not is not None:
        print_line("", *why_not(request, result, args.why_not))
    if args.paro_outer_steps is not None:
        print_line("", *outer_lines(args, request, result.best))
    bought = tables.purchases(request, result)
    if result.best is not None:
        print_line("", tables.front_table(result), "")
        print_line("what more would buy:", *tables.purchase_lines(bought))
    failing: dict[str, object] | None = None
    if args.mtbf_hours is not None:
        failures = failures_of(args, request)
        expectation = expected(request, result, failures)
        print_line("", *failures_table(failures, expectation))
        failing = {**asdict(failures), "settings": expectation}
    curves = {}
    if args.scaling is not None:
        print_line("", "the best that fits at the same batch a rank:")
        curves = scaling(request, machine_of(args), args.paro_group_size)
    launch = [] if result.best is None else [*launch_lines(args, request, result.best, words)]
    if args.json is not None:
        fields = tables.fields_of(request, rows, result, bought, curves) | {
            "failures": failing,
            "launch": launch,
        }
        write_json(args.json, fields)
    if args.plot is not None:
        draw_front(args.plot, request, rows, result)
    if args.scaling is not None:
        draw_scaling(args.scaling, curves, f"MFU on {request.machine.name}, same batch a rank")
    if args.trace is not None or args.timeline is not None:
        draw_step(args, request, result.best or result.least)
    if result.best is None:
        raise UserError(f"{device_flag(args)}: {why_nothing_fits(request, result)}")
    print_line("", *launch)


def scaling(
    request: PlanRequest, machine: Machine, group_size: int | None
) -> dict[str, list[tuple[int, float]]]:
    """(ranks, MFU) at the given batch per rank, for some strategies and for the best candidate.

    Starts with one group of `machine` and doubles; if collectives were measured, only their ranks.
    The search covers all degrees with all other flags as given, and prints each best candidate when
    it is found.
    """
    per_rank = request.global_batch_size // request.world_size
    curves: dict[str, list[tuple[int, float]]] = {"best that fits": []}
    ranks = machine.world_size if machine.measured else machine.group_size
    while ranks <= (machine.world_size if machine.measured else MOST_RANKS_TRIED):
        scaled = replace(
            request,
            machine=replace(machine, uneven=()).for_world(ranks, subject="--scaling"),
            group_size=min(group_size or machine.group_size, ranks),
            global_batch_size=per_rank * ranks,
        )
        estimator = Estimator(scaled)
        for name in ("NNG", "NIG", "III", "IIG", "GGG"):
            candidate = scaled.candidate(scaled.strategy(name))
            if scaled.infeasible_reason(candidate.strategy, candidate.materialize) is not None:
                continue
            estimate = estimator.estimate(candidate)
            if estimate.fits:
                curves.setdefault(name, []).append((ranks, estimate.mfu))
        best = best_that_fits(scaled, request.as_given())
        if best is not None:
            curves["best that fits"].append((ranks, best.mfu))
            print_line(f"{ranks:7,} ranks: MFU {best.mfu:.1%} with {best.candidate.describe()}")
        ranks *= 2
    return curves


def draw_step(args: Namespace, request: PlanRequest, chosen: Estimate) -> None:
    """Write and draws one step of the best candidate, with at most two micro-batches."""
    size = chosen.candidate.micro_batch_size
    few = replace(
        request,
        micro_batch_size=size,
        global_batch_size=size * request.data_parallel_size * min(2, chosen.num_micro_batches),
    )
    activities = simulate(Estimator(few).costs(chosen.candidate), record=True).activities
    if args.trace is not None:
        write_text(args.trace, chrome_trace(activities))
    if args.timeline is not None:
        draw_timeline(args.timeline, activities, chosen.candidate.describe())


if __name__ == "__main__":
    run_script("plan.py", main)
