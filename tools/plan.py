"""Plans a training run for any machine: strategies, the best setting, and what would be better."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:  # started as a script: the repository's packages lie beside tools/
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.atomic_file import replacing
from paro.planning.machine.files import find_machine
from paro.planning.machine.machine import Machine
from paro.planning.search.description import describe
from paro.planning.search.planner import (
    Estimate,
    Estimator,
    Plan,
    best_first,
    best_that_fits,
    letter_rows,
    plan,
    rotated_rows,
)
from paro.planning.search.remedies import MOST_RANKS, why_nothing_fits
from paro.planning.search.settings import Case, Freedom
from paro.planning.step.trace import chrome_trace
from tools.planning.pictures import draw_front, draw_scaling, draw_timeline
from tools.planning.tables import (
    as_json,
    front_table,
    misfits,
    purchase_lines,
    purchases,
    rows_table,
    title,
)
from tools.planning.workload import case_of, make_parser
from tools.shared.picture import check_can_draw


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        check_files(args)
        report(args, case_of(args))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


def check_files(args: Namespace) -> None:
    """Raises `ValueError` for files that could not be written at the end."""
    for flag in ("json", "plot", "trace", "timeline", "scaling"):
        path: Path | None = getattr(args, flag)
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ValueError(f"--{flag} {path} cannot be written: there is no such folder")
        if path is not None and flag in ("plot", "timeline", "scaling"):
            check_can_draw(path, f"--{flag}")


def report(args: Namespace, case: Case) -> None:
    """Prints what was found and writes the files; `ValueError` in the end where nothing fits."""
    print(title(case), "", sep="\n")
    rotated = rotated_rows(case) if case.materialize.rotates else ()
    rows = best_first((*letter_rows(case), *rotated))
    print(rows_table(rows), *misfits(case, rows), "", sep="\n")
    found = plan(case)
    print(*describe(found), "", "memory against time, all settings:", sep="\n")
    print(front_table(found), "", sep="\n")
    bought = purchases(case, found)
    print("what more would buy:", *purchase_lines(bought), sep="\n")
    curves = {}
    if args.scaling is not None:
        print("", "the best that fits at the same batch a rank:", sep="\n")
        curves = scaling(case, find_machine(args.paro_machine), args.paro_group_size)
    if args.json is not None:
        text = json.dumps(fields_of(case, rows, found, bought, curves), indent=1)
        write_text(args.json, text + "\n")
    if args.plot is not None:
        draw_front(args.plot, case, rows, found)
    if args.scaling is not None:
        draw_scaling(args.scaling, curves, f"MFU on {case.machine.name}, same batch a rank")
    if args.trace is not None or args.timeline is not None:
        draw_step(args, case, found.best or found.least)
    if found.best is None:
        raise ValueError(why_nothing_fits(case, found))


def fields_of(
    case: Case,
    rows: Sequence[Estimate],
    found: Plan,
    bought: Sequence[dict[str, Any]],
    curves: dict[str, list[tuple[int, float]]],
) -> dict[str, Any]:
    """What --json holds: rows and candidates are best first."""
    weighed = (found.best, found.runner_up, *found.front, found.least)
    candidates = {id(estimate): estimate for estimate in weighed if estimate}
    return {
        "case": title(case),
        "machine": case.machine.name,
        "world_size": case.world_size,
        "memory_limit_bytes": case.limit.usable_bytes,
        "rows": [as_json(case, row) for row in rows if not row.setting.materialize.rotates],
        "rotated": [as_json(case, row) for row in rows if row.setting.materialize.rotates],
        "candidates": [as_json(case, estimate) for estimate in best_first(candidates.values())],
        "best": None if found.best is None else as_json(case, found.best),
        "runner_up": None if found.runner_up is None else as_json(case, found.runner_up),
        "least": as_json(case, found.least),
        "num_settings": found.num_settings,
        "more": list(bought),
        "scaling": curves,
    }


def scaling(
    case: Case, machine: Machine, group_size: int | None
) -> dict[str, list[tuple[int, float]]]:
    """MFU over ranks, at the batch of a rank as given, for some strategies and for the best.

    From one group of `machine` on, by doubling; where collectives were measured on the measured
    ranks alone. All degrees are weighed, all other flags are as given; the best are printed as they
    are found.
    """
    per_rank = case.global_batch_size // case.world_size
    curves: dict[str, list[tuple[int, float]]] = {"best that fits": []}
    as_given = Freedom(
        micro_batch_sizes=(case.micro_batch_size,),
        collectives=(case.collective,),
        recomputes=(case.model.recompute,),
    )
    ranks = machine.world_size if machine.measured else machine.group_size
    while ranks <= (machine.world_size if machine.measured else MOST_RANKS):
        own = replace(
            case,
            machine=replace(machine, uneven=()).for_world(ranks, told="--scaling"),
            group_size=min(group_size or machine.group_size, ranks),
            global_batch_size=per_rank * ranks,
        )
        estimator = Estimator(own)
        for name in ("NNG", "NIG", "III", "IIG", "GGG"):
            setting = own.setting(own.strategy(name))
            if own.why_not(setting.strategy, setting.materialize) is not None:
                continue
            estimate = estimator.estimate(setting)
            if estimate.fits:
                curves.setdefault(name, []).append((ranks, estimate.mfu))
        best = best_that_fits(own, as_given)
        if best is not None:
            curves["best that fits"].append((ranks, best.mfu))
            print(f"{ranks:7,} ranks: MFU {best.mfu:.1%} with {best.setting.describe()}")
        ranks *= 2
    return curves


def draw_step(args: Namespace, case: Case, chosen: Estimate) -> None:
    """One step of the best setting, of at most two micro-batches, stream by stream."""
    size = chosen.setting.micro_batch_size
    few = replace(
        case,
        micro_batch_size=size,
        global_batch_size=size * case.world_size * min(2, chosen.num_micro_batches),
    )
    spans = Estimator(few).estimate(chosen.setting, record=True).timeline.spans
    if args.trace is not None:
        write_text(args.trace, chrome_trace(spans))
    if args.timeline is not None:
        draw_timeline(args.timeline, spans, chosen.setting.describe())


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
