"""A plan refuses what the training that it would launch refuses."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from paro.arguments.flag_parser import by_flag
from paro.machine.files import machine_to_json
from paro.planning.search_space import PlanRequest, micro_batch_sizes
from tests.helpers.refusals import refused
from tests.paro.config.test_refusals import MISTAKES, OF_SHARED_SAMPLES
from tests.paro.config.test_run import SMALL
from tests.paro.planning.cases import machine, plan_request
from tools.planning.request import make_parser, plan_request_of_args, with_context

KNOWN = make_parser()._option_string_actions.keys()
# What only a training lacks, which has to measure its machine.
OF_MACHINES = ("--paro-collective auto", "--context-parallel-size auto")


def of_plan(words: str) -> str | None:
    """The words if tools/plan.py has all of their flags."""
    flags = {flag.partition("=")[0] for flag, *_ in by_flag(shlex.split(words))}
    return words if flags <= KNOWN and not words.startswith(OF_MACHINES) else None


def planned(words: str) -> PlanRequest:
    args, _ = with_context(make_parser().parse_args(shlex.split(words)))
    return plan_request_of_args(args)


@pytest.mark.parametrize(
    ("ranks", "words", "told"),
    [
        (ranks, *row)
        for ranks, rows in ((4, MISTAKES), (8, OF_SHARED_SAMPLES))
        for row in rows
        if of_plan(row[0])
    ],
)
def test_what_a_training_refuses_a_plan_refuses(
    ranks: int, words: str, told: str, tmp_path: Path
) -> None:
    path = tmp_path / "machine.json"
    path.write_text(machine_to_json(machine(world_size=ranks, group_size=ranks // 2, inter=20)))
    groups = [shlex.join(group) for group in by_flag(shlex.split(SMALL)) if group[0] in KNOWN]
    flags = f"{' '.join(groups)} --paro-machine {path}"
    planned(flags)
    refused(lambda: planned(f"{flags} {words}"), told)


def test_micro_batches_are_such_as_fp8_takes() -> None:
    given = plan_request(seq_length=8, global_batch_size=4 * 32)
    assert micro_batch_sizes(given) == (1, 2, 4)
    in_fp8 = replace(given, model=replace(given.model, fp8_format="e4m3"))
    assert micro_batch_sizes(in_fp8) == (2, 4)
