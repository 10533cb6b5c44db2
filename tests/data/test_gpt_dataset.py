"""Samples of a corpus, its splits, the cache of its order, and ids outside the vocabulary."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import data.gpt_dataset
import data.index_cache
from data.config import DataConfig
from data.gpt_dataset import (
    GPTDataset,
    SplitRequest,
    TooFewTokensError,
    build_gpt_dataset,
    open_checked,
)
from data.index_cache import StoredArray
from data.indexed_dataset import IndexedDataset
from data.sample_order import SampleOrder
from paro.errors import UserError
from tests.helpers.corpora import write_corpus
from tests.helpers.refusals import refused
from tests.helpers.warm_process import HANGS_AFTER

VOCAB = 1000
CONFIG = DataConfig(data_path=("corpus",), split="80,20,0", seq_length=8, seed=1234)


@pytest.fixture
def corpus(tmp_path: Path) -> IndexedDataset:
    random = np.random.RandomState(0)
    documents = ([random.randint(0, VOCAB, size=random.randint(1, 40))] for _ in range(30))
    return IndexedDataset(write_corpus(tmp_path / "corpus", documents))


def requested(
    split_name: str = "train", config: DataConfig = CONFIG, count: int = 50
) -> SplitRequest:
    return SplitRequest(config=config, split_name=split_name, num_samples=count, vocab_size=VOCAB)


def build(indexed: IndexedDataset, *words: str, **fields: Any) -> GPTDataset:
    return build_gpt_dataset(indexed, requested(*words, **fields))


def all_samples(dataset: GPTDataset) -> list[list[int]]:
    return [dataset[i].text.tolist() for i in range(len(dataset))]


def cache_files(dataset: GPTDataset) -> list[Path]:
    return sorted((Path(dataset.indexed.prefix) / "cache" / "GPTDataset_indices").iterdir())


def test_the_cache_has_megatrons_place_and_names(corpus: IndexedDataset) -> None:
    dataset = build(corpus)
    names = [path.name for path in cache_files(dataset)]
    digest = names[0].partition("-")[0]
    assert names == [
        f"{digest}-GPTDataset-train-{part}"
        for part in ("description.txt", "document_index.npy", "sample_index.npy",
                     "shuffle_index.npy")
    ]  # fmt: skip
    description = cache_files(dataset)[0].read_text().rpartition("\n{")[0]
    assert hashlib.md5(description.encode()).hexdigest() == digest
    facts = json.loads(description)
    assert facts["dataset_path"] == corpus.prefix
    assert facts["split_matrix"] == [[0.0, 0.8], [0.8, 1.0], None]
    assert (facts["num_samples"], facts["random_seed"], facts["sequence_length"]) == (50, 1234, 8)


def test_a_second_start_reads_the_cache(corpus: IndexedDataset, tmp_path: Path) -> None:
    config = replace(CONFIG, data_cache_path=str(tmp_path / "cache"))
    first = build(corpus, config=config)
    second = build(corpus, config=config)
    assert first.source == f"indices written to {tmp_path / 'cache'}"
    assert second.source == f"indices read from {tmp_path / 'cache'}"
    assert isinstance(second.order.sample_index, StoredArray)
    assert all_samples(first) == all_samples(second)
    assert not (tmp_path / "corpus").exists()


def test_rewritten_data_does_not_meet_the_old_order(tmp_path: Path) -> None:
    sizes = list(range(1, 31))
    for rewritten in (sizes, sizes[::-1]):  # the same number of tokens and documents
        prefix = write_corpus(tmp_path / "corpus", ([[size] * size] for size in rewritten))
        dataset = build(IndexedDataset(prefix), config=replace(CONFIG, split="1"))
        assert "written" in dataset.source
        assert all(len(sample) == 9 for sample in all_samples(dataset))


@pytest.mark.parametrize("part", [0, 1, 2, 3])
@pytest.mark.parametrize("damage", ["flip", "header", "truncate", "remove", "pipe"])
def test_a_damaged_cache_is_built_anew(corpus: IndexedDataset, part: int, damage: str) -> None:
    expected = all_samples(build(corpus))
    path = cache_files(build(corpus))[part]
    content = bytearray(path.read_bytes())
    content[21 if damage == "header" else -5] ^= 2  # in a header from < to >, the order of bytes
    path.unlink()
    if damage == "pipe":
        os.mkfifo(path)
    elif damage != "remove":
        path.write_bytes(content[: -7 if damage == "truncate" else None])
    repaired = build(corpus)
    assert "written" in repaired.source
    assert all_samples(repaired) == expected
    assert "read" in build(corpus).source


def test_a_cache_that_is_shortened_while_it_is_used_is_one_line(corpus: IndexedDataset) -> None:
    expected = all_samples(build(corpus))
    for part in (1, 2, 3):
        dataset = build(corpus)
        path = cache_files(dataset)[part]
        os.truncate(path, 128)
        refused(partial(dataset.__getitem__, 7), f"{path} has 128 bytes ... run again")
        assert all_samples(build(corpus)) == expected


@pytest.mark.filterwarnings("ignore")  # of numpy and of Python, as they parse the header
def test_any_damaged_byte_of_a_header_is_refused_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.arange(5))
    content = path.read_bytes()
    for position, byte in product(range(80), b"\0('\xff"):
        path.write_bytes(content[:position] + bytes([byte]) + content[position + 1 :])
        with suppress(UserError):
            StoredArray(path)


def test_a_cache_that_cannot_be_read_back_is_kept_in_memory(
    corpus: IndexedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that its owner may not read, as under some umasks, ends no run."""

    def denied(_file: object) -> int:
        raise UserError("x.npy cannot be read: Permission denied")

    monkeypatch.setattr(data.index_cache, "crc32_of_file", denied)
    assert build(corpus).source.startswith("indices kept in memory")


