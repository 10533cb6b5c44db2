"""The effect of each checkpoint flag on a run, and the messages when it cannot apply."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from paro.checkpoint import folder_lock
from paro.checkpoint.agreement import lock_folders
from paro.checkpoint.folder_lock import LockHolder
from paro.report.config import run_record_path
from tests.end_to_end.test_training import RUN, Ended, launch, on_ranks, read_metrics, run, run_main
from tests.helpers.ranks import run_ranks
from tests.helpers.refusals import refused
from tests.helpers.training import load_parameters, read_common
from tests.paro.checkpoint.toy_run import control_here

pytestmark = pytest.mark.slow("trains and saves")


def iterations(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("iter_*"))


def losses(path: Path) -> dict[int, float]:
    """The last recorded loss of every iteration."""
    return {line["iteration"]: line["lm_loss"] for line in read_metrics(path)}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six iterations with a checkpoint after every second one, and their losses."""
    root = tmp_path_factory.mktemp("straight")
    run(f"--train-iters 6 --save {root} --save-interval 2 --metrics-file {root / 'lines'}")
    return root


@pytest.fixture
def saved(straight: Path, tmp_path: Path) -> Path:
    shutil.copytree(straight, tmp_path / "ckpt")
    return tmp_path / "ckpt"


@pytest.fixture
def go_on(saved: Path) -> str:
    """The flags that continue it after iteration 4; new losses are in `lines` beside it."""
    lines = saved.parent / "lines"
    return f"--train-iters 6 --load {saved} --ckpt-step 4 --metrics-file {lines}"


def test_a_named_iteration_is_taken_or_nothing(straight: Path, saved: Path) -> None:
    words = f"--train-iters 6 --load {saved} --metrics-file {saved / 'lines'} --ckpt-step"
    run(words, 2)
    assert losses(saved / "lines") == losses(straight / "lines")
    refused(lambda: launch("--mock-data", words, 3), "iter_0000003 does not exist")
    path = saved / "iter_0000004" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    refused(lambda: launch("--mock-data", words, 4), f"{path} is truncated ... another --ckpt-step")


def test_a_damaged_newest_one_costs_one_interval(straight: Path, saved: Path) -> None:
    path = saved / "iter_0000006" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    words = f"--train-iters 6 --load {saved} --save {saved} --metrics-file {saved / 'lines'}"
    printed = run(words)
    assert f"passing over iteration 6: {path} is damaged (wrong checksum" in printed
    assert losses(saved / "lines") == losses(straight / "lines")
    assert "at iteration 6" in run(words)  # saved again, complete


def test_only_multiples_and_the_last_two_are_retained(tmp_path: Path) -> None:
    words = f"--train-iters 7 --save {tmp_path} --save-interval 1 --save-retain-interval 3"
    run(words, "--exit-interval 5")
    assert iterations(tmp_path) == ["iter_0000003", "iter_0000004", "iter_0000005"]
    run(words, "--async-save --load", tmp_path)
    assert iterations(tmp_path) == ["iter_0000003", "iter_0000006", "iter_0000007"]


def test_the_run_that_completes_writes_the_hugging_face_folder(saved: Path) -> None:
    folder = saved.parent / "hf"
    words = f"--load {saved} --save {saved} --override-opt_param-scheduler --save-hf {folder}"
    words = f"--train-iters 8 {words}"
    run(words, "--exit-interval 7")
    assert not folder.exists()
    assert f"successfully wrote the model to {folder}" in run(words)
    assert {"config.json", "model.safetensors"} <= {path.name for path in folder.iterdir()}
    assert f"--save-hf {folder} exists, and is left as it is" in run(words)
    refused(lambda: launch("--mock-data", words, "--train-iters 9"), "--save-hf", "exists")


def test_finetuning_takes_parameters_alone(saved: Path) -> None:
    out = saved.parent / "lines"
    words = f"--load {saved} --finetune --lr 1e-4 --metrics-file {out}"
    assert "--finetune: training begins with the parameters" in run("--train-iters 2", words)
    first, second = read_metrics(out)
    assert (first["iteration"], first["consumed_samples"], second["iteration"]) == (1, 8, 2)
    assert abs(first["lm_loss"] - losses(saved / "lines")[1]) > 0.05


