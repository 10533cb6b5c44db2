"""Studies: flags of a run, trainings that run once, recoveries, mutants, pages and their rules."""

from __future__ import annotations

import copy
import json
import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from operator import attrgetter
from pathlib import Path
from statistics import median

import pytest

from paro.arguments.parser import parse_args
from paro.errors import RunError
from paro.strategy import legal_letters
from tests.helpers.ranks import ROOT
from tests.helpers.refusals import measured, refused
from tests.helpers.scripts import run_script
from tests.helpers.training import TINY
from tools.bench import (
    bench_outer,
    study_averages,
    study_bits,
    study_mup,
    study_recovery,
    study_store,
)
from tools.bench.fixed_runs import FIELDS, differences
from tools.bench.megatron_flags import command_line, degree_of, rule_lines
from tools.bench.mutation.mutants import apply, mutants_of
from tools.bench.planning.comparison import Comparison
from tools.bench.recovery import cases
from tools.bench.recovery.cases import Case
from tools.bench.recovery.gated import POINTS
from tools.bench.shared import trainings
from tools.bench.shared.trainings import Finished, Losses, read_finished, run_all
from tools.bench.study_optimizers import IN_PARTS, LIKE, MUON, ROUNDED, SHORTER, Job
from tools.bench.study_outer import ALONE, OPTIMIZERS, changed, jobs_for
from tools.bench.study_outer import report as report_of_outer
from tools.bench.study_plan import chapters_of


def test_trainings_of_studies_have_flags_of_a_run() -> None:
    bits = [
        f"{study_bits.FLAGS} {each.flags} --train-iters 4".split() for each in study_bits.VARIANTS
    ]
    sweeps = [sweep.words(1e-3, 400)[1:] for sweep in study_mup.sweeps_of([128, 512])]
    averages = [study_averages.flags_of(3, 800, 2e-3, saves) for saves in (None, Path("saves"))]
    cases = [ALONE, *OPTIMIZERS, *changed(OPTIMIZERS[0])]
    outer = [case.words(1e-3, 1, 800, 100) for case in cases]
    outer = [words[words.index("pretrain_llama.py") + 1 :] for words in outer]
    timing = Namespace(micro_batches=4, machine_file=Path("machine"), fp32=False)
    outer += [each.words(timing) for each in bench_outer.contenders(14)]
    for flags in (*bits, *sweeps, *averages, *outer):
        parse_args([*flags, "--mock-data", "--tokenizer-model", "x"])
    for name in LIKE:
        flags = Job(name, 1e-3, 2).flags(400, 20)
        args = parse_args([*flags[2 if name == IN_PARTS else 1 :], "--mock-data"])
        assert args.train_iters == (300 if name == SHORTER else 400)
        assert args.optimizer == ("muon" if LIKE[name] == MUON else "adam")
        assert (args.exp_avg_dtype == args.exp_avg_sq_dtype == "bf16") is (name == ROUNDED)


def test_a_study_of_outer_steps_changes_settings_of_the_best_optimizer() -> None:
    finished: Finished = {}
    while missing := [job for job in jobs_for(finished) if job.name not in finished]:
        job = missing[0]
        far = abs(math.log2(job.lr / (1e-3 if job.case.outer else 4e-3)))
        loss = 3.0 + 0.1 * far + 0.2 * abs(job.case.outer.get("momentum", 0.5) - 0.5)
        loss += 0.1 * abs(job.case.outer.get("lr", 1.0) - 1.0) + (job.case is ALONE)
        finished[job.name] = Losses(loss=[], held_out=[(1, loss)], seconds=1.0)
    assert len(finished) <= 60
    best = "2 groups, outer rate 1, momentum 0.5, learning rate 0.001"
    assert {f"{best}, seed 3", f"{best}, seed 1, 2 times the steps"} <= finished.keys()
    assert "4 groups, H 16, learning rate 0.001, seed 3" in finished
    assert (
        "| 2 groups, outer rate 1, momentum 0.5 | 0.001 | 3.0000, 3.0000, 3.0000 | +0.0000 | 100% |"
        in (report_of_outer(finished))
    )


