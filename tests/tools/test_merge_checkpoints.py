"""Checkpoints are merged as numpy means them, and saved and loaded in the time that is measured."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import paro.checkpoint.convert.source
from paro.checkpoint.chunks import MAX_ITEM_BYTES
from paro.checkpoint.convert.native import open_native
from paro.checkpoint.convert.source import LazyTensor
from paro.files.object_cache import ObjectCache
from paro.files.object_store import path_of
from paro.report.log import Log
from paro.training.resume import load_run
from paro.training.step import train_step
from tests.end_to_end.test_training import SETS
from tests.helpers.object_server import BUCKET, ObjectServer
from tests.helpers.refusals import output_of, refused
from tests.helpers.scripts import run_script
from tests.helpers.training import TINY, begun, built, load_parameters, save_run
from tests.tools.conftest import LiveBytes, convert
from tools import bench_checkpoint
from tools.merge_checkpoints import main, mean_of

STEPS = (1, 2, 4)
AVERAGED = "--ema-decay 0.5"
RUN = f"{TINY} --train-iters 4 --global-batch-size 2 --lr 0.1 --make-vocab-size-divisible-by 32"


def merge(there: Path, here: Path, *words: object) -> str:
    given = ["--input", there, "--output", here, *words]
    return output_of(partial(main, [*map(str, given)]))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of some iterations, with averaged weights; one block is frozen."""
    folder = tmp_path_factory.mktemp("merge")
    flags = f"{RUN} {AVERAGED} --save {folder} --trainable last-blocks:0.67"
    config, training = built(flags)
    state, source = begun(config, training)
    for iteration in range(1, 5):
        train_step(training, state, source)
        if iteration in STEPS:
            save_run(config, training, state=state)
    return folder


def parameters_at(folder: Path, *, averaged: bool = False) -> Iterator[dict[str, Tensor]]:
    for iteration in STEPS:
        tensors = open_native(folder, iteration, averaged=averaged).tensors
        yield {name: tensor.whole(torch.float32) for name, tensor in tensors.items()}


SCHEMES = {
    "uniform": (1 / 3, 1 / 3, 1 / 3),
    "linear": (1 / 6, 2 / 6, 3 / 6),
    "1-sqrt": (0.57735027, 0.23914631, 0.18350342),  # sqrt(j / 3) - sqrt((j - 1) / 3)
}


@pytest.mark.slow("trains and saves")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_merge_is_the_weighted_mean_of_numpy(
    scheme: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paro.checkpoint.convert.source, "CHUNK_BYTES", 3000)  # a few rows at a time
    which = ("--last", 3) if scheme == "uniform" else ("--iterations", "4,1,2")
    merge(run, tmp_path / "merged", *which, "--weights", scheme)
    merged = load_parameters(tmp_path / "merged")
    first, *others = parameters_at(run)
    for name, values in first.items():
        each = np.stack([values.numpy(), *(other[name].numpy() for other in others)])
        mean = np.tensordot(np.array(SCHEMES[scheme]), each, axes=1)
        found = merged[name][: len(values)].numpy()
        np.testing.assert_allclose(found, mean, rtol=1e-5, atol=1e-6, err_msg=name)
        if (each == each[0]).all():
            assert (found == each[0]).all(), f"{name}, which is frozen"
    assert merged["head.weight"].shape[0] == 64, "padded as it was"


def test_training_and_conversion_go_on_from_a_merge(run: Path, tmp_path: Path) -> None:
    merge(run, tmp_path / "merged", "--last", 2)
    merged = load_parameters(tmp_path / "merged")
    config, training = built(f"{RUN} --load {tmp_path / 'merged'} --save {tmp_path / 'next'}")
    assert load_run(config, training, Log()).state is None
    save_run(config, training)
    for name, values in load_parameters(tmp_path / "next").items():
        assert torch.equal(values, merged[name]), name
    convert("paro", "hf", tmp_path / "merged", tmp_path / "hf")


def test_checkpoints_of_any_strategies_are_merged(tmp_path: Path) -> None:
    names = ("one-process", "iig", "nng-bf16-async")
    for iteration, name in enumerate(names, 1):
        there = SETS[0] / name / "saved" / "iter_0000004"
        shutil.copytree(there, tmp_path / "run" / f"iter_{iteration:07d}")
    merge(tmp_path / "run", tmp_path / "merged", "--last", 3)
    found = load_parameters(tmp_path / "merged")
    tensors = [open_native(SETS[0] / name / "saved").tensors for name in names]
    for name, tensor in tensors[0].items():
        mean = sum(each[name].whole(torch.float64) for each in tensors) / 3
        assert torch.allclose(found[name][: tensor.shape[0]].double(), mean, rtol=1e-6), name