def test_positions_are_stretched_where_training_begins_with_parameters(saved: Path) -> None:
    yarn = "--position-embedding-type yarn --yarn-rotary-scaling-factor 4"
    words = f"--load {saved} {yarn} --train-iters 2"
    refused(
        lambda: launch("--mock-data", words),
        "position_embedding_type is rope there ... with --finetune",
    )
    for more in ("", "--use-checkpoint-args"):
        out = run(f"{words} --finetune --lr 1e-4 {more}")
        assert "--position-embedding-type is rope there, yarn here" in out
        assert "--yarn-rotary-scaling-factor is 1" in out


def test_moments_can_stay_behind(straight: Path, saved: Path, go_on: str) -> None:
    run(go_on, "--no-load-optim")
    found, true = losses(saved.parent / "lines"), losses(straight / "lines")
    assert found.keys() == {5, 6}
    assert found[5] == true[5]  # the parameters are the same
    assert found[6] != true[6]

    light = saved.parent / "light"
    run(go_on, f"--exit-interval 5 --save {light} --no-save-optim")
    words = f"--mock-data --train-iters 6 --load {light}"
    refused(lambda: launch(words), "--no-load-optim or --finetune")
    launch(words, "--no-load-optim")


def test_sizes_and_tokenizer_come_with_the_checkpoint(
    straight: Path, saved: Path, go_on: str
) -> None:
    bare = " ".join(RUN)
    for flag in ("num-layers", "hidden-size", "num-attention-heads", "ffn-hidden-size"):
        bare = re.sub(rf"--{flag} \d+ ", "", bare)
    bare = bare.replace("--tokenizer-type NullTokenizer --vocab-size 128 ", "")
    assert len(bare.split()) == len(RUN) - 12
    printed = run(go_on, "--use-checkpoint-args", base=bare.split())
    true, out = losses(straight / "lines"), saved.parent / "lines"
    assert losses(out) == {5: true[5], 6: true[6]}
    (start,) = json.loads(run_record_path(out).read_text())["starts"]
    assert start["arguments"]["num_layers"] == 2
    assert start["arguments"]["paro_strategy"] == "IIG"
    for line in ("  num_layers [.]+ 2", "> model: .* 2 layers, ", "> strategy: IIG, 1 rank, "):
        assert re.search(f"^{line}", printed, re.M), line
    (saved.parent / "empty").mkdir()
    empty = run(f"--train-iters 2 --use-checkpoint-args --load {saved.parent / 'empty'}")
    assert "holds no checkpoint: its sizes are the flags'" in empty


def test_a_schedule_changes_only_when_asked_to(straight: Path, saved: Path, go_on: str) -> None:
    words, out = f"{go_on} --lr 1e-2", saved.parent / "lines"
    changed = "the schedule changed: --lr was 0.003 and is 0.01: give"
    refused(lambda: launch("--mock-data", words), changed)
    keep, override = "--use-checkpoint-opt_param-scheduler", "--override-opt_param-scheduler"
    run(words, keep)
    true = losses(straight / "lines")
    assert losses(out) == {5: true[5], 6: true[6]}
    run(words, override)
    assert losses(out)[6] != true[6]
    refused(lambda: launch("--mock-data", words, keep, override), "contradict each other")


def test_the_global_batch_may_change(saved: Path, go_on: str) -> None:
    printed = run(go_on, "--global-batch-size 4 --override-opt_param-scheduler")
    assert "the global batch was 8 and is 4 now: data continue after sample 32" in printed
    assert read_metrics(saved.parent / "lines")[-1]["consumed_samples"] == 40


NO_ROOM = OSError(28, "No space left on device")


