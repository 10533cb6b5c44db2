"""Benchmarks: contenders do equal work from equal losses; one real rank of many has its links."""

from __future__ import annotations

import json
import math
import re
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
from tests.helpers.commands import measured, write_lines
from tests.helpers.margins import assert_near
from tests.helpers.refusals import refused
from tests.helpers.scripts import run_script
from tests.helpers.training import TINY
from tests.helpers.warm_python import run_python
from tests.paro.planning.cases import machine
from tools.bench import bench_attention, bench_loader, bench_preprocess, bench_reporting, one_rank
from tools.bench.ablated import in_parts
from tools.bench.bench_model import main, make_parser, task_of
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
    """Two rounds of each; figures follow from the seconds."""
    told, written = measured(main, *SIZES)
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
    names = re.findall(r"^(\S+) +\d+ tokens/s, ", told, re.MULTILINE)
    assert names == list(DEFAULT)
    assert len(re.findall(r"^round +\d, seconds: ", told, re.MULTILINE)) == 2


@pytest.mark.parametrize("name", ["ours", "trainer", "transformers", "transformers-fused"])
def test_all_contenders_clip(name: str) -> None:
    """A norm far below AdamW's epsilon leaves nothing of an update but weight decay."""
    before, clipped = losses_of(name, clip_grad=1e-12)
    assert_near([clipped], [before], 1e-6, name)
    before, after = losses_of(name, clip_grad=0.0)
    assert after < before * (1.0 - 1e-4)


def losses_of(name: str, *, clip_grad: float) -> list[float]:
    """Of the first two steps."""
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
    assert job is not None
    expected = CollectiveTimes(MACHINE, "native").seconds(Op.ALL_GATHER, (axis,), 8_000_000)
    assert job.seconds == expected > 0.0
    assert bool(job.inter) == (outer > MACHINE.group_size)
    message = Links(MACHINE).job(None, ranks, 8_000_000)
    assert message is not None
    assert message.seconds > 0.0
    assert Links(MACHINE, are_free=True).job(Op.ALL_GATHER, ranks, 8_000_000) is None


def test_mistakes_of_one_rank() -> None:
    base = ["--ranks", "8", "--machine"]
    refused(lambda: one_rank.main([*base, "nowhere.json"]), "nowhere.json", "dgx-h100")
    refused(lambda: one_rank.main([*base, "dgx-h100", "--contenders", "ddq"]), "ddq", "fsdp2")
    refused(lambda: one_rank.main(["--ranks", "1", "--machine", "dgx-h100"]), "--ranks 1")


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
