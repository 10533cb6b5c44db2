"""Benchmarks do equal work from equal losses; one real rank has links; the check of GPUs."""

from __future__ import annotations

import json
import math
import re
import tarfile
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from paro.collectives.schedule import Op
from paro.machine.collective_time import CollectiveTimes
from paro.machine.files import machine_to_json
from paro.machine.machine import Nic
from paro.optim import muon
from paro.spec.optim_config import MuonConfig
from paro.topology import Axis, Link
from tests.helpers.margins import assert_near
from tests.helpers.refusals import measured, refused, write_lines
from tests.helpers.scripts import run_script
from tests.helpers.training import TINY
from tests.helpers.warm_python import run_python
from tests.paro.planning.cases import machine
from tools.bench import bench_attention, bench_loader, bench_preprocess, bench_reporting
from tools.bench.ablated import in_parts
from tools.bench.bench_model import main, make_parser, task_of
from tools.bench.check_gpu import PARTS, TorchMachine, check_machine, parts_of
from tools.bench.check_gpu import make_parser as gpu_parser
from tools.bench.gpu_check import running, suites
from tools.bench.gpu_check.measures import memory_failure
from tools.bench.gpu_check.page import ARCHIVE, PAGE, RESULTS, read_results, write_results
from tools.bench.gpu_check.running import Ended, Outcome, Runner
from tools.bench.link_model.links import Links
from tools.bench.model_speed.contenders import CONTENDERS, DEFAULT


def test_all_contenders_of_the_loader_read_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_loader, "WRITTEN_AT_ONCE", 2**16)
    made = bench_loader.make_corpus(tmp_path, 100_000)
    opened = {name: contender() for name, contender in made.items()}
    checked = [f"checked, {size // 1024} KiB" for size in bench_loader.BLOCKS]
    assert list(opened) == ["mapped", "read", *checked]
    assert [indexed.has_checksums for indexed in opened.values()] == [False] * 2 + [True] * 5
    for index in (0, 57, len(opened["read"]) - 1):
        assert len({indexed.get(index, 1).tobytes() for indexed in opened.values()}) == 1
        assert len({indexed.get(index, 1, 2).tobytes() for indexed in opened.values()}) == 1


@pytest.mark.verify
@pytest.mark.process
def test_a_pair_of_preprocessings_is_timed_and_written_down(tmp_path: Path) -> None:
    lines = ({"text": f"{i % 1000} 7"} for i in range(40_000))
    corpus = write_lines(tmp_path / "a.jsonl", *lines)
    flags = ["--workers", 2, "--tokenizer-type", "NullTokenizer", "--vocab-size", "1001"]
    _, figures = measured(bench_preprocess.main, "--rounds", 1, "--input", corpus, *flags)
    (row,) = figures["rounds"]
    assert figures["bytes"] == corpus.stat().st_size
    assert row["ratio"] == row["bare"] / row["command"] == figures["ratio"]
    assert row["largest_process"] > 10e6
    assert 0 < figures["cpu_ratio"] < 1, "whole processes take more than a part of them"
    assert list(tmp_path.iterdir()) == [corpus]


@pytest.mark.verify
def test_every_second_step_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    flags = f"{TINY} --eval-iters 0 --peak-tflops 1 --log-interval 1"
    monkeypatch.setattr(bench_reporting, "MODEL", flags)
    _, rows = measured(bench_reporting.main, "--rounds", 3)
    assert [row["clock"] for row in rows] == ["wall", "cpu"]
    assert all(len(row["bare"]) == len(row["reported"]) == 3 for row in rows)
    assert min(rows[0]["in_report"]) > 0.0


def test_attention_of_every_length_is_timed() -> None:
    words = ("--seq-lengths", 16, 32, "--device", "cpu")
    rows = measured(bench_attention.main, *words)[1]["rows"]
    found = [(row["seq_length"], row["kernel"]) for row in rows]
    assert found == [(16, "FlashAttention"), (32, "FlashAttention")]
    for row in rows:
        assert [*row["tflops"]] == ["forward", "backward"]
        assert min(row["tflops"].values()) > 0


