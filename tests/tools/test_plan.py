"""tools/plan.py: its JSON fields, tables, files and mistakes, without torch; goodput, pictures."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from paro.planning.planner import TIE
from paro.planning.planner import plan as best_plan
from paro.planning.search_space import PlanRequest
from paro.planning.step_costs import simulate
from paro.strategy import legal_letters
from tests.helpers.refusals import measured, output_of, printed, refused
from tests.helpers.scripts import python_apart
from tests.paro.planning.cases import FEW, costs, machine, plan_request
from tools.plan import main
from tools.planning import goodput, pictures
from tools.planning.goodput import COPY_SHARE, Failures, from_disk, from_memory
from tools.planning.pictures import chrome_trace, draw_front
from tools.planning.tables import letter_rows, rotated_rows

CASE = (
    "--llama-preset 7B --num-layers 3 --paro-machine dgx-a100-roce100 --world-size 16 "
    "--paro-group-size 8 --micro-batch-size 2 --global-batch-size 64 --seq-length 512 --bf16 "
    "--device-memory-gb 14"
)
MEASURED = (
    "--paro-machine examples/measured/steps-100mbit/steps-per-rank-deep-1.json --num-layers 2 "
    "--hidden-size 64 --num-attention-heads 4 --vocab-size 64 --seq-length 32 --world-size 8"
)


def planned(flags: str) -> dict[str, Any]:
    return measured(main, *flags.split())[1]


@pytest.mark.slow("plans every strategy")
def test_rows_hold_every_letter_strategy_best_first() -> None:
    out, fields = measured(main, *CASE.split(), "--mtbf-hours", 10)
    rows = fields["rows"]
    assert sorted(row["strategy"] for row in rows) == sorted(legal_letters())
    for one, other in pairwise(rows):
        assert one["fits"] >= other["fits"]
        if one["fits"] is other["fits"]:
            assert one["step_seconds"] <= other["step_seconds"] * (1 + TIE)
    contract = {"strategy", "fits", "memory_bytes", "step_seconds", "tokens_per_second", "mfu",
                "intra_bytes", "inter_bytes"}  # fmt: skip
    assert all(contract <= row.keys() for row in rows)
    assert all((row["survives"]["nodes"] > 0) is (row["strategy"][2] != "G") for row in rows)
    tokens = 64 * 512
    assert all(r["tokens_per_second"] == pytest.approx(tokens / r["step_seconds"]) for r in rows)
    assert fields["candidates"][0] == fields["best"]
    assert fields["memory_limit_bytes"] == 14e9
    assert {row["materialize"] for row in rows} == {"gathered"}
    assert fields["rotated"] == []
    fastest = min(r["step_seconds"] for r in rows if r["fits"])
    assert fields["best"]["step_seconds"] <= fastest * (1 + TIE)
    assert {row["what"] for row in fields["more"]} >= {"memory x 2", "inter bandwidth x 2"}
    failing = fields["failures"]
    assert failing["num_nodes"] == 2
    assert sorted(row["recovers_from"] for row in failing["settings"]) == ["disk", "disk", "memory"]
    speeds = [row["tokens_per_second"] for row in failing["settings"]]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] < fields["best"]["tokens_per_second"]
    assert "a node fails every 10 hours, one of the 2 nodes every 5.0 hours; a checkpoint" in out
    assert "* NNN needs" in out
    assert "memory x 2: nothing\n" in out
    assert {row["speedup"] for row in fields["more"] if row["what"].startswith("memory")} == {1.0}
    bandwidth = next(row for row in fields["more"] if row["what"] == "inter bandwidth x 2")
    assert bandwidth["speedup"] > 1 + TIE
    assert f"{bandwidth['speedup']:.3f} times as fast" in out


@pytest.mark.slow("searches all candidates of a model")
def test_a_model_that_fits_nowhere_is_one_line_and_a_status(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    words = [*CASE.split(), "--device-memory-gb", "2", "--json", str(path)]
    message = "--device-memory-gb 2: ... use larger devices"
    out = output_of(lambda: refused(lambda: main(words), message))
    assert "as given nothing fits the 2 GB of a device\nGGG needs the least: " in out
    assert "; no flag is enough alone\n" in out
    assert len(re.findall(r"^[NIG=]{3,} .* no flag alone$", out, re.MULTILINE)) > 5
    assert json.loads(path.read_text(encoding="utf-8"))["best"] is None


@pytest.mark.slow("searches all candidates of a model")
def test_letters_that_mean_the_same_are_one_row() -> None:
    out = printed(main, *CASE.replace("--world-size 16", "--world-size 8").split())
    table = out.split("\n\n")[1].splitlines()
    names = [line.split()[0] for line in table[1:] if not line.startswith(("*", "nodes: "))]
    assert "III=IIG=IGG=GIG=GGG" in {"=".join(sorted(n.split("="), reverse=True)) for n in names}
    assert sorted("=".join(names).split("=")) == sorted(legal_letters())


@pytest.mark.slow("searches all candidates of a model")
def test_what_was_measured_is_planned_for_the_ranks_it_was_measured_on(tmp_path: Path) -> None:
    flags = f"{MEASURED} --micro-batch-size 1 --global-batch-size 8 --bf16 --device-memory-gb 14"
    fields = planned(f"{flags} --scaling {tmp_path / 'curve.png'}")
    assert [ranks for ranks, _ in fields["scaling"]["best that fits"]] == [8]


def test_a_trace_has_every_span() -> None:
    given = plan_request(global_batch_size=64)
    timeline = simulate(costs(given), record=True)
    events = json.loads(chrome_trace(timeline.activities))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(timeline.activities)
    end = max(event["ts"] + event["dur"] for event in spans)
    assert end == pytest.approx(1e6 * timeline.seconds)
    assert {"forward", "backward", "gather", "reduce", "finish", "publish"} <= {
        event["cat"] for event in spans
    }


@pytest.mark.slow("imports matplotlib")
def test_pictures_and_traces_are_written(tmp_path: Path) -> None:
    front, step, trace = (tmp_path / name for name in ("front.png", "step.png", "step.json"))
    printed(main, *CASE.split(), "--plot", front, "--timeline", step, "--trace", trace)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (front, step))
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.verify
def test_a_trillion_parameters_on_16384_ranks_need_few_simulations_and_no_torch(
    tmp_path: Path,
) -> None:
    """Of 19,840 candidates bounds leave 1 in 60; memory as the operating system measures it."""
    model = (
        "--num-layers 128 --hidden-size 25600 --ffn-hidden-size 68288 --num-attention-heads 160 "
        "--vocab-size 51200 --seq-length 2048 --bf16"
    )
    program = (
        "import re, sys\n"
        "from tools.plan import main\n"
        f"main({[*model.split(), '--paro-machine', 'dgx-h100', '--world-size', '16384']!r}"
        " + ['--global-batch-size', '32768', '--device-memory-gb', '141'])\n"
        # The system's own record of a child starts with the size of its parent.
        "peak = re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]\n"
        "print(int(peak) * 1024, 'torch' in sys.modules)"
    )
    out = python_apart(program)
    peak, torch = out.splitlines()[-1].split()
    assert "1009.47B parameters on 16384 ranks" in out
    assert torch == "False"
    assert int(peak) < 1 << 30
    counts = re.search(r"(\d+) candidates, (\d+) of them simulated", out)
    assert counts
    assert int(counts[1]) == 19840
    assert int(counts[2]) <= 19840 // 60


def simulated(between: float, work: float, cost: float, restart: float, segments: int) -> float:
    """The share of useful work with exponential failures, also while a run restarts."""
    draw = random.Random(1)
    total = 0.0
    for _ in range(segments):
        need, at_start = work + cost, False
        while True:
            length = need + (restart if at_start else 0.0)
            failure = draw.expovariate(1 / between)
            if failure >= length:
                total += length
                break
            total += failure
            at_start = True
    return segments * work / total


def test_the_share_is_that_of_simulated_failures() -> None:
    for between, work, cost, restart in ((3600, 900, 30, 150), (600, 300, 60, 120)):
        expected = simulated(between, work, cost, restart, 40_000)
        # Daly's formula restarts before the first segment too: once less is the same ratio.
        own = goodput._share(between, work, cost, restart)
        assert own == pytest.approx(expected, rel=0.03)


def test_memory_beats_disk_where_a_node_may_be_lost() -> None:
    fields = {"mtbf_hours": 8.0, "restart_seconds": 120.0, "checkpoint_seconds": 30.0}
    failures = Failures(num_nodes=8, **fields)
    given = {"step_seconds": 10.0, "transfer_seconds": 5.0}
    shares = [from_memory(failures, survives=k, **given).share for k in range(4)]
    assert shares == sorted(shares)
    assert shares[0] < from_disk(failures).share < shares[1]
    every_step = goodput._share(failures.seconds_between, 10.0, 10.0 * COPY_SHARE, 125.0)
    assert every_step < shares[3] < 1.0


@pytest.mark.verify
@pytest.mark.parametrize(
    "case",
    [
        plan_request(memory_bytes=10**8),  # nothing fits
        plan_request(machine=machine(intra=30, inter=25), micro_batch_size=1),  # close together
        plan_request(),
        plan_request(machine=machine(world_size=8), global_batch_size=48),
    ],
)
def test_labels_cover_neither_each_other_nor_points(
    case: PlanRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.text import Text  # takes long to import, for every worker

    from tools.planning.labels import is_within

    drawn: list[Any] = []

    @contextmanager
    def drawing(*given: Any, **more: Any) -> Iterator[Any]:
        with own(*given, **more) as (figure, panels):
            yield figure, panels
            drawn.append(figure)
            figure.canvas.draw()
            check(*panels)

    def check(axes: Any) -> None:
        # An annotation's own extent has the line to its point in it.
        named = {text.get_text(): Text.get_window_extent(text) for text in axes.texts}
        assert {name for text in named for name in text.split()} >= {"NNN", "IIG", "GGG"}
        for (name, box), (other_name, other) in combinations(named.items(), 2):
            assert not box.fully_overlaps(other), f"{name} and {other_name}"
        for row in rows:
            x, y = axes.transData.transform((row.memory_bytes / 1e9, row.seconds))
            covering = [name for name, box in named.items() if box.fully_contains(x, y)]
            assert not covering, f"the point of {row.candidate.name} is under {covering}"
        inside = axes.get_window_extent()
        outside = {name: box for name, box in named.items() if not is_within(box, inside)}
        assert not outside, inside
        for axis in (axes.xaxis, axes.yaxis):
            ticks = [*axis.get_majorticklabels(), *axis.get_minorticklabels()]
            seen = [tick for tick in ticks if tick.get_visible() and tick.get_text()]
            shown = [tick.get_window_extent() for tick in seen]
            assert not any(box.fully_overlaps(other) for box, other in combinations(shown, 2))

    own = pictures.drawing
    monkeypatch.setattr(pictures, "drawing", drawing)
    rows = (*letter_rows(case), *rotated_rows(case))
    draw_front(tmp_path / "front.png", case, rows, best_plan(case, FEW))
    assert drawn, "the labels were checked"
