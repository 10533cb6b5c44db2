"""Faults of object stores into which a run saves or from which it reads, on the loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paro.files.object_cache import ObjectCache
from paro.files.object_store import path_of
from tests.data.test_tokenizer import train_sentencepiece
from tests.faults.conftest import Scenario
from tests.faults.job import LIMIT_SECONDS, Point, Run, other_host
from tests.helpers import store_emulators
from tests.helpers.corpora import write_corpus
from tests.helpers.object_server import BUCKET, SECRET, ObjectServer, upload

pytestmark = [pytest.mark.verify, pytest.mark.ranks]

# A save waits for a store for a third of it; a process that wakes after it ends at once.
LONGER = ("--distributed-timeout-minutes", 3)
HOW = pytest.mark.parametrize("how", ["", "--async-save"], ids=["sync", "async"])


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with ObjectServer().running() as server:
        yield server


@pytest.fixture
def store(
    server: ObjectServer, scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ObjectServer]:
    """The server, into which the run of the scenario saves."""
    monkeypatch.setattr(ObjectCache, "folder", tmp_path / "of the test")
    scenario.run = Run(tmp_path, path_of(f"s3://{BUCKET}/{tmp_path.name}"))
    scenario.flags = ("--object-storage-cache-path", tmp_path / "cache")
    yield server
    for job in scenario.jobs:
        assert SECRET not in job.text()
    server.recovers()


@HOW
def test_killed_in_an_upload(scenario: Scenario, store: ObjectServer, how: str) -> None:
    """Half of the files are in the bucket, and no manifest."""
    job = scenario.paused(Point.UPLOAD, 2, *how.split(), at=1)
    job.kill()
    scenario.ended("")
    scenario.resumes(3)


def test_two_runs_of_one_bucket_folder(scenario: Scenario, store: ObjectServer) -> None:
    job = scenario.paused(Point.READ_BACK, 2, at=1)
    second = scenario.start()
    scenario.ends(second, [1], f"--save {scenario.run.save} is in use by process ", within=30.0)
    scenario.run.release()
    assert job.end(60.0) == [0]
    scenario.is_whole()


@pytest.mark.root
def test_owner_in_a_store_stopped_for_a_minute(scenario: Scenario, store: ObjectServer) -> None:
    """When it is woken in its upload it ends, and its files are not its successor's."""
    scenario.ranks, scenario.plain = 1, True
    first = scenario.paused(Point.UPLOAD, 2, *LONGER, before=[other_host])
    scenario.is_replaced(first, "lost its lease", started=120.0, ended=30.0)


@pytest.mark.parametrize("how", ["500", "503", "hangs"])
def test_a_store_that_fails_in_a_save(scenario: Scenario, store: ObjectServer, how: str) -> None:
    """Errors, throttling, and a part that is never answered: all are tried again."""
    job = scenario.paused(Point.WRITE_FILES, 2)
    store.fails(how, "PUT", "iter_", times=1 if how == "hangs" else 8)
    scenario.run.release()
    scenario.ends(job, [0], within=90.0)
    scenario.is_whole()


def test_a_store_that_stops_for_30_s(scenario: Scenario, store: ObjectServer) -> None:
    job = scenario.paused(Point.WRITE_FILES, 2, *LONGER)
    store.stops(30.0)
    scenario.run.release()
    scenario.ends(job, [0], within=120.0)
    scenario.is_whole()


@HOW
def test_a_store_that_is_gone_in_a_save(scenario: Scenario, store: ObjectServer, how: str) -> None:
    job = scenario.paused(Point.WRITE_FILES, 2, *LONGER, *how.split())
    store.fails("500", times=10**6)
    scenario.run.release()
    scenario.ends(job, [1], "iteration 6 is not saved: --save ", within=4 * LIMIT_SECONDS)
    assert "waiting for the object store" in job.text()
    store.recovers()
    scenario.resumes(3)