def test_every_part_is_made_orthogonal_by_itself_and_scaled_by_its_shape() -> None:
    config = MuonConfig(muon_fp32_matmul_prec="highest")
    tall = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    parts = in_parts(tall, config).split(8)
    for part, given in zip(parts, tall.split(8), strict=True):
        wanted = muon.orthogonal(given, config) * (8 / 32) ** 0.5  # spectral: sqrt of the rows
        torch.testing.assert_close(part, wanted)


VOCAB_SIZE = 64
SIZES = [
    *("--num-layers", "2", "--hidden-size", "16", "--ffn-hidden-size", "32"),
    *("--num-attention-heads", "2", "--vocab-size", str(VOCAB_SIZE), "--seq-length", "8"),
    *("--micro-batch-size", "2", "--rounds", "2", "--steps", "1", "--threads", "1"),
]


def test_all_contenders_start_from_the_same_loss() -> None:
    message, written = measured(main, *SIZES)
    rows = written["rows"]
    assert [row["contender"] for row in rows] == list(DEFAULT)
    references = [row for row in rows if row["contender"].startswith("transformers")]
    for row in rows:
        assert row["first_loss"] == pytest.approx(rows[0]["first_loss"], rel=1e-4)
        assert len(row["seconds"]) == 2
        assert row["tokens_per_second"] == pytest.approx(2 * 8 / (sum(row["seconds"]) / 2))
        others = [other for other in references if other is not row]
        assert row["ratios"].keys() == {other["contender"] for other in others}
        for other in others:
            pairs = zip(other["seconds"], row["seconds"], strict=True)
            ratio = sum(theirs / own for theirs, own in pairs) / 2
            assert row["ratios"][other["contender"]] == pytest.approx(ratio)
    assert written["rows"][0]["first_loss"] == pytest.approx(math.log(VOCAB_SIZE), rel=0.05)
    names = re.findall(r"^(\S+) +\d+ tokens/s, ", message, re.MULTILINE)
    assert names == list(DEFAULT)
    assert len(re.findall(r"^round +\d, seconds: ", message, re.MULTILINE)) == 2


@pytest.mark.parametrize("name", ["ours", "trainer", "transformers", "transformers-fused"])
def test_all_contenders_clip(name: str) -> None:
    """A norm far below AdamW's epsilon leaves nothing of an update but weight decay."""
    before, clipped = losses_of(name, clip_grad=1e-12)
    assert_near([clipped], [before], 1e-6, name)
    before, after = losses_of(name, clip_grad=0.0)
    assert after < before * (1.0 - 1e-4)


def losses_of(name: str, *, clip_grad: float) -> list[float]:
    task = task_of(make_parser().parse_args([*SIZES, "--clip-grad", str(clip_grad)]))
    step = CONTENDERS[name](task)
    return [float(step()) for _ in range(2)]


@pytest.mark.verify
@pytest.mark.process
def test_a_contender_is_stopped_at_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    words = [*SIZES, "--own-process", "--contenders", "ours", "--most-seconds", 0.1, "--json", file]
    done = run_python(["tools/bench/bench_model.py", *words, "--steps", 10**6])
    assert done.returncode == 1
    (row,) = json.loads(file.read_text())["rows"]
    assert row["failure"] == "stopped after 0.1 s"


MACHINE = machine(world_size=8, group_size=4, nic=Nic.PER_RANK, intra=8, inter=0.8)


@pytest.mark.parametrize(
    ("ranks", "inner", "outer"),
    [((4, 5, 6, 7), 1, 4), ((1, 5), 4, 8), (tuple(range(8)), 1, 8), ((4, 6), 2, 4)],
)
def test_a_collective_lasts_as_the_planner_counts(
    ranks: tuple[int], inner: int, outer: int
) -> None:
    axis = Axis(index=0, inner=inner, outer=outer, link=Link.INTRA)
    job = Links(MACHINE).job(Op.ALL_GATHER, ranks, 8_000_000)
    expected = CollectiveTimes(MACHINE, "native").seconds(Op.ALL_GATHER, (axis,), 8_000_000)
    assert job.seconds == expected > 0.0
    assert bool(job.inter) == (outer > MACHINE.group_size)
    assert Links(MACHINE).job(None, ranks, 8_000_000).seconds > 0.0
    assert Links(MACHINE, are_free=True).job(Op.ALL_GATHER, ranks, 8_000_000) is None