def test_averaged_weights_are_exported(run: Path, tmp_path: Path) -> None:
    """By bias correction: weights 1/7, 2/7 and 4/7 of three iterations, the last of which is 3."""
    convert("paro", "paro", run, tmp_path / "out", "--weights", "ema", "--ckpt-step", 2)
    found = load_parameters(tmp_path / "out")
    one, two, _ = parameters_at(run)
    for name, values in one.items():
        mean = values / 3 + two[name] * 2 / 3
        assert torch.allclose(found[name][: len(values)], mean, rtol=1e-5, atol=1e-6), name
    words = ("paro", "hf", tmp_path / "out", tmp_path / "hf", "--weights", "ema")
    refused(lambda: convert(*words), "--weights ema ... has no averaged weights")
    words = ("hf", "paro", tmp_path / "out", tmp_path / "hf", "--weights", "ema")
    refused(lambda: convert(*words), "--weights ema needs --from paro")


def test_two_pieces_are_in_memory_at_a_time() -> None:
    """However many checkpoints are merged."""
    live = LiveBytes()

    def rows(start: int, stop: int) -> Tensor:
        return live.watched(torch.full((stop - start, 3), 2.0))

    tensors = [LazyTensor(shape=(5, 3), dtype=torch.float32, rows=rows)] * 7
    assert mean_of(tensors, [1 / 7] * 7).whole(torch.float32).allclose(torch.full((5, 3), 2.0))
    assert (live.now, live.most) == (0, 2 * 5 * 3 * 4)


def test_what_cannot_be_merged_is_refused(run: Path, tmp_path: Path) -> None:
    for words, message in (
        ("--last 1", "--last 1 must be at least 2"),
        ("--last 4", "--last 4 ... iterations 1, 2, 4"),
        *((f"--iterations {x}", f"--iterations {x} ... 2 or more") for x in ("1", "1,x", "1,1")),
        ("--iterations 1,3", "3 is not there ... 1, 2, 4"),
    ):
        refused(partial(merge, run, tmp_path / "out", *words.split()), message)
        assert not (tmp_path / "out").exists()
    shutil.copytree(run / "iter_0000001", tmp_path / "run" / "iter_0000001")
    save_run(*built(f"{RUN} --num-layers 2 --save {tmp_path / 'other'}"))
    shutil.copytree(tmp_path / "other" / "iter_0000000", tmp_path / "run" / "iter_0000002")
    for there, here, message in (
        (tmp_path / "run", tmp_path / "out", "1 and 2 ... different"),
        (run, run, f"--output {run} exists"),
        (tmp_path / "no", tmp_path / "out", "--input ... is no folder"),
    ):
        refused(partial(merge, there, here, "--last", 2), message)


TOOL = "tools/bench_checkpoint.py"


SMALL = ["--params", 100_000, "--hidden-size", 32, "--rounds", 2]
UNIT = 12 * 32 * 32


def bench(folder: Path, *flags: object, nproc: int | None = 0, place: str = "") -> dict[str, Any]:
    """The figures, of a process for each rank or, with None, of this one."""
    out = folder / "figures.json"
    runs = place or str(folder / "runs")
    words = [*map(str, ("--folder", runs, "--json", out, *flags))]
    if nproc is None:
        bench_checkpoint.main(words)
    else:
        done = run_script([TOOL, *words], nproc, timeout=3000.0)
        assert done.returncode == 0, done.stdout + done.stderr
    assert not path_of(runs).exists()
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


@pytest.mark.slow("trains and saves")
@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=[pytest.mark.verify, pytest.mark.ranks])]
)
def test_bandwidths_of_both_ways(tmp_path: Path, ranks: int) -> None:
    figures = bench(tmp_path, *SMALL, nproc=ranks if ranks > 1 else None)
    assert figures["bytes"] == 12 * (100_000 // UNIT) * UNIT
    assert ranks * figures["bytes_of_a_rank"] == figures["bytes"]
    assert figures["part_of_the_disk"].keys() == {"save", "load"}
    assert all(len(times) == 2 for times in figures["seconds"].values())


@pytest.mark.verify
@pytest.mark.process
@pytest.mark.parametrize("flags", [SMALL, ["--steps", 1]])
def test_a_store_is_measured_as_a_disk_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[object]
) -> None:
    monkeypatch.setattr(ObjectCache, "folder", tmp_path / "cache")
    small = bench_checkpoint.MODEL.replace("hidden-size 512", "hidden-size 32")
    monkeypatch.setattr(bench_checkpoint, "MODEL", small.replace("8192", "64"))
    with ObjectServer().running():
        figures = bench(tmp_path, *flags, "--rounds", 1, nproc=None, place=f"s3://{BUCKET}/runs")
    if "seconds" in figures:
        assert figures["seconds"].keys() == {"write", "save", "read", "load"}
    else:
        assert figures["steps"]["during_a_save"]


@pytest.mark.verify
def test_memory_beside_a_billion_parameters(tmp_path: Path) -> None:
    """12 GB of state: in addition to its shards a rank needs less than one unit."""
    size = ["--params", 1_010_000_000, "--hidden-size", 2048, "--rounds", 1]  # 20 units
    figures = bench(tmp_path, *size)
    assert figures["bytes"] > 12e9
    assert figures["bytes_of_a_unit_and_rank"] == 12 * 12 * 2048 * 2048
    for way, peak in figures["peak_bytes_beside_the_shards"].items():
        assert peak < 8 * MAX_ITEM_BYTES < figures["bytes_of_a_unit_and_rank"], way
