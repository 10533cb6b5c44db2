"""tools/plan.py: its JSON fields, tables, files and mistakes, without torch."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from paro.planning.estimator import Estimator
from paro.planning.planner import TIE
from paro.precision import PrecisionConfig
from paro.strategy import legal_letters
from tests.helpers.commands import measured, output_of, printed
from tests.helpers.processes import python_apart
from tests.helpers.refusals import refused
from tests.paro.planning.cases import BF16, plan_request
from tools import plan
from tools.plan import main
from tools.planning.pictures import chrome_trace
from tools.planning.tables import as_json, letter_rows, rows_table

CASE = (
    "--llama-preset 7B --num-layers 3 --paro-machine dgx-a100-roce100 --world-size 16 "
    "--paro-group-size 8 --micro-batch-size 2 --global-batch-size 64 --seq-length 512 --bf16 "
    "--device-memory-gb 14"
)


def planned(flags: str) -> dict[str, Any]:
    fields: dict[str, Any] = measured(main, *flags.split())[1]
    return fields


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
    assert "planner: chose" in out
    assert "what more would buy" in out
    assert "memory x 2: nothing\n" in out
    assert {row["speedup"] for row in fields["more"] if row["what"].startswith("memory")} == {1.0}
    bandwidth = next(row for row in fields["more"] if row["what"] == "inter bandwidth x 2")
    assert bandwidth["speedup"] > 1 + TIE
    assert f"{bandwidth['speedup']:.3f} times as fast" in out


def test_a_model_that_fits_nowhere_is_one_line_and_a_status(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    words = [*CASE.split(), "--device-memory-gb", "2", "--json", str(path)]
    told = "--device-memory-gb 2: ... use larger devices"
    out = output_of(lambda: refused(lambda: main(words), told))
    assert "as given nothing fits the 2 GB of a device\nGGG needs the least: " in out
    assert "; no flag is enough alone\n" in out
    assert len(re.findall(r"^[NIG=]{3,} .* no flag alone$", out, re.MULTILINE)) > 5
    assert json.loads(path.read_text(encoding="utf-8"))["best"] is None


@pytest.mark.verify
def test_where_nothing_fits_as_given_the_smallest_change_is_named() -> None:
    flags = CASE.replace("--num-layers 3", "--num-layers 8").replace("size 2 ", "size 4 ").split()
    flags += ["--device-memory-gb", "8.5", "--memory-margin", "0"]
    summary, table = (part.splitlines() for part in printed(main, *flags).split("\n\n")[1:3])
    assert summary[0] == "as given nothing fits the 8.5 GB of a device"
    assert re.match(r"GGG needs the least: 9\.\d GB at the ", summary[1])
    assert summary[2].startswith("largest part: communicators; enough alone: ")
    blocks = "--recompute-granularity full --recompute-method block --recompute-num-layers"
    found = re.search(rf"{blocks} (\d+)", summary[2])
    assert found
    for count, fits in ((int(found[1]), True), (int(found[1]) - 1, False)):
        out = printed(main, *flags, *blocks.split(), count)
        assert ("as given nothing fits" not in out) is fits
    fastest = re.match(r"([NIG]{3}) .* ([\d.]+) +([\d.]+)  (--.*)", table[1])
    assert fastest
    out = printed(main, *flags, *fastest[4].split())
    row = re.search(rf"^{fastest[1]} +([\d.]+) .* ([\d.]+) +[\d,]+ ", out, re.M)
    assert row
    assert row.groups() == fastest.groups()[1:3]


def test_letters_that_mean_the_same_are_one_row() -> None:
    out = printed(main, *CASE.replace("--world-size 16", "--world-size 8").split())
    table = out.split("\n\n")[1].splitlines()
    names = [line.split()[0] for line in table[1:] if not line.startswith(("*", "nodes: "))]
    assert "III=IIG=IGG=GIG=GGG" in {"=".join(sorted(n.split("="), reverse=True)) for n in names}
    assert sorted("=".join(names).split("=")) == sorted(legal_letters())


@pytest.mark.verify
def test_a_search_among_what_rotates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MOST_RANKS", 16)
    fields = planned(f"{CASE} --paro-materialize rotate")
    assert {row["materialize"] for row in fields["candidates"]} == {"rotated"}
    assert sorted(row["strategy"] for row in fields["rows"]) == sorted(legal_letters())
    rotated = {(row["strategy"], row["materialize"]) for row in fields["rotated"]}
    assert rotated == {*product(("III", "IIG"), ("rotated", "rotated in place"))}
    curve = tmp_path / "curve.png"
    main([*CASE.split(), "--paro-materialize", "rotate", "--scaling", str(curve)])
    assert curve.exists()


def curves_of(tmp_path: Path, flags: str) -> dict[str, list[list[float]]]:
    request = CASE.replace("--paro-group-size 8 ", "")
    fields = planned(f"{request} --scaling {tmp_path / 'curve.png'} {flags}")
    found: dict[str, list[list[float]]] = fields["scaling"]
    return found


def test_what_was_measured_is_planned_for_the_ranks_it_was_measured_on(tmp_path: Path) -> None:
    machine = "--paro-machine examples/measured/steps-100mbit/steps-per-rank-deep-1.json"
    model = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 172 --num-attention-heads 4"
    flags = f"{machine} {model} --vocab-size 64 --seq-length 32 --world-size 8"
    curves = curves_of(tmp_path, f"{flags} --micro-batch-size 1 --global-batch-size 8")
    assert [ranks for ranks, _ in curves["best that fits"]] == [8]


def test_a_trace_has_every_span() -> None:
    given = plan_request(global_batch_size=64)
    estimate = Estimator(given).estimate(given.candidate(given.strategy("IIG")), record=True)
    events = json.loads(chrome_trace(estimate.timeline.activities))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(estimate.timeline.activities)
    end = max(event["ts"] + event["dur"] for event in spans)
    assert end == pytest.approx(1e6 * estimate.seconds)
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


@pytest.mark.parametrize(
    ("precision", "column", "field", "bits"),
    [
        (replace(BF16, optimizer="muon"), "Muon s", "muon_seconds", 16),
        (BF16.with_inter_bits(4), "packing s", "packing_seconds", 4),
    ],
)
def test_newton_schulz_and_codes_have_a_column_and_a_field(
    precision: PrecisionConfig, column: str, field: str, bits: int
) -> None:
    for case, has_column in ((plan_request(), False), (plan_request(precision=precision), True)):
        rows = letter_rows(case)
        assert (column in rows_table(case, rows).splitlines()[0]) is has_column
        fields = {row.candidate.name: as_json(case, row) for row in rows}
        seconds = {name: row[field] for name, row in fields.items()}
        # Every rank of NNN repeats all of Newton-Schulz; GGG packs nothing once a step.
        assert (seconds["NNN"] > seconds["GGG"]) is has_column
        assert (seconds["IIG"] > 0) is has_column
        assert (seconds["GGG"] > 0) is (has_column and bits == 16)
        names = ("inter_grad_bits", "inter_param_bits")
        found = {row[name] for row in fields.values() for name in names}
        assert found == {bits if has_column else 16}
