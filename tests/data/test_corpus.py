"""Documents from .txt and .jsonl files, and mistakes in them named by file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.corpus import check_inputs, parse, raw_documents


def texts(path: Path, *keys: str) -> list[dict[str, list[str]]]:
    return [parse(document, keys or ("text",)) for document in raw_documents([path])]


def test_a_txt_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\n  two\n")
    assert texts(path) == [{"text": ["one\r\n\n  two\n"]}]


def test_a_jsonl_file_is_a_document_per_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "a\\nb", "id": 1}\n\n  \n{"text": ["c.", "d."]}\r\n{"text": ""}'
    )
    assert texts(path) == [{"text": ["a\nb"]}, {"text": ["c.", "d."]}, {"text": [""]}]


def test_several_keys(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"title": "t", "body": "b"}\n')
    assert texts(path, "body", "title") == [{"body": ["b"], "title": ["t"]}]


def test_files_are_read_in_the_order_given(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n')
    places = [raw.place for raw in raw_documents([tmp_path / "b.jsonl", tmp_path / "a.txt"])]
    assert places == [f"{tmp_path / 'b.jsonl'}, line 1", f"{tmp_path / 'a.txt'}"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'["a"]', "is not a JSON object"),
        (b'{"body": "a", "id": 2}', "has no key 'text'; its keys are: body, id"),
        (b'{"text": 3}', "the value of 'text' is no text but int"),
        (b'{"text": ["a", null]}', "the value of 'text' is no text but NoneType"),
        (b'{"text": "\xff"}', r"is not UTF-8 \(byte 11\)"),
        (b'{"text": "\\ud800"}', "half a surrogate pair"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=message) as caught:
        texts(path)
    assert f"{path}, line 3" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_txt_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 \(byte 4\)"):
        texts(path)


def test_unknown_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a")
    with pytest.raises(ValueError, match=r"a\.csv: give \.txt files"):
        check_inputs([tmp_path / "a.csv"])
    with pytest.raises(FileNotFoundError, match=r"b\.txt is missing"):
        check_inputs([tmp_path / "b.txt"])
