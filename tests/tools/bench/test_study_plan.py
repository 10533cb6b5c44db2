"""The study of steps: resumes after an interruption, runs its commands, and writes its page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from paro.collectives.schedule import Op
from paro.machine.files import machine_to_json, read_machine
from paro.machine.machine import Machine, Measured
from paro.topology import Axes
from tests.helpers.commands import write_lines
from tests.helpers.ranks import ROOT
from tests.helpers.refusals import refused
from tests.helpers.scripts import run_script
from tests.helpers.training import TINY
from tests.paro.planning.cases import link
from tools.bench import study_plan
from tools.bench.study_plan import COUNTS, StudyPart, main, parts, rows_of

PART = StudyPart(nic="per-rank", shape="deep")
MACHINE = Machine(name="", source="", world_size=8, group_size=4)
ROWS = (Measured(axes=Axes.INTRA, op=Op.ALL_GATHER, algorithm="native", bytes=64, seconds=1.0),)


def row(
    part: StudyPart, strategy: str, count: int, number: int = 1, turn: int = 1
) -> dict[str, Any]:
    place = {"nic": part.nic, "shape": part.shape, "round": number, "turn": turn}
    found = {"seconds": 1.0, "cpu_seconds": 0.2, "machine_seconds": 1.65, "peak_in_use": 50_000_000}
    what = {"setting": f"{strategy}@native", "micro_batches": count}
    return {**place, **what, **found, "exposed": {"gather": 0.1}}


def write_rows(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    write_lines(folder / "steps.jsonl", *rows)


def test_it_measures_what_is_missing_and_each_machine_once_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[list[str]] = []

    @contextmanager
    def cluster(spec: object) -> Iterator[object]:
        yield spec

    def run(made: Any, argv: Sequence[str]) -> int:
        words = list(argv)
        assert Path(words[0]).is_file()
        runs.append(words)
        if "--machine-file" in words:
            path = Path(words[words.index("--machine-file") + 1])
            inter = link(words[words.index("--inter-bandwidth") + 1])
            found = replace(MACHINE, name=path.stem, measured=ROWS, inter=inter)
            path.write_text(machine_to_json(found))
            return 0
        label = json.loads(words[words.index("--label") + 1])
        names = words[words.index("--settings") + 1].split(",")
        assert names == ["NNN@native", "GGG@native"]
        part, turns = StudyPart(nic=label["nic"], shape=label["shape"]), (1, 2, 3)
        cut = turns[:1] if len(runs) == 2 else turns  # the first call ends early
        found = [
            row(part, name.partition("@")[0], count, label["round"], turn)
            for name, count, turn in product(names, COUNTS, cut)
        ]
        write_rows(tmp_path, [*rows_of(tmp_path), *found])
        return 0

    monkeypatch.setattr(study_plan, "cluster", cluster)
    monkeypatch.setattr(study_plan, "run", run)
    command = ["measure", "--folder", str(tmp_path), "--settings", "NNN@native,GGG@native"]
    command += ["--rounds", "2", "--turns", "3", "--inter", "25mbit"]
    complete = 2 * len(list(parts())) * len(COUNTS) * 2 * 3
    for missed in (len(COUNTS) * 2 * 2, 0, 0):
        main(command)
        assert len(rows_of(tmp_path)) == complete - missed
    # A machine and steps each, and the interrupted run.
    assert len(runs) == 2 * 2 * len(list(parts())) + 1
    for part in parts():
        machines = [read_machine(path) for path in part.machine_files(tmp_path)]
        assert [machine.name for machine in machines] == [
            f"steps-{part.name}-1", f"steps-{part.name}-2",
        ]  # fmt: skip
        assert all(machine.measured == ROWS for machine in machines)
        wanted = "25mbit" if part.nic == "per-rank" else "100mbit"
        assert all(machine.inter == link(wanted) for machine in machines)


def test_a_failure_in_the_cluster_and_links_of_another_speed_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_plan, "cluster", lambda _: nullcontext())
    monkeypatch.setattr(study_plan, "run", lambda *_: 1)
    measure = ["measure", "--folder", str(tmp_path)]
    refused(lambda: main(measure), "failed, status 1")
    path = PART.machine_in(tmp_path, 1)
    path.write_text(machine_to_json(replace(MACHINE, inter=link("100mbit"))))
    for speed, told in (("25mbit", "is of NICs of 100mbit, not 25mbit"), ("25", "is no rate")):
        refused(partial(main, [*measure, "--inter", speed]), "--inter", told)


@pytest.mark.verify
def test_steps_are_timed_on_two_ranks(tmp_path: Path) -> None:
    rows = tmp_path / "steps.jsonl"
    train = f"{TINY} --bf16 --global-batch-size 2 --train-iters 10"
    settings = "GGG@native,2/2/2@ring+rotate"
    flags = ("--output", rows, "--settings", settings, "--counts", "1,2", "--turns", "2")
    flags += ("--train", train)
    done = run_script([ROOT / "tools/bench/planning/steps.py", *flags], nproc=2)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    of_turns = [
        {(found["setting"], found["micro_batches"]) for found in lines if found["turn"] == turn}
        for turn in (1, 2)
    ]
    assert of_turns == [set(product(settings.split(","), (1, 2)))] * 2
    assert len(lines) == 2 * 2 * (3 + 1)  # short steps have three visits in a turn
    for found in lines:
        assert found["seconds"] > 0
        assert found["peak_in_use"] > 0
        assert found["exposed"].keys() == {"gather", "reduce", "publish"}
