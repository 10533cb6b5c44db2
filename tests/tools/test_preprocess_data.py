"""From text to indexed data sets; mistakes and stops leave the good files and no worker."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from data import corpus
from data.indexed_dataset import IndexedDatasetWriter
from data.sources import SourceChunk
from tests.helpers.corpora import corpus_bytes, read_corpus
from tests.helpers.ranks import ROOT
from tests.helpers.refusals import printed, refused, write_lines
from tests.helpers.scripts import children, lives, wait_for
from tests.helpers.warm_process import HANGS_AFTER
from tools import preprocess_data
from tools.preprocess_data import main

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1001"]
EOD = 1000


def preprocess(source: object, *flags: str, workers: int = 1) -> None:
    """Into the prefix `out` beside the source, unless `flags` name another."""
    out = ["--output-prefix", str(Path(str(source)).with_name("out"))]
    main(["--input", str(source), *out, "--workers", str(workers), *NULL, *flags])


def test_documents_in_order_with_their_ends(tmp_path: Path) -> None:
    entries = [{"text": "1 2 3"}, {"text": ""}, {"text": ["4", "", "5 6"]}]
    path = write_lines(tmp_path / "a.jsonl", *entries)
    for flags, end in (((), []), (("--append-eod",), [EOD])):
        preprocess(path, *flags)
        expected = [[[1, 2, 3, *end]], [], [[4], [5, 6, *end]]]
        assert read_corpus(tmp_path / "out_text_document") == expected


def test_one_data_set_per_key_and_a_document_per_txt_file(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"title": "1", "body": "2 3"})
    (tmp_path / "b.txt").write_text("4\n5\n")
    more = [str(path), str(tmp_path / "b.txt")]
    preprocess(path, "--input", *more, "--json-keys", "title", "body")
    assert read_corpus(tmp_path / "out_title_document") == [[[1]], [[4, 5]]]
    assert read_corpus(tmp_path / "out_body_document") == [[[2, 3]], [[4, 5]]]


@pytest.mark.process
def test_a_bad_line_is_named_and_what_was_there_stays(tmp_path: Path) -> None:
    good = tmp_path / "a.jsonl"
    good.write_bytes(b'{"text": "1"}\n\n{"text": "1 word"}\n{"text": "2"}\n')
    for workers in (1, 2):
        message = f"{good}, line 3: 'word' is no token id"
        refused(partial(preprocess, good, workers=workers), message)
        assert list(tmp_path.iterdir()) == [good]
    preprocess(write_lines(good, {"text": "1 2"}))
    good.write_bytes(good.read_bytes() + b"{\n")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    refused(lambda: preprocess(good), f"{good}, line 2")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_key_that_cannot_be_finished_leaves_all_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"title": "1", "body": "2 3"})
    flags = ["--output-prefix", str(tmp_path / "out" / "x"), "--json-keys", "title", "body"]
    preprocess(path, *flags)
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    write_index = IndexedDatasetWriter._write_index

    def fail(self: IndexedDatasetWriter, place: Path) -> None:
        if failing in self.prefix:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_index(self, place)

    monkeypatch.setattr(IndexedDatasetWriter, "_write_index", fail)
    for failing in ("title", "body"):
        message = f"x_{failing}_document.bin cannot be written: No space left on device"
        with pytest.raises(OSError, match=message):
            preprocess(path, *flags, "--append-eod")
        assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert len(before) == 6


def test_mistakes_are_one_line_and_leave_nothing(tmp_path: Path) -> None:
    for flags, message in (
        (["--input", "none.jsonl"], "--input none.jsonl is missing"),
        (["--partitions", "10001"], "must be at most 10000"),
        (["--partitions", "1" + "0" * 30], "--partitions: ... must be at most 9223372036854775807"),
        *((["--workers", n], f"--workers {n} must be at") for n in ("0", "1000000")),
        (["--split-sentences"], "--split-sentences is not supported"),
        (["--json-keys", "empty", "--skip-malformed"], "holds no text under the key 'empty'"),
        (["--json-keys", "none", "--skip-malformed"], "skipped 1 malformed documents: "),
        (["--tokenizer-type", "Llama2Tokenizer"], "Llama2Tokenizer needs --tokenizer-model"),
        (["--json-keys", "empty"], "holds no text under the key 'empty'"),
    ):
        path = write_lines(tmp_path / "a.jsonl", {"text": "1", "empty": ""})
        refused(partial(preprocess, path, *flags), message)
        assert list(tmp_path.iterdir()) == [path]


def lines_file(path: Path, count: int) -> Path:
    return write_lines(path, *({"text": f"{i % 1000} {i % 7}", "n": "5"} for i in range(count)))


def written(prefix: Path, key: str = "text") -> list[bytes]:
    return corpus_bytes(f"{prefix}_{key}_document")


@pytest.mark.process
def test_partitions_and_workers_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "BATCH_BYTES", 500)
    lines_file(tmp_path / "a.jsonl", 700)
    (tmp_path / "b.txt").write_text("7 " * 900)
    whole, parts = tmp_path / "out" / "whole", tmp_path / "out" / "parts"
    keys = ["--json-keys", "text", "n", "--append-eod", "--output-prefix"]
    preprocess(tmp_path, *keys, str(whole))
    flags = ["--partitions", "5", "--keep-sequential-samples"]
    for workers in (1, 2):
        preprocess(tmp_path, *keys, str(parts), *flags, workers=workers)
        for key in ("text", "n"):
            assert written(parts, key) == written(whole, key)
        assert not list((tmp_path / "out").glob("*_partitions"))


def test_finished_partitions_are_not_done_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = partial(preprocess, lines_file(tmp_path / "a.jsonl", 1000))
    run("--output-prefix", str(tmp_path / "whole"))

    def two_batches(*arguments: object) -> Iterator[object]:
        if len(list(folder.glob("*.finished.json"))) == 2:
            raise KeyboardInterrupt
        return all_batches(*arguments)

    folder = tmp_path / "out_partitions"
    all_batches = preprocess_data.encoded_batches
    monkeypatch.setattr(preprocess_data, "encoded_batches", two_batches)
    with pytest.raises(SystemExit, match="130"):
        run("--partitions", "4")
    finished = {path.name for path in folder.glob("*.finished.json")}
    assert finished == {"00000.finished.json", "00001.finished.json"}
    assert not list(folder.glob(".*")), "what was not finished is gone"
    (folder / ".00002_text_document.bin.1.ab.tmp").write_text("of a run that was killed")
    read: list[str] = []

    def counted(chunks: list[SourceChunk], *arguments: object) -> Iterator[object]:
        read.extend(chunk.path for chunk in chunks)
        return all_batches(chunks, *arguments)

    monkeypatch.setattr(preprocess_data, "encoded_batches", counted)
    capsys.readouterr()
    refused(lambda: run("--partitions", "4", "--append-eod"), f"{folder} holds partitions")
    run("--partitions", "4")
    assert len(read) == 2
    assert "partition 2 of 4 is done already" in capsys.readouterr().err
    assert written(tmp_path / "out") == written(tmp_path / "whole")
    assert not folder.exists()


def test_a_long_text_is_one_sequence_with_one_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "TEXT_BYTES", 64)
    (tmp_path / "b.txt").write_text("3 4")
    for blanks in ("", " " * 500):
        (tmp_path / "a.txt").write_text("".join(f"{i}\n" for i in range(200)) + blanks)
        preprocess(f"{tmp_path}/*.txt", "--append-eod")
        expected = [[[*range(200), EOD]], [[3, 4, EOD]]]
        assert read_corpus(tmp_path / "out_text_document") == expected


def test_malformed_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "1"}\n{\n{"text": "2"}\n{"body": ""}\n\xff\n[]\n{"text": "3"}')
    flags = ["--output-prefix", tmp_path / "out", "--workers", 1, "--skip-malformed"]
    out = printed(main, "--input", path, *flags, *NULL)
    assert read_corpus(tmp_path / "out_text_document") == [[[1]], [[2]], [[3]]]
    assert f"skipped 4 malformed documents: {path}, line 2 is not valid JSON" in out
    assert "; ..." in out
    assert "3 documents, 3 tokens as uint16" in out


def test_llama2_begins_every_text(pieces: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": ["a b", "", "c"]}, {"text": ""})
    model = ["--tokenizer-model", str(pieces), "--append-eod"]
    flags = ["--input", str(path), "--output-prefix", str(tmp_path / "out"), "--workers", "1"]
    main([*flags, "--tokenizer-type", "Llama2Tokenizer", *model])
    with_beginning = read_corpus(tmp_path / "out_text_document")
    assert [[ids[0] for ids in document] for document in with_beginning] == [[1, 1], []]
    main([*flags, "--tokenizer-type", "SentencePieceTokenizer", *model])
    without = read_corpus(tmp_path / "out_text_document")
    assert without == [[ids[1:] for ids in document] for document in with_beginning]


@pytest.mark.process
def test_the_best_number_of_workers_is_found_and_nothing_written(tmp_path: Path) -> None:
    lines_file(tmp_path / "a.jsonl", 1000)
    flags = ["--find-optimal-num-workers", "--workers-to-check", "1", "2", "--max-documents", "9"]
    base = ["--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "x", *NULL]
    out = printed(main, *base, *flags).splitlines()
    assert [line.split(":")[0] for line in out[:2]] == ["--workers 1", "--workers 2"]
    assert re.fullmatch(r"the fastest on this machine is --workers [12]; nothing was .*", out[2])
    assert len(list(tmp_path.iterdir())) == 1


def start(text: Path, prefix: Path, *flags: str, **options: object) -> subprocess.Popen[str]:
    """Preprocessing; unless it has other flags, by two workers that say how far they are."""
    reads = flags or ("--workers", "2", "--log-interval", "1000")
    words = ["--input", str(text), "--output-prefix", str(prefix), *reads, *NULL]
    command = [sys.executable, "tools/preprocess_data.py", *words]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, **pipes, **options)


@pytest.fixture
def good_files(tmp_path: Path) -> Iterator[Path]:
    """The prefix of a corpus, whose files are the same at the end of the test, and alone."""
    text, prefix = lines_file(tmp_path / "good.jsonl", 10), tmp_path / "out" / "x"
    preprocess(text, "--output-prefix", str(prefix))
    before = written(prefix)
    yield prefix
    assert written(prefix) == before
    assert len(list(prefix.parent.iterdir())) == 3


ENDS = [
    # the signal, whether a worker gets it, the status, the last line
    (signal.SIGKILL, True, 2, "error: a worker process was killed"),
    (signal.SIGTERM, False, 130, "stopped"),
    (signal.SIGKILL, False, -signal.SIGKILL, ""),
]


@pytest.mark.process
def test_a_killed_worker_and_a_signal_are_one_line_and_leave_no_worker(
    tmp_path: Path, good_files: Path
) -> None:
    text = tmp_path / "a.jsonl"
    text.write_bytes(b'{"text": "1 2 3"}\n' * 400_000)
    killed = tmp_path / "killed"  # cannot remove what it has begun to write
    prefixes = [good_files, good_files, killed]
    processes = [start(text, prefix) for prefix in prefixes]  # all at once
    for process, (stop, to_worker, status, message) in zip(processes, ENDS, strict=True):
        assert process.stderr.readline().startswith("Processed")
        spawned = ((child, Path(f"/proc/{child}/cmdline")) for child in children(process.pid))
        workers = [child for child, command in spawned if "spawn_main" in command.read_text()]
        assert len(workers) == 2
        os.kill(workers[0] if to_worker else process.pid, stop)
        _, err = process.communicate(timeout=HANGS_AFTER)
        assert process.returncode == status, stop
        if message:
            *others, last = err.splitlines()
            assert last.startswith(f"preprocess_data.py: {message}")
            assert all(line.startswith("Processed") for line in others)
        wait_for(lambda workers=workers: not any(map(lives, workers)))
    assert not list(tmp_path.glob("killed*.idx"))


@pytest.mark.process
def test_a_full_disk_is_one_line_and_leaves_the_good_files(
    tmp_path: Path, good_files: Path
) -> None:
    """Simulated by a limit on file sizes: the system's error differs only in its number."""
    text = lines_file(tmp_path / "a.jsonl", 50_000)
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (65536, 65536))
    process = start(text, good_files, "--workers", "1", preexec_fn=limit)
    _, err = process.communicate(timeout=HANGS_AFTER)
    assert process.returncode == 1
    assert f"{good_files}_text_document.bin cannot be written: File too large" in err
    assert sum(not line.startswith("Processed") for line in err.splitlines()) == 1