def test_a_cache_that_another_machine_replaces_over_nfs_is_read_on(
    corpus: IndexedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has removed the file that is open here, as for a name that got an equal one."""
    build(corpus)
    dataset = build(corpus)
    expected = all_samples(dataset)
    pread, stale = os.pread, {dataset.order.shuffle_index.file._descriptor}  # type: ignore[union-attr]

    def stale_pread(descriptor: int, length: int, begin: int) -> bytes:
        if descriptor in stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return pread(descriptor, length, begin)

    monkeypatch.setattr(os, "pread", stale_pread)
    assert all_samples(dataset) == expected


@pytest.mark.slow("reads 8,000 samples three times")
def test_a_folder_that_cannot_be_written_or_a_full_disk_costs_the_cache_only(
    corpus: IndexedDataset, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Simulated by a limit on file sizes; numpy gives no reason for a short write."""
    expected = all_samples(build(corpus, count=8000))
    (tmp_path / "file").write_text("not a folder")
    config = replace(CONFIG, data_cache_path=str(tmp_path / "file" / "cache"))
    dataset = build(corpus, config=config, count=8000)
    assert dataset.source.startswith("indices kept in memory")
    assert all_samples(dataset) == expected
    assert len(recwarn) == 0
    for file in cache_files(build(corpus, count=8000)):
        file.unlink()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        dataset = build(corpus, count=8000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert dataset.source.startswith("indices kept in memory")
    assert "cannot be written: no room is left" in dataset.source
    assert all_samples(dataset) == expected
    assert not cache_files(dataset)


def build_in_process(prefix: str, start: object, results: object) -> None:
    start.wait()  # type: ignore[attr-defined]
    dataset = build(IndexedDataset(prefix), count=2000)
    results.put((all_samples(dataset), dataset.source))  # type: ignore[attr-defined]


@pytest.mark.process
def test_concurrent_builders_agree(corpus: IndexedDataset) -> None:
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(4), context.Queue()
    builders = [
        context.Process(target=build_in_process, args=(corpus.prefix, start, results))
        for _ in range(4)
    ]
    for builder in builders:
        builder.start()
    answers = [results.get(timeout=HANGS_AFTER) for _ in builders]
    for builder in builders:
        builder.join()
    assert all(samples == answers[0][0] for samples, _ in answers)
    sources = [source.split()[1] for _, source in answers]
    assert sorted(sources) == ["read", "read", "read", "written"]  # one builds, three wait for it
    assert len(cache_files(build(corpus, count=2000))) == 4


def hold_the_lock(corpus: IndexedDataset, holding: object) -> None:
    def build_for_ever(*_: object) -> SampleOrder:
        holding.set()  # type: ignore[attr-defined]
        time.sleep(600)
        raise AssertionError

    data.gpt_dataset.build_order = build_for_ever
    build(corpus)


@pytest.mark.process
def test_a_builder_that_dies_holds_nobody_back(corpus: IndexedDataset) -> None:
    context = multiprocessing.get_context("fork")
    holding = context.Event()
    builder = context.Process(target=hold_the_lock, args=(corpus, holding))
    builder.start()
    assert holding.wait(60)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(build, corpus)
        time.sleep(0.3)
        assert not waiting.done()
        builder.kill()
        assert "written" in waiting.result(timeout=HANGS_AFTER).source


def test_a_split_without_a_sample_is_refused(corpus: IndexedDataset) -> None:
    config = replace(CONFIG, seq_length=corpus.num_tokens)
    flags = ("--seq-length", "--split", f"--data-path {corpus.prefix}")
    refused(lambda: build(corpus, config=config), *flags)
    refused(lambda: build(corpus, config=replace(CONFIG, split="0,1,0")), "leaves 0 tokens")
    with pytest.raises(TooFewTokensError, match=r"leaves 0 tokens .* for test and one sample"):
        build(corpus, "test", config=replace(CONFIG, split="1000,1,1"))


def test_the_shortest_data_that_make_a_sample(tmp_path: Path) -> None:
    write_corpus(tmp_path / "x", [[range(9)]])
    config = replace(CONFIG, split="1,0,0")
    dataset = build(IndexedDataset(tmp_path / "x"), config=config, count=3)
    # Two epochs and a token: samples cross the end of an epoch.
    assert dataset.plan.num_epochs == 3
    assert sorted(all_samples(dataset))[0] == list(range(9))
    longer = replace(config, seq_length=9)
    refused(lambda: build(IndexedDataset(tmp_path / "x"), config=longer), "leaves 9 tokens")


def test_all_of_a_corpus_may_be_for_one_split(corpus: IndexedDataset) -> None:
    config = replace(CONFIG, split=None, data_path=(), train_data_path=("corpus",))
    dataset = build(corpus, "valid", config=config, count=5)
    assert set(dataset.order.document_index[:].tolist()) == set(range(30))
    longer = replace(config, seq_length=corpus.num_tokens)
    request = replace(requested("valid", longer, 5), flag="--valid-data-path")
    refused(lambda: build_gpt_dataset(corpus, request), "--valid-data-path ... validation")


def test_an_id_outside_the_vocabulary_is_found_when_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a part of a corpus, and wherever it is in one of the size that is read whole."""
    monkeypatch.setattr(data.gpt_dataset, "SCAN_BYTES", 64 * 8)
    prefix = str(write_corpus(tmp_path / "x", [[[1] * 999 + [VOCAB]]]))
    opens = partial(open_checked, CONFIG, prefix, VOCAB, None)
    open_checked(CONFIG, prefix, VOCAB + 1, None)
    refused(opens, f"token id {VOCAB}, ... {VOCAB} entries")
    monkeypatch.setattr(data.gpt_dataset, "SCAN_BYTES", 2 * 640)
    for place in range(0, 633, 7):
        write_corpus(tmp_path / "x", [[[1] * place + [VOCAB] + [1] * (632 - place)]])
        refused(opens, "token id")


def test_an_id_outside_the_vocabulary_is_found_when_fetching(corpus: IndexedDataset) -> None:
    dataset = build(corpus)
    dataset.vocab_size = int(dataset[3].text.max())
    refused(lambda: dataset[3], "--data-path ... --tokenizer-model", "corpus.bin")