@pytest.mark.verify
@pytest.mark.ranks
def test_thirty_kills_half_of_them_inside_saves(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    flags = ["--folder", tmp_path / "runs", "--json", out, "--kills", 30, "--inside", 15]
    done = run_script(["tools/bench/study_crashes.py", *flags], timeout=3000.0)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())
    assert figures["kills"] >= 30
    assert figures["inside_saves"] >= 15
    assert figures["inside_asynchronous_saves"] >= 7
    assert figures["complaints"] == []
    assert figures["survivors_gone_seconds"]["most"] < 60.0  # --distributed-timeout-minutes 1


SMALL = (
    "--distributed-backend gloo --mock-data --tokenizer-type NullTokenizer --vocab-size 128 "
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 1 --lr 0.001 --log-interval 1 --num-workers 0 --eval-iters 0 "
    "--peak-tflops 1 --distributed-timeout-minutes 1 --train-iters 60"
)


@pytest.mark.verify
@pytest.mark.root
@pytest.mark.ranks
def test_failures_are_recovered_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"rank": 1, "node in update": 2, "rank in recovery": 1, "rank in local copy": 1}
    case = Case(name="small", nodes=2, ranks_per_node=2, strategy="III", kinds=kinds)
    monkeypatch.setattr(cases, "MODEL", SMALL)
    monkeypatch.setattr(study_recovery, "CASES", (case,))
    _, found = measured(study_recovery.main, "--folder", tmp_path / "runs")
    assert len(found["failures"]) == 5
    assert all(failure["recovered"] for failure in found["failures"])
    assert max(failure["computed_again"] for failure in found["failures"]) <= 1
    # A rank may be killed before it prints what the others keep; the study says if more is missing.
    assert found["losses_compared"] >= 60 - len(found["failures"])


@pytest.mark.verify
@pytest.mark.root
@pytest.mark.process
def test_a_store_that_is_far_away_is_read_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = f"{SMALL} --global-batch-size 1 --split 1,0,0".replace("--mock-data ", "")
    monkeypatch.setattr(study_store, "MODEL", model)
    monkeypatch.setattr(study_store, "CORPUS_TOKENS", 2**16)
    _, found = measured(study_store.main, "--folder", tmp_path / "runs", "--rounds", 1)
    assert all(found[name] > 0 for name in study_store.GOALS)
    (only,) = found["rounds"]
    assert len(only["ms"]["during_saves"]) == len(only["ms"]["idle"]) > 0
    notes = [json.loads(line) for line in (tmp_path / "runs" / "notes").read_text().splitlines()]
    read = [span for _, method, path, span, _ in notes if method == "GET" and "x.bin" in path]
    assert read.count("bytes=0-131071") == 2, "once for a training, once beside its neighbour"
    written = [path for _, method, path, *_ in notes if method == "PUT"]
    unread = sum("/unread/" in path for path in written)
    assert 0 < unread == len(written) - unread


@pytest.mark.verify
@pytest.mark.root
@pytest.mark.process
def test_outer_steps_are_timed_beside_synchronous_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 32"
    shape += " --vocab-size 128 --seq-length 16"
    monkeypatch.setattr(bench_outer, "MODEL", shape)
    words = ("--folder", tmp_path / "runs", "--rounds", 1, "--inter", "100mbit")
    _, found = measured(bench_outer.main, *words, "--micro-batches", 1)
    names = [each.name for each in bench_outer.contenders(2)]
    assert [*found] == names
    for (only,) in found.values():
        assert only["mean"] > 0 < only["planned"]


def test_outer_steps_are_compared_with_a_group_alone_and_with_what_is_planned() -> None:
    steps = dict(
        zip([each.name for each in bench_outer.contenders(2)], (4, 2, 2, 1, 1), strict=True)
    )
    turns = {name: [bench_outer.Timed(mean=mean, planned=1.25)] for name, mean in steps.items()}
    rows = {name: row for name, *row in bench_outer.rows_of(turns)}
    once, twice = "1.00 (1.00-1.00)", "2.00 (2.00-2.00)"
    assert rows["outer steps"] == [
        "2.00",
        "1.60 (1.60-1.60)",
        twice,
        "0.50 (0.50-0.50)",
        once,
        "50.0%",
    ]
    assert rows["outer steps, delay 2"][2::3] == [once, "0.0%"]
    assert rows[bench_outer.ALONE][1:3] == ["0.80 (0.80-0.80)", once]


