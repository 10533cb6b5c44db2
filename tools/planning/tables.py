"""The results of a plan as text tables and as JSON fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from operator import attrgetter
from typing import Any

from model.units import num_parameters
from paro.errors import count_text
from paro.machine.machine import rate_text
from paro.planning.description import exposed_text, seconds_text
from paro.planning.estimator import Estimate, Estimator
from paro.planning.planner import (
    FRONT_STEP,
    MEMORY_TIE,
    SearchResult,
    best_first,
    best_that_fits,
)
from paro.planning.remedies import estimator_of, rank_changes, single_changes
from paro.planning.search_space import Candidate, PlanRequest, SearchSpace
from paro.spec.run_spec import Materialize
from paro.strategy import legal_letters
from paro.text import align, ranks_text
from paro.topology import Link
from tools.shared.output import text_table

# Columns that are there only if any row has a figure.
EXTRA: dict[str, Callable[[Estimate], float]] = {
    "host GB": lambda row: row.host_bytes / 1e9,
    "packing s": attrgetter("coding_seconds"),
    "Muon s": attrgetter("muon_seconds"),
}

NODES = "nodes: how many may be lost at once while the others still hold every state"


def letter_rows(request: PlanRequest) -> tuple[Estimate, ...]:
    """Return every legal letter strategy, gathered, with the other flags as given; best first."""
    return _rows(request, (Materialize.GATHER,))


def rotated_rows(request: PlanRequest) -> tuple[Estimate, ...]:
    """Predict letter strategies under which weights may rotate, out of place and in place."""
    return _rows(request, (Materialize.ROTATE, Materialize.ROTATE_IN_PLACE))


def _rows(request: PlanRequest, materializes: Sequence[Materialize]) -> tuple[Estimate, ...]:
    estimator = Estimator(request)
    return best_first(
        estimator.estimate_bits(replace(request.candidate(strategy), materialize=materialize))[0]
        for strategy in map(request.strategy, legal_letters())
        for materialize in materializes
        if request.infeasible_reason(strategy, materialize) is None
    )


def enough_alone(request: PlanRequest, least: Candidate) -> str:
    """Return the single changes after which a candidate fits, in words."""
    enough = [change.what for change in single_changes(request, least)]
    enough += [what for what, flags in rank_changes(request, least) if not flags]
    changes = "; or ".join(enough)
    return f"enough alone: {changes}" if changes else "no flag is enough alone"


def title(request: PlanRequest) -> str:
    machine = request.machine
    return (
        f"{num_parameters(request.model) / 1e9:.2f}B parameters on "
        f"{ranks_text(request.world_size, request.group_size)}, machine {machine.name}; "
        f"{count_text(request.global_batch_size, 'sample')} of {request.seq_length} tokens a "
        "step, "
        f"{request.precision.describe()}"
    )


def _merged(rows: Sequence[Estimate]) -> list[tuple[str, Estimate]]:
    """Return rows with their names; rows of equal degrees are merged, as letters are on
    one group."""
    by_degrees: dict[tuple[object, ...], list[Estimate]] = {}
    for row in rows:
        by_degrees.setdefault(
            (row.candidate.strategy.degrees, row.candidate.materialize), []
        ).append(row)
    return [("=".join(row.candidate.name for row in same), same[0]) for same in by_degrees.values()]


def rows_table(request: PlanRequest, rows: Sequence[Estimate]) -> str:
    """Return one row per strategy: memory, step time, traffic and exposed communication of a rank.

    `NODES` explains a column. States in host memory, encoding and decoding of codes between groups,
    and Newton-Schulz have columns if there are any.
    """
    extra = {head: of for head, of in EXTRA.items() if any(map(of, rows))}
    return text_table(
        (
            {
                "strategy": name + ("" if row.fits else " *"),
                "GB": f"{row.memory_bytes / 1e9:.1f}",
                "states GB": f"{row.memory.allocations.states / 1e9:.1f}",
                "nodes": str(request.limits.survival(row.candidate.strategy).nodes),
                "s/step": f"{row.seconds:.3f}",
                "tokens/s": f"{row.tokens_per_second:,.0f}",
                "MFU": f"{row.mfu:.1%}",
                "intra GB": f"{row.sent.intra / 1e9:.2f}",
                "inter GB": f"{row.sent.inter / 1e9:.2f}",
                **{head: f"{of(row):.3f}" for head, of in extra.items()},
                "waits": exposed_text(row),
            }
            for name, row in _merged(rows)
        ),
        left=(0, -1),
    )


def on_bytes(request: PlanRequest) -> list[str]:
    """Say which bytes the columns leave out, if any."""
    name = request.collective
    more = f"intra GB, inter GB: axis by axis; {name} sends more of them between groups"
    return [more] if name in ("flat", "ring") else []


def infeasible_notes(request: PlanRequest, rows: Sequence[Estimate]) -> list[str]:
    """Return one line for each strategy that does not fit, with its peak memory."""
    lines = [f"* {name} needs {e.memory.describe()}" for name, e in _merged(rows) if not e.fits]
    gigabytes = request.device_bytes / 1e9
    return [f"*: does not fit the {gigabytes:g} GB of a device", *lines] if lines else []


def nothing_fits(request: PlanRequest, rows: Sequence[Estimate]) -> list[str]:
    """Say, where no row fits, which one needs least and which changes make rows fit."""
    merged = _merged(rows)
    name, least = min(merged, key=lambda row: row[1].memory_bytes)
    parts = least.memory.parts()
    return [
        f"as given nothing fits the {request.device_bytes / 1e9:g} GB of a device",
        f"{name} needs the least: {least.memory.describe()}",
        f"largest part: {max(parts, key=lambda name: parts[name])}; "
        f"{enough_alone(request, least.candidate)}",
        "",
        _changes_table(request, merged),
    ]


def _changes_table(request: PlanRequest, merged: Sequence[tuple[str, Estimate]]) -> str:
    """Return for each row the flag after which it fits and is fastest; rows without one at the
    end."""
    entries = []
    for name, row in merged:
        fitting = (
            (estimator_of(change.request).estimate(change.candidate), change.what)
            for change in single_changes(request, row.candidate)
        )
        best = min(fitting, key=lambda pair: pair[0].seconds, default=None)
        entries.append(
            (best is None, best[0].seconds if best else row.memory_bytes, name, row, best)
        )
    cells = [("strategy", "GB", "then GB", "s/step", "fits with")]
    for *_, name, row, best in sorted(entries, key=lambda entry: entry[:2]):
        then = ("-", "-", "no flag alone")
        if best is not None:
            estimate, what = best
            then = f"{estimate.memory_bytes / 1e9:.1f}", f"{estimate.seconds:.3f}", what
        cells.append((name, f"{row.memory_bytes / 1e9:.1f}", *then))
    return align(cells, left=(0, -1))


def front_table(result: SearchResult) -> str:
    """Return the Pareto front of memory and time, fastest first, and the choice among it."""
    lines = [
        f"memory against time, all candidates (each at least {FRONT_STEP:.0%} faster than what "
        "needs less, or chosen):"
    ]
    for estimate in result.front:
        is_best = result.best is not None and estimate.candidate == result.best.candidate
        note = "(chosen) " if is_best else "" if estimate.fits else "(does not fit) "
        lines.append(
            f"{estimate.memory_bytes / 1e9:8.1f} GB  {estimate.seconds:9.3f} s  "
            f"{note}{estimate.candidate.describe()}"
        )
    named = (result.best, result.runner_up, *result.front)
    degrees = [each.candidate.strategy.name for each in named if each is not None]
    if example := next((name for name in degrees if "," in name), None):
        lines.append(
            f"degrees such as {example}: over how many neighbouring ranks one copy of parameters, "
            "of gradients and of optimizer state is sharded"
        )
    return "\n".join(lines)


def purchases(request: PlanRequest, result: SearchResult) -> list[dict[str, Any]]:
    """Return the speed-up from more memory, or from more bandwidth between or inside groups.

    More memory: the same candidates under another limit. More bandwidth: a search with the
    micro-batch size and the recomputation of the best candidate. A gain of at most 1% is none, as
    where the best is chosen.
    """
    bought = {
        f"memory x {factor:g}": result.with_memory(round(request.choice_bytes * factor))
        for factor in (1.25, 1.5, 2.0)
    }
    if request.machine.measured or result.best is None:  # measured times ignore links
        return [_purchase(what, best, result.best) for what, best in bought.items()]
    candidate = result.best.candidate
    search_space = SearchSpace(
        micro_batch_sizes=(candidate.micro_batch_size,), recomputes=(candidate.recompute,)
    )
    enough = result.best.seconds / (1 + MEMORY_TIE)
    for link in (Link.INTER, Link.INTRA):
        if (speed := request.machine.link(link)) is None:
            continue
        doubled = replace(speed, bandwidth=rate_text(2 * speed.bits_per_second))
        links: dict[str, Any] = {link.value: doubled}
        other = replace(request, machine=replace(request.machine, **links))
        bought[f"{link.value} bandwidth x 2"] = best_that_fits(other, search_space, enough)
    return [_purchase(what, best, result.best) for what, best in bought.items()]


def _purchase(what: str, better: Estimate | None, best: Estimate | None) -> dict[str, Any]:
    """Return the row of an upgrade, `best` the plan's own; without a speed-up it shows that one."""
    if best is not None and (better is None or best.seconds / better.seconds <= 1 + MEMORY_TIE):
        better = best
    return {
        "what": what,
        "step_seconds": None if better is None else better.seconds,
        "setting": None if better is None else better.candidate.describe(),
        "speedup": None if best is None or better is None else best.seconds / better.seconds,
    }