@pytest.mark.verify
@pytest.mark.process
def test_a_rank_trains_by_this_project_and_by_fsdp2(tmp_path: Path) -> None:
    path, file = tmp_path / "machine.json", tmp_path / "figures.json"
    path.write_text(machine_to_json(MACHINE))
    shape = "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --vocab-size 64 --seq-length 16"
    contenders = "paro:IIG@ho-ring,fsdp2-hybrid"
    flags = ["--ranks", 8, "--machine", path, "--contenders", contenders, "--steps", 1]
    command = ["tools/bench/one_rank.py", *flags]
    done = run_script([*command, *shape.split(), "--json", file])
    assert done.returncode == 0, done.stderr
    turns = json.loads(file.read_text())["turns"]
    assert [*turns] == contenders.split(",")
    for name, figures in turns.items():
        assert min(figures["s/step"], figures["host s/step"]) > 0.0
        assert name in done.stdout


def runner(folder: Path, *, rehearse: bool = False, seconds: float = 60.0) -> Runner:
    return Runner(folder=folder, rehearse=rehearse, num_gpus=1, seconds=seconds)


@pytest.mark.process
@pytest.mark.parametrize(
    "letters",
    # Parts b and c are tests that `make verify` runs too; others differ from e in their shapes.
    ["n", pytest.param("abcdefgjkmnpqrst", marks=pytest.mark.verify)],
)
def test_a_rehearsal_runs_parts_and_keeps_earlier_results(tmp_path: Path, letters: str) -> None:
    folder = tmp_path / "gpu"
    write_results(folder, {"h": {**EARLIER, "title": "collectives"}}, rehearsal=True)
    flags = ["--rehearse", "--out", folder, "--parts", ",".join(letters)]
    done = run_python(["tools/bench/check_gpu.py", *flags], timeout=3000.0)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((folder / RESULTS).read_text())
    assert list(results) == sorted(f"{letters}h")
    assert all(results[letter]["passed"] for letter in letters)
    assert all("SM clock 1000 MHz" in results[letter]["lines"][-1] for letter in letters)
    assert results["h"]["lines"] == EARLIER["lines"]
    assert (folder / PAGE).read_text().startswith("# Rehearsal")
    assert not (folder / "checkpoint").exists()
    with tarfile.open(folder / ARCHIVE) as whole:
        names = {name.removeprefix("./") for name in whole.getnames()}
    assert names > {PAGE, RESULTS, "clocks.csv"}


@pytest.mark.verify
@pytest.mark.process
def test_a_quick_rehearsal_runs_its_course_and_the_second_what_is_left(tmp_path: Path) -> None:
    flags = ["tools/bench/check_gpu.py", "--rehearse", "--out", tmp_path]
    for number, letters in ((1, "abcfknpqr"), (2, "abcfkmnpqrst")):
        done = run_python([*flags, "--quick", str(number)], timeout=3000.0)
        assert done.returncode == 0, done.stdout + done.stderr
        results = read_results(tmp_path)
        assert list(results) == sorted(letters)
        assert all(part["passed"] for part in results.values())
    assert results["a"]["date"] <= results["s"]["date"]


EARLIER = {
    **{"title": "speed", "passed": False, "seconds": 12.3, "machine": "1 x GPU", "figures": {}},
    **{"date": "2026-01-02", "commit": "abc", "lines": ["slow"], "pictures": ["speed.png"]},
}


def test_damaged_results_are_not_overwritten(tmp_path: Path) -> None:
    for content in ("{", '{"a": {}}'):
        (tmp_path / RESULTS).write_text(content)
        refused(lambda: read_results(tmp_path), "--out ... is damaged, give another folder:")