def test_a_store_that_is_gone_for_one_save(scenario: Scenario, store: ObjectServer) -> None:
    job = scenario.paused(Point.WRITE_FILES, 2, "--on-save-failure", "continue")
    store.fails("500", times=10**6)
    scenario.run.release()
    job.wait_for(lambda: "training continues (--on-save-failure" in job.text(), 2 * LIMIT_SECONDS)
    store.recovers()
    scenario.ends(job, [0], within=60.0)
    assert scenario.run.saved() == 12


def test_a_wrong_key(scenario: Scenario, store: ObjectServer) -> None:
    store.fails("403", times=10**6)
    scenario.strikes()
    message = "the store refuses the credentials"
    scenario.ends(scenario.start(ranks=1, plain=True), [2], message, within=30.0)


def test_answers_cut_short_at_a_start(scenario: Scenario, store: ObjectServer) -> None:
    assert scenario.start("--exit-interval", 4).end(60.0) == [0]
    store.fails("truncated", "GET", "iter_", times=6)
    scenario.strikes()
    scenario.ended("")
    scenario.resumes(4)


def test_a_damaged_object(scenario: Scenario, store: ObjectServer) -> None:
    assert scenario.start("--exit-interval", 6).end(60.0) == [0]
    (path,) = (p for p in (scenario.run.save / "iter_0000006").iterdir() if "__0_0" in p.name)
    content = path.read_bytes()
    path.write_bytes(content[:500] + bytes([content[500] ^ 4]) + content[501:])
    scenario.strikes()
    job = scenario.start()
    scenario.ends(job, [0], within=60.0)
    assert "passing over iteration 6" in job.text()
    scenario.is_saved_whole()


def test_a_store_that_is_gone_while_a_corpus_is_read(
    scenario: Scenario, store: ObjectServer, tmp_path: Path
) -> None:
    (tmp_path / "corpus").mkdir()
    write_corpus(tmp_path / "corpus" / "x", [[list(range(100)) * 100]])
    upload(tmp_path / "corpus", f"s3://{BUCKET}/{tmp_path.name}/corpus")
    data = ["--data-path", f"s3://{BUCKET}/{tmp_path.name}/corpus/x", "--split", "8,1,1"]
    store.fails("500", "GET", "corpus/x.bin", times=10**6)
    scenario.strikes()
    job = scenario.start(*data, ranks=1, plain=True)
    scenario.ends(job, [1], "waited", within=3 * LIMIT_SECONDS)
    assert "waiting for the object store" in job.text()


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_killed_in_an_upload_to_another_store(
    scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """Reads its corpus and tokenizer there, refuses a second run, and ends as one on local files.

    Google's store is fake-gcs-server, Azure's is Azurite.
    """
    monkeypatch.setattr(ObjectCache, "folder", tmp_path / "of the test")
    scenario.ranks, scenario.plain = 1, True
    (tmp_path / "data").mkdir()
    write_corpus(tmp_path / "data" / "x", [[list(range(100)) * 100]])
    train_sentencepiece(tmp_path / "data" / "x.model")

    def reading(place: object) -> tuple[object, ...]:
        tokenizer = ("--tokenizer-type", "SentencePieceTokenizer", "--vocab-size", 280)
        data = ("--tokenizer-model", f"{place}/x.model", "--data-path", f"{place}/x")
        return (*tokenizer, *data, "--split", "8,1,1", "--num-workers", 1)

    with store_emulators.running(scheme, tmp_path) as bucket:
        local = scenario.undisturbed(1, *reading(tmp_path / "data"))
        scenario.undisturbed = lambda *_: local
        upload(tmp_path / "data", f"{bucket}/data")
        scenario.run = Run(tmp_path, path_of(f"{bucket}/run"))
        cache = ("--object-storage-cache-path", tmp_path / "cache")
        scenario.flags = (*reading(f"{bucket}/data"), *cache)
        job = scenario.paused(Point.UPLOAD, 2, at=1)
        second = scenario.start()
        scenario.ends(second, [2], f"--save {scenario.run.save} is in use by process ", within=30.0)
        scenario.strikes()
        job.kill()
        scenario.ended("")
        scenario.resumes(3)
    for job in scenario.jobs:
        assert store_emulators.SECRET not in job.text()