def test_steps_of_saves_are_told_by_the_log() -> None:
    log = (
        "saving checkpoint at iteration       2 to s3://b\n [now] iteration        3/       9 |\n"
        "  successfully saved checkpoint from iteration       2\n [now] iteration   4/   9 |\n"
    )
    assert [*study_store.during_saves(log)] == [3]


def test_the_points_of_kills_are_functions() -> None:
    for point in POINTS.values():
        assert callable(attrgetter(point.name)(import_module(point.module)))


STEPS = [dict.fromkeys(FIELDS, float(number)) for number in range(2)]


def test_the_last_bit_of_a_figure_and_a_missing_run_or_step_are_differences() -> None:
    before = {"IIG": STEPS}
    assert not list(differences(before, copy.deepcopy(before)))
    after = copy.deepcopy(before)
    after["IIG"][1]["lm_loss"] += 2.0**-52
    (line,) = differences(before, after)
    assert line.startswith("IIG, iteration 1.0: lm_loss 1.0 before, 1.0000000000000002 after")
    assert list(differences({"IIG": STEPS}, {})) == ["IIG: only before"]
    assert list(differences({}, {"IIG": STEPS})) == ["IIG: only after"]
    assert list(differences({"IIG": STEPS}, {"IIG": STEPS[:1]})) == ["IIG: 2 steps before, 1 after"]


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


def trained(name: str, launch: Sequence[str], flags: Sequence[str], folder: Path) -> Losses:
    """Instead of a training: the name is its loss."""
    if name == "fails":
        raise RunError("fails failed")
    return Losses(loss=[], held_out=[(1, float(name))], seconds=1.0, flags=" ".join(flags))


def test_what_is_done_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(**flags: list[str]) -> Finished:
        return run_all(lambda _: flags, tmp_path, at_once=2)

    def run_in_turn(finished: Finished) -> dict[str, list[str]]:
        return {str(number): ["--a"] for number in range(1, len(finished) + 2) if number < 5}

    file = tmp_path / "runs.json"
    monkeypatch.setattr(trainings, "train", trained)
    assert run_all(run_in_turn, tmp_path, at_once=2)["4"].last == 4.0
    with pytest.raises(RunError):
        run(**{"4": ["--a"], "5": ["--b"], "fails": [], "6": [], "7": [], "8": []})
    assert {"4", "5"} <= set(read_finished(file)), "those under way are kept"
    assert "8" not in read_finished(file), "none begins after a failure"
    monkeypatch.delattr(trainings, "train")
    assert set(run(**{"4": ["--a"], "5": ["--b"]})) >= {"4", "5"}
    refused(lambda: run(**{"4": ["--c"]}), "4 with other flags")
    for damaged in ("{", '{"1": {"loss": 1}}', "[]"):
        file.write_text(damaged)
        refused(lambda: read_finished(file), "runs.json")


def errors_of(found: Comparison) -> list[float]:
    return [abs(row.error) for row in found.rows]


@dataclass(frozen=True)
class StudyLimits:
    """The results of a study, as stated in docs/planning.md."""

    folder: str
    median_error: float  # of each table
    worst_error: float
    num_wrong: int  # pairs, and clear pairs
    num_clear_wrong: int
    least_clear: int
    auto: float  # at most this share longer than the best
    num_tables: int = 8
    memory: float = 0.003


STUDIES = (
    StudyLimits("steps-25mbit", 0.052, 0.132, 0, 0, 403, 0.034),
    StudyLimits("steps-100mbit", 0.062, 0.152, 9, 5, 349, 0.16),
    StudyLimits("part-25mbit", 0.152, 0.251, 0, 0, 269, 0.033, num_tables=4, memory=0.025),
    StudyLimits("part-100mbit", 0.179, 0.33, 3, 2, 263, 0.105, num_tables=4, memory=0.06),
)