def test_parts_that_are_chosen() -> None:
    chosen = {"": "eabcdfgjkmnpqrst", "--gpus 2": "eabcdfgjkmnpqrsthil"}
    for flags, letters in (chosen | {"--parts a,e": "ea", "--parts h --gpus 2": "h"}).items():
        assert parts_of(gpu_parser().parse_args(flags.split())) == list(letters)
        assert set(letters) <= set(PARTS)


def test_a_machine_without_a_gpu_or_with_an_old_one_is_refused() -> None:
    args = gpu_parser().parse_args([])
    message = "sees 0 GPUs; run it with a Python whose torch has CUDA, or give --rehearse"
    refused(lambda: check_machine(TorchMachine(torch="2.13", gpus=0), args), message)
    found = TorchMachine(torch="2.11.0", gpus=1, name="Tesla V100", bytes=2**34, capability=(7, 0))
    refused(lambda: check_machine(found, args), "Tesla V100 ... 7.0: 8.0 is needed")
    check_machine(
        TorchMachine(torch="2.11.0", gpus=1, name="A100", bytes=2**35, capability=(8, 0)), args
    )


REPORT = """<testsuites><testsuite>
<testcase classname="tests.m" name="good">
<properties><property name="note" value="ranks are threads"/></properties></testcase>
<testcase classname="tests.m" name="bad">
<failure message="assert 1 == 2&#10;more">long</failure></testcase>
<testcase classname="tests.m" name="fp8">
<skipped message="needs fp8: compute capability 8.9"/></testcase>
{more}
</testsuite></testsuites>"""
SKIPPED = '<testcase classname="tests.m" name="x"><skipped message="needs wandb"/></testcase>'


def outcome(text: str, status: int, *, rehearse: bool = False) -> Outcome:
    ended, report = Ended(status=status, output="", seconds=1.0), ElementTree.fromstring(text)
    return suites.outcome_of(runner(Path(), rehearse=rehearse), ended, report)


def test_failures_and_skips_of_a_suite_are_lines() -> None:
    found = outcome(REPORT.format(more=""), 1)
    assert not found.passed
    assert found.lines == (
        "1 passed, 1 failed, 1 skipped",
        "1 skipped: needs fp8: compute capability 8.9",
        "ranks are threads",
        "failed: tests.m::bad: assert 1 == 2",
    )
    as_written = json.loads(json.dumps(asdict(found)))
    assert as_written["figures"]["skipped"] == {"needs fp8: compute capability 8.9": 1}


def test_only_missing_hardware_excuses_a_skip() -> None:
    for more, rehearse, passed in (
        ("", False, True),
        (SKIPPED, False, False),
        (SKIPPED, True, True),
    ):
        text = REPORT.format(more=more).replace("failure", "properties")
        assert outcome(text, 0, rehearse=rehearse).passed is passed


@pytest.mark.verify
@pytest.mark.process
def test_a_command_over_its_limit_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that does not stop when it is asked to; and then no other begins."""
    monkeypatch.setattr(running, "GRACE_SECONDS", 0.5)
    child = "import time; time.sleep(60)"
    deaf = "import signal, subprocess, sys; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    parent = f"{deaf}; print(1, flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    of_part = runner(tmp_path, seconds=5.0)  # to start on a busy machine
    ended = of_part.run("sleeper", ["-c", parent])
    assert ended.timed_out
    assert ended.output == "1\n"
    assert "the part's time was over" in ended.failure
    assert of_part.run("next", ["-c", "print(2)"]).timed_out
    assert not (tmp_path / "logs" / "next.log").exists()


def test_memory_that_contradicts_its_prediction() -> None:
    for allocated, reserved, message in (
        (97, 100, None),
        (101, 105, None),  # library workspaces and rounding are in the share for fragmentation
        (101, 106, "more is reserved than the "),
        (90, 100, None),
        (89, 100, "more than 10% below the prediction"),
    ):
        predicted = {"predicted peak": 100, "predicted reserved": 105}
        found = memory_failure({**predicted, "max allocated": allocated, "max reserved": reserved})
        assert (found is None) is (message is None)
        assert (found or "").startswith(message or "")
    assert memory_failure({"max resident": 300, "predicted peak": 100}) is None, "of a CPU"
