"""Training from and into an object store, on a server of the loopback: the same bits as on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.test_training import MODEL
from tests.helpers.corpora import write_corpus
from tests.helpers.object_server import BUCKET, ObjectServer, upload
from tests.helpers.scripts import run_script

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectServer]:
    """A server with a bucket."""
    with ObjectServer().running() as server:
        yield server


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
