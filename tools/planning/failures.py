"""Expected progress of a plan while nodes fail, recovering from disk and from memory."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paro.errors import check_positive, count_text
from paro.layout import Unit
from paro.machine.machine import Nic
from paro.planning.estimator import Estimate, Estimator
from paro.planning.planner import SearchResult, best_that_fits
from paro.planning.search_space import PlanRequest, SearchSpace
from paro.precision import BYTES_OF
from paro.spec.run_spec import Materialize
from paro.spec.states import MASTER, bytes_of
from paro.spec.units import units_of, units_of_run
from paro.topology import count_nodes
from tools.planning.goodput import Failures, from_disk, from_memory

Row = dict[str, Any]  # a setting, how it recovers, and the tokens a second that remain
_MOST_NODES = 2  # that the settings to compare may lose


def failures_of(args: Namespace, request: PlanRequest) -> Failures:
    """Return the failures of --mtbf-hours and its companions; a `UserError` names the flag to
    change."""
    check_positive(storage_gb_per_second=args.storage_gb_per_second)
    rate = args.storage_gb_per_second * 1e9
    node = request.ranks_per_node or request.machine.group_size
    frozen = (
        sum(unit.frozen.numel for unit in _units(request)) * BYTES_OF[request.precision.compute]
    )
    trained = _trained_bytes(request)
    return Failures(
        num_nodes=count_nodes(request.world_size, node),
        mtbf_hours=args.mtbf_hours,
        restart_seconds=args.restart_seconds,
        checkpoint_seconds=(frozen + trained) / rate,
    )


def expected(request: PlanRequest, found: SearchResult, failures: Failures) -> list[Row]:
    """Return the best setting of a plan, and the best that survive more nodes; best first."""
    if found.best is None:
        return []
    settings = [found.best]
    for survive in range(request.survive + 1, min(_MOST_NODES, failures.num_nodes - 1) + 1):
        # With the micro-batch size and recomputation of the best, as for what more would buy.
        candidate = found.best.candidate
        space = SearchSpace(
            micro_batch_sizes=(candidate.micro_batch_size,),
            collectives=(candidate.collective,),
            recomputes=(candidate.recompute,),
        )
        best = best_that_fits(replace(request, survive=survive), space)
        if best is not None and all(best.candidate != other.candidate for other in settings):
            settings.append(best)
    rows = [row for setting in settings for row in _rows(request, setting, failures)]
    return sorted(rows, key=lambda row: -row["tokens_per_second"])


def _rows(request: PlanRequest, setting: Estimate, failures: Failures) -> list[Row]:
    survives = request.limits.survival(setting.candidate.strategy).nodes
    by_state = {"disk": from_disk(failures)}
    if survives:
        by_state["memory"] = from_memory(
            failures,
            survives=survives,
            step_seconds=setting.seconds,
            transfer_seconds=_transfer_seconds(request, setting),
        )
    return [
        {
            "setting": setting.candidate.describe(),
            "survives": survives,
            "recovers_from": name,
            "goodput": goodput.share,
            # Of work between two checkpoints; None: none is needed.
            "checkpoint_seconds": None if math.isinf(seconds) else seconds,
            "copy_steps": goodput.copy_steps,  # --non-persistent-save-interval
            "tokens_per_second": goodput.share * setting.tokens_per_second,
        }
        for name, goodput in by_state.items()
        for seconds in [goodput.checkpoint_seconds]
    ]


def _transfer_seconds(request: PlanRequest, setting: Estimate) -> float:
    """Compute the time to send a new node its states, by its ranks' shares of the links."""
    machine = request.machine
    if machine.inter is None:
        return 0.0
    ranks = machine.group_size if machine.nic is Nic.SHARED else 1
    num_bytes = _trained_bytes(request) / setting.candidate.strategy.optim
    return num_bytes / (machine.inter.bits_per_second / 8 / ranks)


def _units(request: PlanRequest) -> tuple[Unit, ...]:
    trains = request.trained.__contains__
    return units_of(request.model, world_size=request.world_size, is_trained=trains)


def _trained_bytes(request: PlanRequest) -> int:
    """Count the bytes of all trained parameters: master and moments."""
    candidate = request.candidate(request.strategy("NNN"))
    run = Estimator(request).run_spec(replace(candidate, materialize=Materialize.GATHER))
    return sum(
        numel * bytes_of([state])
        for spec in run.specs(units_of_run(run))
        if spec.buffer.trains
        for whole in [spec.layout.numel]
        for state, numel in (spec.optimizer_numels(whole) | {MASTER: whole}).items()
    )


def failures_table(failures: Failures, rows: Sequence[Row]) -> list[str]:
    """Return the lines of a plan about failures."""
    takes = f"a checkpoint takes {failures.checkpoint_seconds:.1f} s"
    takes += ", in which training waits or, with --async-save, no other begins"
    lines = [f"{failures.describe()} hours; {takes}:"]
    for row in rows:
        seconds = row["checkpoint_seconds"]
        saves = "no checkpoints" if seconds is None else f"checkpoints every {_time_text(seconds)}"
        if row["copy_steps"] is not None:
            saves = f"local copies every {count_text(row['copy_steps'], 'step')}, {saves}"
        lines.append(
            f"{row['tokens_per_second']:12,.0f} tokens/s, goodput {row['goodput']:.2%}, from "
            f"{row['recovers_from']}: {row['setting']}; "
            f"{count_text(row['survives'], 'node')} may be lost; {saves}"
        )
    return lines


def _time_text(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds < 7200 else f"{seconds / 3600:,.1f} hours"