@pytest.mark.verify
@pytest.mark.parametrize("limits", STUDIES, ids=lambda limits: limits.folder)
def test_recorded_steps_are_predicted(limits: StudyLimits) -> None:
    chapters = chapters_of(ROOT / "examples/measured" / limits.folder)
    everything = [row for chapter in chapters for row in chapter.compared.rows]
    assert all(abs(row.memory_error or 0.0) < limits.memory for row in everything)
    gathered = [c.compared for c in chapters if not c.collective.endswith("rotated")]
    assert len(gathered) == limits.num_tables
    assert all(len(comparison.rows) == len(legal_letters()) for comparison in gathered)
    assert all(median(errors_of(comparison)) < limits.median_error for comparison in gathered)
    assert max(max(errors_of(comparison)) for comparison in gathered) < limits.worst_error
    pairs = [pair for comparison in gathered for pair in comparison.pairs()]
    assert sum(pair.is_wrong for pair in pairs) <= limits.num_wrong
    clear = [pair for pair in pairs if pair.is_clear]
    assert sum(pair.is_wrong for pair in clear) <= limits.num_clear_wrong
    assert len(clear) >= limits.least_clear
    ratios = [ratio for comparison in gathered for ratio in comparison.choices]
    assert max(ratios) < 1 + limits.auto
    if limits.folder.startswith("part"):  # docs/finetuning.md: under the largest limit all fit
        assert all(chapter.compared.choices[-1] < 1.0325 for chapter in chapters)
    if limits.folder == "steps-25mbit":
        rotated = [c.compared for c in chapters if c.collective.endswith("rotated")]
        assert len(rotated) == 2
        assert max(max(errors_of(comparison)) for comparison in rotated) < 0.195
        assert not any(pair.is_wrong for comparison in rotated for pair in comparison.pairs())


def test_values_become_words_and_ranks_that_cut_the_model_multiply() -> None:
    arguments = {
        "--bf16": True,
        "--seed": "${REPEAT}",
        "--data-path": "$DATA/corpus",
        "--step-batch-size-schedule": "0:384 200B:768",
        "--hierarchical-context-parallel-sizes": "[2 2]",
    }
    assert list(command_line(arguments)) == [
        *("--bf16", "--seed", "1", "--data-path", "DATA/corpus"),
        *("--step-batch-size-schedule", "0:384 200B:768"),
        *("--hierarchical-context-parallel-sizes", "2", "2"),
    ]
    words = "--tensor-model-parallel-size 2 --lr 1 --pipeline-model-parallel-size 4"
    assert degree_of(f"{words} --context-parallel-size 2".split()) == 8


def test_the_page_says_what_the_rules_do() -> None:
    text = (ROOT / "docs" / "megatron.md").read_text(encoding="utf-8")
    missing = [line for line in rule_lines() if line not in text.splitlines()]
    assert not missing, "write it again: python tools/bench/megatron_flags.py MEGATRON_CHECKOUT ..."


BEFORE = """
class Ring:
    def size(self, a: int = 3) -> int:
        # a < a
        assert a < a, "a < a"
        return BODY
"""


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("comparison", "a < 4", "a <= 4"),
        ("comparison", "a is a", "a is not a"),
        ("arithmetic", "a + a", "a - a"),
        ("arithmetic", "a * a", "a // a"),
        ("boolean", "a and b", "a or b"),
        ("constant", "7", "8"),
        ("constant", "True", "False"),
        ("swap", "f(a, b)", "f(b, a)"),
    ],
)
def test_one_thing_changes_and_also_after_a_move(kind: str, old: str, new: str) -> None:
    text = BEFORE.replace("BODY", f"g({old})")
    found = [each for each in mutants_of("paro/ring.py", text) if each.old == old]
    assert [(each.kind, each.new) for each in found] == [(kind, new)]
    moved = text.replace("class", "import os\n\nx = 'é'\nclass")
    assert apply(found[0], moved) == moved.replace(f"g({old})", f"g({new})")
    assert apply(found[0], text.replace("size", "length")) is None


def test_calls_are_removed_and_texts_types_and_annotations_have_no_mutants() -> None:
    for call, kind in (("work.wait()", "wait"), ("self.close()", "call")):
        text = f"def f():\n    {call}\n    {call}\n"
        first, second = sorted(mutants_of("f.py", text), key=lambda each: each.nth)
        assert first.kind == second.kind == kind
        assert apply(second, text) == f"def f():\n    {call}\n    None\n"
    texts = ('raise ValueError(f"{1 + 1}")', 'return f"{a + 1}"', 'return "a" + b')
    for body in (*texts, "return isinstance(a, b)", "a: Literal[1]"):
        assert not list(mutants_of("f.py", f"def f(a: int = 3):\n    {body}\n")), body
