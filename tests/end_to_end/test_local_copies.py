"""A run is started again, from local copies or from an object store, as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from paro.checkpoint.directory import find_checkpoint, iterations_in, latest_iteration
from paro.checkpoint.in_memory import folder
from paro.checkpoint.manifest import read_manifest
from paro.files.object_cache import ObjectCache
from paro.files.object_store import path_of
from paro.strategy import legal_letters
from tests.end_to_end.test_terminal import read_tensorboard
from tests.end_to_end.test_training import MODEL, RUN, Ended, read_metrics, run_main
from tests.helpers.corpora import write_corpus
from tests.helpers.margins import assert_near
from tests.helpers.object_server import BUCKET, ObjectServer, upload
from tests.helpers.ranks import run_ranks
from tests.helpers.refusals import refused, says
from tests.helpers.scripts import run_script

ROTATED = "--paro-materialize rotate"
# By strategy and flags: whether a run on two nodes survives the loss of one.
PARTIAL = "--trainable last-blocks:0.5"
MUON = "--optimizer muon --lr 1e-2"  # under IIG a group updates whole blocks
AVERAGED = "--ema-decay 0.9 --eval-ema --eval-iters 1"
CASE = f"III {ROTATED} {PARTIAL} {AVERAGED}", True


def run_on_nodes(words: list[str], per_node: int, nodes: tuple[int, ...]) -> Ended:
    """Runs the script on this rank, whose node's name follows from its rank."""
    rank = int(os.environ["RANK"])
    local = {"LOCAL_RANK": str(rank % per_node), "LOCAL_WORLD_SIZE": str(per_node)}
    name = f"node{nodes[rank // per_node]}"
    with (
        mock.patch.dict(os.environ, local),
        mock.patch.object(folder.socket, "gethostname", return_value=name),
    ):
        return run_main(words)


def start(
    root: Path, *flags: object, ranks: int = 4, nodes: tuple[int, ...] = (0, 1), exits: str = "2"
) -> list[Ended]:
    """Start the run once; with local copies it exits without a save after two iterations."""
    per_node = ranks // len(nodes)
    words = [*RUN, "--train-iters", 5, "--exit-interval", exits]
    words += ["--non-persistent-local-ckpt-dir", root / "memory", *flags]
    words += ["--metrics-file", root / "metrics.jsonl"]
    command = [str(word) for word in words]
    return run_ranks(run_on_nodes, ranks, command, per_node, nodes, init=False)


def results(path: Path) -> list[tuple[Any, ...]]:
    names = ("iteration", "consumed_samples", "lm_loss", "grad_norm", "learning_rate")
    return [tuple(line[name] for name in names) for line in read_metrics(path)]


EVERY = [
    pytest.param(f"{letters} {more}", letters[-1] not in "G4", marks=pytest.mark.verify)
    for letters in (*legal_letters(), "2,2,4", "1,2,2", "2,4,4")
    for more in ("--bf16", "--fp16", *([MUON] if letters == "IIG" else []))
]


@pytest.mark.ranks
@pytest.mark.parametrize(("flags", "survives"), [CASE, *EVERY])
def test_recovers_bit_for_bit(tmp_path: Path, flags: str, *, survives: bool) -> None:
    words = f"--non-persistent-ckpt-type local --paro-strategy {flags}".split()
    run = tmp_path / "run"
    first = start(run, *words)
    assert "> local copies: every iteration" in first[0].printed
    if survives:
        assert "also without 1 node and its memory; without more it starts" in first[0].printed
    else:
        assert "after the loss of a node's memory it starts again from nothing (--paro-s" in (
            first[0].printed
        )
    # All processes have died; both nodes are there. Another flag of the log changes nothing.
    second = start(run, *words, "--log-throughput")
    assert "recovered iteration 2 from local copies" in second[0].printed
    assert "0 bytes from other nodes" in second[0].printed
    # Node 0 has gone with its memory: a new one has come, and the ranks have changed their nodes.
    (lost,) = (run / "memory").glob("*-node0")
    shutil.rmtree(lost)
    third = start(run, *words, nodes=(1, 2))
    assert [ended.mistake for ended in third] == [None] * 4
    assert ("recovered iteration 4" in third[0].printed) == survives
    if survives:
        assert "0 bytes from other nodes" not in third[0].printed
        straight = start(tmp_path / "straight", *words, exits="100")
        assert [ended.mistake for ended in straight] == [None] * 4
        assert list((tmp_path / "straight" / "memory").iterdir()) == [], "emptied after a good end"
        assert results(run / "metrics.jsonl") == results(tmp_path / "straight" / "metrics.jsonl")
        validations = [
            re.findall(r"lm loss of averaged weights: (\S+)", ended[-1].printed)
            for ended in (third, straight)
        ]
        assert validations[0] == validations[1]
        assert bool(validations[0]) == (AVERAGED in flags)
        assert list((run / "memory").glob("*-node[12]")) == []
    else:
        assert "no iteration of the local copies is whole" in third[0].printed
        assert "passing over iteration 4" in third[0].printed


