"""Training from and into an object store, on a server of the loopback: the same bits as on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paro.checkpoint.directory import find_checkpoint, iterations_in, latest_iteration
from paro.checkpoint.manifest import read_manifest
from paro.files.object_cache import ObjectCache
from paro.files.object_store import path_of
from tests.end_to_end.test_training import MODEL
from tests.helpers.corpora import write_corpus
from tests.helpers.object_server import BUCKET, ObjectServer, upload
from tests.helpers.refusals import refused, says
from tests.helpers.scripts import run_script

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
        done = run_script(words, before=partial(ObjectCache.use, str(tmp_path / "cache")))
        assert done.returncode == 0, done.stderr
    converted, exported = (
        {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}
        for folder in ("hf", "exported")
    )
    assert converted == exported
    assert latest_iteration(tmp_path / "merged") is not None
    refused(run_script([*inspect[:1], "--load", f"gcs://{url}"]), "--load", "gcs://")


@pytest.mark.parametrize(
    "how", [pytest.param([], marks=pytest.mark.verify, id="sync"), ["--async-save"]]
)
def test_a_run_saves_to_a_store_and_continues_from_it(
    store: ObjectServer, tmp_path: Path, how: list[str]
) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}"
    sums = []
    for save in (url, tmp_path / "ckpt"):
        for iterations in (3, 6):
            flags = ["--train-iters", iterations, "--save-interval", "1", "--lr-decay-iters", "9"]
            flags += ["--override-opt_param-scheduler", "--save-retain-interval", "2", *how]
            flags += ["--save-hf", tmp_path / "exported"] * (save == url and iterations == 6)
            done = train(tmp_path, save, *flags)
            assert done.returncode == 0, done.stderr
        assert iterations_in(path_of(save)) == {2, 4, 5, 6}
        assert latest_iteration(save) == 6
        manifest = read_manifest(find_checkpoint(save))
        manifest.verify()
        sums.append({name.rpartition("__")[2]: of for name, of in manifest.files.items()})
    if how:
        planned(url, tmp_path)
        read_by_tools(url, tmp_path)
    there, here = ({k: v for k, v in of.items() if k.endswith("distcp")} for of in sums)
    assert there == here
    assert not [*(tmp_path / "cache").glob("upload-*")]
