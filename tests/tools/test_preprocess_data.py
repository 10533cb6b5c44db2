"""Text in, indexed data sets out; a bad line is named and leaves nothing behind."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from data.indexed_dataset import IndexedDataset
from tools.preprocess_data import main

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
EOD = 1000


def write_lines(path: Path, *entries: object) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def read(prefix: Path) -> list[list[list[int]]]:
    indexed = IndexedDataset(prefix)
    bounds = indexed.document_indices.tolist()
    return [[indexed[i].tolist() for i in range(begin, end)] for begin, end in pairwise(bounds)]


def test_documents_in_order_with_their_ends(tmp_path: Path) -> None:
    entries = [{"text": "1 2 3"}, {"text": ""}, {"text": ["4", "", "5 6"]}]
    path = write_lines(tmp_path / "a.jsonl", *entries)
    flags = ["--output-prefix", str(tmp_path / "out"), "--append-eod", "--workers", "1"]
    assert main(["--input", str(path), *flags, *NULL]) == 0
    assert read(tmp_path / "out_text_document") == [[[1, 2, 3, EOD]], [], [[4], [5, 6, EOD]]]


def test_without_ends(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": "1 2"})
    flags = ["--output-prefix", str(tmp_path / "out"), "--workers", "1"]
    assert main(["--input", str(path), *flags, *NULL]) == 0
    assert read(tmp_path / "out_text_document") == [[[1, 2]]]


def test_one_data_set_per_key_and_a_document_per_txt_file(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"title": "1", "body": "2 3"})
    (tmp_path / "b.txt").write_text("4\n5\n")
    flags = ["--output-prefix", str(tmp_path / "out"), "--workers", "1"]
    keys = ["--json-keys", "title", "body"]
    assert main(["--input", str(path), str(tmp_path / "b.txt"), *keys, *flags, *NULL]) == 0
    assert read(tmp_path / "out_title_document") == [[[1]], [[4, 5]]]
    assert read(tmp_path / "out_body_document") == [[[2, 3]], [[4, 5]]]


def test_workers_write_the_same_bytes_and_report_progress(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", *({"text": f"{i} {i + 1}"} for i in range(300)))
    for workers in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "tools/preprocess_data.py", "--input", str(path),
             "--output-prefix", str(tmp_path / workers), "--workers", workers,
             "--log-interval", "100", *NULL],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines = done.stderr.splitlines()
        assert [line.split()[1] for line in lines] == ["100", "200", "300", "300"]
        pattern = r"Processed \d+ documents \([\d.]+ docs/s, [\d.]+ MB/s\)\."
        assert all(re.fullmatch(pattern, line) for line in lines)
        assert "300 documents, 600 tokens as uint16" in done.stdout
    for suffix in ("bin", "idx"):
        one, two = (tmp_path / f"{name}_text_document.{suffix}" for name in "12")
        assert one.read_bytes() == two.read_bytes()


BAD_LINES = [
    (b'{"text": "1"', "line 3 is not valid JSON"),
    (b'{"body": "1"}', "line 3 has no key 'text'; its keys are: body"),
    (b'{"text": "\xff"}', "line 3 is not UTF-8"),
    (b'{"text": "1 word"}', "line 3: 'word' is no token id"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_is_named_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes, message: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "1"}\n\n' + line + b'\n{"text": "2"}\n')
    flags = ["--output-prefix", str(tmp_path / "out"), "--workers", "1"]
    assert main(["--input", str(path), *flags, *NULL]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"preprocess_data.py: {path}, ")
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_worker_names_the_bad_line_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "1"}\n' * 200 + b"{\n" + b'{"text": "1"}\n' * 200)
    flags = ["--output-prefix", str(tmp_path / "out"), "--workers", "2"]
    assert main(["--input", str(path), *flags, *NULL]) == 2
    err = capfd.readouterr().err
    assert "line 201 is not valid JSON" in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_keeps_what_was_there(tmp_path: Path) -> None:
    good = write_lines(tmp_path / "a.jsonl", {"text": "1 2"})
    flags = ["--output-prefix", str(tmp_path / "out"), "--workers", "1", *NULL]
    assert main(["--input", str(good), *flags]) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    good.write_bytes(good.read_bytes() + b"{\n")
    assert main(["--input", str(good), *flags]) == 2
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {**after, "a.jsonl": b""} == {**before, "a.jsonl": b""}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--input", "none.jsonl"], "--input none.jsonl is missing"),
        (["--workers", "0"], "--workers 0 must be at least 1"),
        (["--log-interval", "0"], "--log-interval 0 must be at least 1"),
        (["--tokenizer-type", "Llama2Tokenizer"], "Llama2Tokenizer needs --tokenizer-model"),
        (["--json-keys", "empty"], "holds no text under the key 'empty'"),
        (["--json-keys", "text", "empty"], "holds no text under the key 'empty'"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": "1", "empty": ""})
    base = ["--input", str(path), "--output-prefix", str(tmp_path / "out"), "--workers", "1"]
    assert main([*base, *NULL, *flags]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [path]


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert ".txt: each file is one document" in text
    assert "without .bin or .idx" in text
