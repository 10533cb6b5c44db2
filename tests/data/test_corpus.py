"""Documents from every kind of file and data set, in order; mistakes name flag, file and line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from data import corpus, sources
from data.corpus import place_of, read_batches, texts_of
from data.sources import SourceKind, find_chunks, share_out
from tests.helpers.refusals import refused


def texts(path: Path | list[sources.SourceChunk], *keys: str) -> list[tuple[list[str], ...]]:
    names = keys or ("text",)
    batches = read_batches(find_chunks([path]) if isinstance(path, Path) else path, names)
    return [found.by_key for batch in batches for found in texts_of(batch, names)]


def test_a_txt_file_is_one_document_and_a_line_of_jsonl_is(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\n  two\n")
    assert texts(path) == [(["one\r\n\n  two\n"],)]
    path = tmp_path / "a.jsonl"
    entries = b'{"text": "a\\nb", "id": 1}\n\n  \n{"text": ["c.", "d."]}\r\n{"text": ""}'
    path.write_bytes(b"\xef\xbb\xbf" + entries)
    assert texts(path) == [(["a\nb"],), (["c.", "d."],), ([""],)]
    path.write_text('{"title": "t", "body": "b"}\n')
    assert texts(path, "body", "title") == [(["b"], ["t"])]


def zstd(content: bytes) -> bytes:
    packed: bytes = pyarrow.compress(content, codec="zstd", asbytes=True)
    return packed


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "zst": zstd}


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_compressed_files_hold_the_same_unless_they_are_damaged(
    tmp_path: Path, suffix: str
) -> None:
    """Also if several compressed files are concatenated."""
    content = b"".join(json.dumps({"text": f"é {i}"}).encode() + b"\n" for i in range(5000))
    (tmp_path / "a.jsonl").write_bytes(content)
    packed = COMPRESSORS[suffix](content[:99]) + COMPRESSORS[suffix](content[99:])
    (tmp_path / f"b.jsonl.{suffix}").write_bytes(packed)
    assert texts(tmp_path / f"b.jsonl.{suffix}") == texts(tmp_path / "a.jsonl")
    (tmp_path / f"c.txt.{suffix}").write_bytes(packed)
    assert texts(tmp_path / f"c.txt.{suffix}") == [([content.decode()],)]
    path = tmp_path / f"d.jsonl.{suffix}"
    for damaged in (packed[:-9], b"none" * 9):
        path.write_bytes(damaged)
        refused(partial(texts, path), f"{path} is damaged or truncated")


def test_a_zstd_window_that_is_too_long_is_no_damage(tmp_path: Path) -> None:
    line = b'{"text": "a"}\n'
    magic, window, last_raw = b"\x28\xb5\x2f\xfd\x00", (31 - 10) << 3, len(line) << 3 | 1
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(magic + bytes([(27 - 10) << 3]) + last_raw.to_bytes(3, "little") + line)
    assert texts(path) == [(["a"],)]
    path.write_bytes(magic + bytes([window]) + last_raw.to_bytes(3, "little") + line)
    message = refused(lambda: texts(path), "128 MiB ... zstd -dc --long=31")
    assert "damaged" not in message


def write_parquet(path: Path, values: list[object]) -> Path:
    table = pyarrow.table({"text": values, "id": list(range(len(values)))})
    parquet.write_table(table, path, row_group_size=3)
    return path


def test_a_parquet_file_is_a_document_per_row(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [f"é{i}" for i in range(10)])
    assert texts(path) == [([f"é{i}"],) for i in range(10)]
    lists = write_parquet(tmp_path / "b.parquet", [["a", "b"], []])
    assert texts(lists) == [(["a", "b"],), ([],)]
    wrong = write_parquet(tmp_path / "c.parquet", ["a", "b", "c", "d", None])
    refused(lambda: texts(wrong, "body"), "c.parquet ... 'body' ... text")
    refused(lambda: texts(wrong), "c.parquet, row 5: ... 'text'")


BINARY = (pyarrow.binary(), pyarrow.large_binary(), pyarrow.list_(pyarrow.binary()))


@pytest.mark.parametrize("kind", [*BINARY, pyarrow.dictionary(pyarrow.int8(), pyarrow.binary())])
def test_a_column_of_bytes_is_read_as_utf8(tmp_path: Path, kind: Any) -> None:
    def write(name: str, *values: bytes) -> Path:
        column = pyarrow.array([[v] for v in values] if kind == BINARY[2] else values).cast(kind)
        parquet.write_table(pyarrow.table({"text": column}), tmp_path / name)
        return tmp_path / name

    assert texts(write("a.parquet", "é".encode(), b"b")) == [(["é"],), (["b"],)]
    bad = write("b.parquet", b"fine", b"no\xff")
    refused(lambda: texts(bad), f"{bad}, row 2: ... 'text' ... UTF-8 (byte 3)")


@pytest.mark.parametrize("line", [b"x\n", b"x y\n\n  z\n", "é€😀".encode(), b"x"])
def test_a_long_text_is_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes
) -> None:
    monkeypatch.setattr(corpus, "TEXT_BYTES", 64)
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + line * 100)
    batches = list(read_batches(find_chunks([path]), ["text"]))
    assert len(batches) > 1
    assert [batch.unfinished for batch in batches] == [True] * (len(batches) - 1) + [False]
    assert sum(batch.advance for batch in batches) == path.stat().st_size
    assert "".join(found[0][0] for found in texts(path)) == (line * 100).decode()
    if line == b"x y\n\n  z\n":
        parts = [batch.content for batch in batches]
        assert all(part.endswith(b"z\n") for part in parts if isinstance(part, bytes))


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for line, message in (
        (b'{"text": "a"', "is not valid JSON"),
        (b'[{"text": "a"}, {"text": "b"}]', "not a JSON object ... jq -c '.[]'"),
        (b" [", "not valid JSON: ... jq -c '.[]'"),
        (b"{ ", "not valid JSON: ... jq -c . "),
        (b'{"body": "a", "id": 2}', "has no key 'text'; its keys are: body, id"),
        (b'{"text": 3}', "the value of 'text' is no text but int"),
        (b'{"text": ["a", null]}', "the value of 'text' is no text but NoneType"),
        (b'{"text": "\xff"}', "is not UTF-8 (byte 11)"),
        (b'{"text": "\\ud800"}', "half a surrogate pair"),
    ):
        path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
        refused(partial(texts, path), message, f"{path}, line 3")


def test_a_txt_file_that_is_not_utf8_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9")
    refused(lambda: texts(path), "a.txt is not UTF-8 (byte 4)")
    monkeypatch.setattr(corpus, "TEXT_BYTES", 64)
    path.write_bytes(b"ab\n" * 100 + b"caf\xe9")
    refused(lambda: texts(path), "a.txt is not UTF-8 (byte 304)")


def test_a_long_text_with_a_bad_part_is_left_out_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "TEXT_BYTES", 64)
    path = tmp_path / "a.txt"
    for place in (0, 150, 299):
        path.write_bytes(b"ab\n" * place + b"a\xe9\n" + b"ab\n" * (299 - place))
        (batch,) = read_batches(find_chunks([path]), ["text"], skip_malformed=True)
        assert (batch.advance, batch.unfinished) == (path.stat().st_size, False)
        notices: list[str] = []
        assert list(texts_of(batch, ["text"], notices.append)) == []
        assert notices == [f"{path} is not UTF-8 (byte {3 * place + 2}): convert it first"]


@pytest.mark.slow("reads a corpus many times")
@settings(max_examples=25, deadline=None)
@given(
    documents=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), max_size=30),
    blanks=st.booleans(),
    parts=st.integers(1, 6),
    block=st.integers(1, 60),
)
def test_shares_hold_all_documents_in_order_and_know_their_lines(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[str],
    blanks: bool,
    parts: int,
    block: int,
) -> None:
    folder = tmp_path_factory.mktemp("shares")
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in documents]
    (folder / "a.jsonl").write_text(("\n\n" if blanks else "\n").join(lines), encoding="utf-8")
    write_parquet(folder / "b.parquet", list(documents))
    for name in ("a.jsonl", "b.parquet"):
        shares = share_out(find_chunks([folder / name]), parts)
        assert len(shares) == parts
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(corpus, "BATCH_BYTES", block)
            batches = [b for share in shares for b in read_batches(share, ["text"])]
        found = [(b.chunk, item) for b in batches for item in texts_of(b, ["text"])]
        assert [item.by_key[0] for _, item in found] == [[text] for text in documents]
        step = 2 if blanks and name == "a.jsonl" else 1
        numbers = [int(place_of(chunk, item.number).split()[-1]) for chunk, item in found]
        assert numbers == [1 + step * i for i in range(len(documents))]
        total = sum(chunk.num_bytes for share in shares for chunk in share)
        assert sum(batch.advance for batch in batches) == total if documents else True


def write(path: Path, text: str = "a") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_folder_and_a_pattern_stand_for_their_files_by_name(tmp_path: Path) -> None:
    names = ["b.txt", "a.jsonl", "deep/c.jsonl.gz", "d.txt.zst", "readme.md", "e.parquet.gz"]
    for name in names:
        write(tmp_path / name)
    found = [chunk.path.removeprefix(f"{tmp_path}/") for chunk in find_chunks([tmp_path])]
    assert found == ["a.jsonl", "b.txt", "d.txt.zst", "deep/c.jsonl.gz"]
    assert [chunk.path for chunk in find_chunks([f"{tmp_path}/*.txt"])] == [f"{tmp_path}/b.txt"]


def test_what_is_no_source_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "bad.parquet")
    (tmp_path / "empty").mkdir()
    refused(lambda: find_chunks([write(tmp_path / "a.csv")]), "a.csv: give .txt (one document)")
    refused(lambda: find_chunks([tmp_path / "none.txt"]), "none.txt is missing")
    refused(lambda: find_chunks([tmp_path / "empty"]), "holds no file that is")
    refused(lambda: find_chunks([tmp_path / "*.jsonl"]), "*.jsonl matches no file")
    refused(lambda: find_chunks([tmp_path / "bad.parquet"]), "bad.parquet is not a Parquet file")


@pytest.mark.slow("imports datasets")
def test_a_data_set_on_disk(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": [str(i) for i in range(50)], "id": [1] * 50})
    rows.save_to_disk(tmp_path / "alone")
    splits = datasets.DatasetDict({"train": rows, "held": rows.select(range(3))})
    splits.save_to_disk(tmp_path / "splits")
    (chunk,) = find_chunks([tmp_path / "alone"])
    assert chunk.kind is SourceKind.HUGGING_FACE
    found = [texts(share) for share in share_out([chunk], 4)]
    assert all(found)
    assert [text for share in found for text in share] == [([str(i)],) for i in range(50)]
    assert texts(find_chunks([tmp_path / "splits"], split="held")) == [([n],) for n in "012"]
    message = "'test': give --dataset-split, one of train"
    refused(lambda: find_chunks([tmp_path / "splits"], split="test"), message)
    refused(lambda: list(read_batches([chunk], ["body"])), "'body' ... text, id")


@pytest.mark.slow("imports datasets")
def test_a_data_set_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load(name: str, config: str | None, *, split: str) -> datasets.Dataset:
        if name == "nobody/nothing":
            raise ConnectionError("no way\nto the hub")
        return datasets.Dataset.from_dict({"text": [f"{name} {config} {split}"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    chunks = find_chunks(["some/corpus-1.0"], config="en", split="held")
    assert texts(chunks) == [(["some/corpus-1.0 en held"],)]
    refused(lambda: find_chunks(["nobody/nothing"]), "datasets does not find it: no way")