def purchase_lines(bought: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for row in bought:
        if row["step_seconds"] is None:
            lines.append(f"{row['what']}: still nothing fits")
            continue
        if row["speedup"] == 1.0:
            lines.append(f"{row['what']}: nothing")
            continue
        gain = "something fits" if row["speedup"] is None else f"{row['speedup']:.3f} times as fast"
        lines.append(
            f"{row['what']}: {seconds_text(row['step_seconds'])} a step, {gain}: {row['setting']}"
        )
    return lines


def as_json(request: PlanRequest, estimate: Estimate) -> dict[str, Any]:
    """Return the JSON fields of a row or a candidate."""
    candidate = estimate.candidate
    recompute = candidate.recompute
    return {
        "strategy": candidate.strategy.name,
        "degrees": list(candidate.strategy.degrees),
        "materialize": candidate.materialize.value,
        "group_size": request.group_size,
        "micro_batch_size": candidate.micro_batch_size,
        "num_micro_batches": estimate.num_micro_batches,
        "collective": candidate.collective,
        "recompute_granularity": None if recompute is None else recompute.granularity,
        "recompute_keeps_core": recompute is not None and recompute.keeps_core,
        "recompute_method": None if recompute is None else recompute.method,
        "recompute_num_layers": None if recompute is None else recompute.num_layers,
        "fits": estimate.fits,
        "memory_bytes": estimate.memory_bytes,
        "memory_parts": estimate.memory.parts(),
        "memory_moment": estimate.memory.name,
        "survives": asdict(request.limits.survival(estimate.candidate.strategy)),
        "model_state_bytes": estimate.memory.allocations.states,
        "step_seconds": estimate.seconds,
        "compute_seconds": estimate.timeline.compute_seconds,
        "exposed_seconds": estimate.timeline.exposed,
        "tokens_per_second": estimate.tokens_per_second,
        "mfu": estimate.mfu,
        "intra_bytes": estimate.sent.intra,
        "inter_bytes": estimate.sent.inter,
        "inter_grad_bits": estimate.precision.inter_grad_bits,
        "inter_param_bits": estimate.precision.inter_param_bits,
        "packing_seconds": estimate.coding_seconds,
        "muon_seconds": estimate.muon_seconds,
        "host_bytes": estimate.host_bytes,
    }


def fields_of(
    request: PlanRequest,
    rows: Sequence[Estimate],
    result: SearchResult,
    bought: Sequence[dict[str, Any]],
    curves: dict[str, list[tuple[int, float]]],
) -> dict[str, Any]:
    """Return the contents of --json; rows and candidates are sorted best first."""
    weighed = (result.best, result.runner_up, *result.front, result.least)
    candidates = {id(estimate): estimate for estimate in weighed if estimate}
    return {
        "case": title(request),
        "machine": request.machine.name,
        "world_size": request.world_size,
        "memory_limit_bytes": request.device_bytes,
        "rows": [as_json(request, row) for row in rows if not row.candidate.materialize.rotates],
        "rotated": [as_json(request, row) for row in rows if row.candidate.materialize.rotates],
        "candidates": [as_json(request, estimate) for estimate in best_first(candidates.values())],
        "best": result.best and as_json(request, result.best),
        "runner_up": result.runner_up and as_json(request, result.runner_up),
        "least": as_json(request, result.least),
        "num_settings": result.num_candidates,
        "more": list(bought),
        "scaling": curves,
    }