def test_training_goes_on_after_a_save_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At iteration 2 the disk is full, or the folder vanishes; at iteration 4 all is well."""
    full = Mock(side_effect=NO_ROOM)
    for act, message, how in (
        (full, "No space left on device; training continues", ""),
        (shutil.rmtree, "No such file or directory", "--async-save"),
    ):
        root = tmp_path / f"ckpt{how}"
        with monkeypatch.context() as patch:
            at_the_disk(patch, 2, partial(act, root))
            words = f"--train-iters 4 --save {root} --save-interval 2 {how}"
            printed = run(words, "--on-save-failure continue")
        assert f"iteration 2 is not saved: --save {root}: " in printed
        assert message in printed
        assert iterations(root) == ["iter_0000004"]


def test_a_save_that_failed_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"--mock-data --train-iters 6 --save {tmp_path} --load {tmp_path}"
    launch(words, "--exit-interval 1")
    at_the_disk(monkeypatch, 2, Mock(side_effect=NO_ROOM))
    message = f"iteration 2 is not saved: --save {tmp_path}: ... No space left on device"
    for how in ("", "--async-save"):
        refused(partial(launch, words, how, "--save-interval 2"), message, status=1)
    at_the_end = "--async-save --exit-interval 2 --on-save-failure continue"
    refused(lambda: launch(words, at_the_end), "the run ends unsaved at iteration 2", status=1)
    assert iterations(tmp_path) == ["iter_0000001"]
    assert read_common(tmp_path)["iteration"] == 1


def at_the_disk(monkeypatch: pytest.MonkeyPatch, iteration: int, act: Callable[[], object]) -> None:
    """Acts when a tensor file of one iteration is about to be flushed to the disk."""
    fsync = os.fsync

    def acts(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if f"/iter_{iteration:07d}." in name and name.endswith(".distcp"):
            act()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", acts)


def noted(folder: Path) -> list[str]:
    lines = (folder / "progress.txt").read_text().splitlines()
    fields = [line.split("\t")[3:5] for line in lines]
    return [" ".join(word.removeprefix("Iteration: ") for word in words) for words in fields]


@pytest.mark.ranks
def test_an_asynchronous_save_is_the_synchronous_one(tmp_path: Path) -> None:
    flags = [*RUN, "--train-iters", 5, "--paro-strategy", "NIG", "--paro-group-size", 2]
    for name, how in (("sync", []), ("async", ["--async-save"])):
        lines = tmp_path / f"{name}.jsonl"
        save = ["--save", tmp_path / name, "--save-interval", 2, "--metrics-file", lines]
        on_ranks([*flags, *save, *how, "--log-progress"], 4)
    for name, kinds in (("sync", ("Saved",)), ("async", ("Saving async", "Saved async"))):
        saves = [f"{kind} checkpoint {i}" for kind in kinds for i in (2, 4, 5)]
        assert sorted(noted(tmp_path / name)) == sorted(["Starting job", *saves])
    assert losses(tmp_path / "async.jsonl") == losses(tmp_path / "sync.jsonl")
    for iteration in (2, 4, 5):
        there, here = (load_parameters(tmp_path / name, iteration) for name in ("sync", "async"))
        assert there.keys() == here.keys()
        assert all((there[name] == here[name]).all() for name in there)
    go_on = [*flags, "--load", tmp_path / "async", "--metrics-file", tmp_path / "again.jsonl"]
    on_ranks([*go_on, "--ckpt-step", 4], 4)
    assert losses(tmp_path / "again.jsonl")[5] == losses(tmp_path / "sync.jsonl")[5]


def run_on_nodes(words: Sequence[str], nodes: Sequence[str]) -> Ended:
    """As `run_main`, with paths inside the folder of this rank's node."""
    before = os.getcwd()
    os.chdir(nodes[int(os.environ["RANK"])])
    try:
        return run_main(words)
    finally:
        os.chdir(before)