@pytest.mark.ranks
def test_nodes_leave_and_return_and_the_batches_stay_the_same(tmp_path: Path) -> None:
    flags = ["--paro-survive", "1", "--paro-elastic", "--paro-strategy", "1,1,2"]
    start(tmp_path / "straight", *flags, exits="100")
    run = tmp_path / "run"
    flags += ["--tensorboard-dir", str(run / "board")]
    start(run, *flags)
    (lost,) = (run / "memory").glob("*-node0")
    shutil.rmtree(lost)
    time.sleep(1.0)  # TensorBoard orders files by the second in their names
    assert "recovered iteration 2" in start(run, *flags, ranks=2, nodes=(1,))[0].printed
    time.sleep(1.0)
    assert "recovered iteration 4" in start(run, *flags, nodes=(0, 1))[0].printed
    for one, other in zip(
        results(run / "metrics.jsonl"),
        results(tmp_path / "straight" / "metrics.jsonl"),
        strict=True,
    ):
        assert_near(one, other, 1e-5, "recovered")
    scalars = read_tensorboard(run / "board")
    assert scalars["recovery/seconds"].keys() == {2, 4}
    assert scalars["recovery/bytes-from-other-nodes"][4] > 0.0


# Wide enough for codes of gradients and of updated parameters in nodes of one rank.
CODES = "--bf16 --hidden-size 64 --ffn-hidden-size 151 --paro-inter-bits-warmup-iters 0"


@pytest.mark.verify
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("flags", "before", "after", "line"),
    [
        # A node is back, and with it updates that are sent as codes, which no copy holds.
        ("--paro-strategy 1,1,2 --paro-inter-param-bits 4", (0, 1, 2), (0, 1, 2, 3), ""),
        # One node is left, where nothing crosses groups.
        (
            "--paro-strategy 1,1,1 --paro-inter-grad-bits 4",
            (0, 1),
            (1,),
            "--paro-inter-grad-bits 4 without effect, 16 bits in use: with one group, of 1 rank",
        ),
        # A size of the ramp-up that is past does not divide.
        ("--paro-strategy III --rampup-batch-size 2 2 4", (0, 1), (0, 1, 2), ""),
    ],
)
def test_nothing_is_lost_where_fewer_bits_or_other_batches_meet_other_nodes(
    tmp_path: Path, flags: str, before: tuple[int, ...], after: tuple[int, ...], line: str
) -> None:
    batch = 6 if "rampup" in flags else 12
    words = f"{CODES} {flags} --paro-survive 1 --paro-elastic --global-batch-size {batch}".split()
    (first, *_) = start(tmp_path, *words, ranks=len(before), nodes=before, exits="4")
    assert first.mistake is None
    (ended, *_) = start(tmp_path, *words, ranks=len(after), nodes=after, exits="4")
    assert ended.mistake is None
    assert line in ended.printed
    assert "recovered iteration 4 from local copies" in ended.printed
    ranks = f"saved by {len(before)} ranks, continued by {len(after)}"
    assert f"local copies: {ranks}" in ended.printed
    iterations = [result[0] for result in results(tmp_path / "metrics.jsonl")]
    assert iterations == list(range(1, 6))


WIDE = "--bf16 --hidden-size 64 --ffn-hidden-size 151 --paro-inter-grad-bits 4"
BITS = (f"III {WIDE}", f"IIG {WIDE} --paro-inter-param-bits 4")


@pytest.mark.verify
@pytest.mark.ranks
@pytest.mark.parametrize("flags", BITS)
def test_codes_between_groups_recover_bit_for_bit(tmp_path: Path, flags: str) -> None:
    """Started again in the first steps, in 16 bits, and among those with codes."""
    words = f"--non-persistent-ckpt-type local --paro-strategy {flags}".split()
    words += ["--paro-inter-bits-warmup-iters", "3"]
    start(tmp_path / "straight", *words, exits="100")
    straight = tmp_path / "straight" / "metrics.jsonl"
    sent = [line["inter_bytes"] for line in read_metrics(straight)]
    assert sent[-1] < 0.5 * sent[2], "codes were sent"
    run = tmp_path / "run"
    start(run, *words)
    assert "recovered iteration 2" in start(run, *words)[0].printed
    assert "recovered iteration 4" in start(run, *words)[0].printed
    assert results(run / "metrics.jsonl") == results(straight)


pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectServer]:
    """A server with a bucket."""
    with ObjectServer().running() as server:
        yield server


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of this process for each test."""
    monkeypatch.setattr(ObjectCache, "folder", tmp_path / "own")


def losses(metrics: Path) -> list[Any]:
    return [json.loads(line)["lm_loss"] for line in metrics.read_text().splitlines()]


def test_ranks_train_on_a_corpus_of_a_store_as_on_files(
    store: ObjectServer, tmp_path: Path
) -> None:
    documents = [[[(7 * n + i) % 127 for i in range(60)]] for n in range(60)]
    (tmp_path / "corpus").mkdir()
    write_corpus(tmp_path / "corpus" / "x", documents)
    upload(tmp_path / "corpus", f"s3://{BUCKET}/corpus")
    url = f"s3://{BUCKET}/corpus/x"
    store.requests.clear()
    for name, prefix in (("there", url), ("here", tmp_path / "corpus" / "x")):
        flags = ["--data-path", prefix, "--metrics-file", tmp_path / name, "--train-iters", "4"]
        flags += ["--object-storage-cache-path", tmp_path / "cache", "--num-workers", "1"]
        done = run_script(["pretrain_llama.py", *MODEL, *flags], 2)
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "there") == losses(tmp_path / "here")
    for suffix in ("bin", "idx", "bin.crc"):
        assert len(store.fetched(f"/{BUCKET}/corpus/x.{suffix}")) == 1, suffix


def train(tmp_path: Path, save: object, *flags: object, nproc: int = 2) -> Any:
    """Trains on synthetic tokens; returns the ended process."""
    words = ["--mock-data", "--save", save, "--load", save, "--metrics-file", tmp_path / "m"]
    words += ["--object-storage-cache-path", tmp_path / "cache", "--paro-strategy", "NNG", *flags]
    return run_script(["pretrain_llama.py", *MODEL, *words], nproc)


def planned(url: str, tmp_path: Path) -> None:
    """A dry run says what a save into a store takes."""
    words = ["--save", url, "--load", url, "--save-interval", 1, "--async-save", "--dry-run"]
    words += ["--world-size", 2, "--mock-data", "--train-iters", 9]
    words += ["--object-storage-cache-path", tmp_path / "cache"]
    done = run_script(["pretrain_llama.py", *MODEL, *words])
    assert done.returncode == 0, done.stderr
    says(done.stdout.replace("\n", " "), f"--save {url}: ... uploads it while training continues")


def read_by_tools(url: str, tmp_path: Path) -> None:
    """A checkpoint of a store is converted and verified, and continues a prompt; two are merged."""
    convert = ["--from", "paro", "--to", "hf", "--input", url, "--output", tmp_path / "hf"]
    inspect = ["tools/inspect_checkpoint.py", "--load", url, "--verify"]
    merge = ["tools/merge_checkpoints.py", "--input", url, "--last", 2]
    merge += ["--output", tmp_path / "merged"]
    generate = ["tools/generate.py", "--load", url, "--prompt", "1 2", "--max-new-tokens", 1]
    for words in (["tools/convert_checkpoint.py", *convert], inspect, merge, generate):
        done = run_script(words, before=partial(setattr, ObjectCache, "folder", tmp_path / "cache"))
        assert done.returncode == 0, done.stderr
    converted, exported = (
        {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}
        for folder in ("hf", "exported")
    )
    assert converted == exported
    assert latest_iteration(tmp_path / "merged") is not None
    refused(run_script([*inspect[:1], "--load", f"gcs://{url}"]), "--load", "gcs://")


@pytest.mark.verify
@pytest.mark.parametrize(
    "how", [pytest.param([], id="sync"), pytest.param(["--async-save"], id="async")]
)
def test_a_run_saves_to_a_store_and_continues_from_it(
    store: ObjectServer, tmp_path: Path, how: list[str]
) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}"
    sums = []
    for save, starts in ((url, (3, 6)), (tmp_path / "ckpt", (6,))):
        for iterations in starts:
            flags = ["--train-iters", iterations, "--save-interval", "1", "--lr-decay-iters", "9"]
            flags += ["--override-opt_param-scheduler", "--save-retain-interval", "2", *how]
            flags += ["--save-hf", tmp_path / "exported"] * (save == url and iterations == 6)
            done = train(tmp_path, save, *flags)
            assert done.returncode == 0, done.stderr
        assert iterations_in(path_of(save)) == {2, 4, 5, 6}
        assert latest_iteration(path_of(save)) == 6
        manifest = read_manifest(find_checkpoint(path_of(save)))
        manifest.verify()
        sums.append({name.rpartition("__")[2]: of for name, of in manifest.files.items()})
    if not how:
        planned(url, tmp_path)
        read_by_tools(url, tmp_path)
    there, here = ({k: v for k, v in of.items() if k.endswith("distcp")} for of in sums)
    assert there == here
    assert not [*(tmp_path / "cache").glob("upload-*")]