@pytest.fixture
def nodes(tmp_path: Path) -> list[str]:
    """Two nodes of two ranks without a shared file system."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    return [str(tmp_path / name) for name in ("a", "a", "b", "b")]


def on_nodes(words: Sequence[object], nodes: Sequence[str]) -> list[Ended]:
    return run_ranks(run_on_nodes, 4, [str(word) for word in words], nodes, init=False)


@pytest.mark.ranks
def test_nodes_that_share_no_files_save_and_load_what_they_see(
    tmp_path: Path, nodes: list[str]
) -> None:
    whole = tmp_path / "whole.jsonl"
    flags = [*RUN, "--train-iters", 4, "--paro-group-size", 2, "--save", "ckpt", "--load", "ckpt"]
    for strategy in ("III", "GGG"):
        for node in ("a", "b"):
            shutil.rmtree(tmp_path / node / "ckpt", ignore_errors=True)
        flags += ["--paro-strategy", strategy]
        for ended in on_nodes([*flags, "--exit-interval", 2], nodes):
            assert ended.mistake is None, ended.mistake
        if strategy == "III":  # each node has a complete checkpoint, which loads anywhere
            of_a, of_b = (load_parameters(tmp_path / node / "ckpt") for node in ("a", "b"))
            assert of_a.keys() == of_b.keys()
    on_ranks([*flags, "--save", tmp_path, "--load", tmp_path, "--metrics-file", whole], 4)
    resumed = on_nodes([*flags, "--metrics-file", tmp_path / "go"], nodes)
    assert [ended.mistake for ended in resumed] == [None] * 4
    (said,) = (e for e in resumed if "each saves what its ranks hold" in e.printed)
    assert "is another folder on 2 sets of ranks" in said.printed
    true = losses(whole)
    assert losses(tmp_path / "go") == {3: true[3], 4: true[4]}


@pytest.mark.ranks
def test_a_part_that_is_missing_is_named(tmp_path: Path, nodes: list[str]) -> None:
    flags = [*RUN, "--train-iters", 4, "--paro-group-size", 2, "--paro-strategy", "GGG"]
    save = ["--save", "ckpt", "--load", "ckpt"]
    on_nodes([*flags, *save, "--exit-interval", 2], nodes)
    before = sorted((tmp_path / "a").rglob("*"))
    only_a = [*flags, "--load", tmp_path / "a" / "ckpt"]
    ended: list[Any] = run_ranks(run_main, 4, [str(word) for word in only_a], init=False)
    assert "has a hole" in ended[0].mistake
    assert "other nodes" in ended[0].mistake
    shutil.rmtree(tmp_path / "b" / "ckpt")
    for rank in on_nodes([*flags, "--load", "ckpt"], nodes):
        assert "rank 2" in rank.mistake
        assert "does not exist" in rank.mistake
    assert sorted((tmp_path / "a").rglob("*")) == before


# Runs that share one --save


def test_a_folder_in_use_is_refused_to_runs_that_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"--mock-data --train-iters 4 --save {tmp_path} --load {tmp_path}"
    launch(words, "--exit-interval 2")
    monkeypatch.setattr(folder_lock, "BEAT_SECONDS", 0.1)
    with lock_folders(tmp_path, control_here(), print, lambda: None):
        before = sorted(tmp_path.rglob("*"))
        where = f"process {os.getpid()} on {socket.gethostname()}"
        message = f"--save {tmp_path} is in use by {where} ... give another --save"
        refused(lambda: launch(words), message)
        for reads in ("--dry-run --world-size 2 --ranks-per-node 2", "--skip-train --eval-iters 1"):
            launch(words, reads)
        assert sorted(tmp_path.rglob("*")) == before
    launch(words)
    assert iterations(tmp_path) == ["iter_0000002", "iter_0000004"]


@pytest.mark.parametrize("how", ["", "--async-save"])
def test_a_run_that_lost_the_folder_stops_and_changes_nothing(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run takes the folder over while this one writes iteration 4."""
    other = replace(LockHolder.this_process(), host="node7")
    at_the_disk(monkeypatch, 4, lambda: folder_lock._create(tmp_path, 2, other))
    words = f"--mock-data --train-iters 8 --save {tmp_path} --save-interval 2 {how}"
    retain = "--save-retain-interval 8 --on-save-failure continue"
    message = f"this run lost its lease of {tmp_path}: process {os.getpid()} on node7"
    refused(lambda: launch(words, retain), message, status=1)
    assert iterations(tmp_path) == ["iter_0000002"]
    assert read_common(tmp_path)["iteration"] == 2
    assert json.loads((tmp_path / "lease_2.json").read_text())["released"] is False
